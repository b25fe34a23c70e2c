"""Models that do not fit into memory: weighed before they are opened, and opened in part."""

import pytest
import torch
from transformers import AutoModel

import locant
from locant.analysis import inspection
from locant.hf import memory
from tests import hf_models
from tests.command_line import locant_command

KINDS = ["bert", "gpt2", "llama", "qwen3", "modernbert", "t5", "opt"]
DEEP = {"gpt2": {"n_layer": 6}, "t5": {"num_layers": 6, "num_decoder_layers": 6}}


def deep(kind, **changes):
    return hf_models.make(kind, **{**DEEP.get(kind, {"num_hidden_layers": 6}), **changes})


def size(model):
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in model.parameters()}.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_weights_are_weighed(kind, shards, tmp_path):
    model = deep(kind)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    weights = memory.weigh(tmp_path)
    assert weights.total == size(model)
    assert len(weights.layers) == 6
    assert 0.4 * weights.total < sum(weights.layers) < weights.total


def test_what_is_not_safetensors_is_weighed_as_a_whole(tmp_path):
    model = deep("bert")
    model.config.save_pretrained(tmp_path)
    assert memory.weigh(tmp_path) is None
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    weights = memory.weigh(tmp_path)
    assert weights.layers == ()
    assert size(model) < weights.total < 2 * size(model)


def test_as_many_layers_as_fit(tmp_path, monkeypatch):
    deep("bert").save_pretrained(tmp_path)
    weights = memory.weigh(tmp_path)
    rest, layer = weights.total - sum(weights.layers), weights.layers[0]

    def fits(free):
        monkeypatch.setattr(memory, "available", lambda: free)
        return memory.part_that_fits(tmp_path)

    assert fits(None) is None
    assert fits(int(weights.total / memory.SHARE) + 1) is None
    assert fits(int(weights.total / memory.SHARE) - 2) == memory.Part(5, 6)
    assert fits(int((rest + 2 * layer) / memory.SHARE) + 1) == memory.Part(2, 6)
    with pytest.raises(ValueError, match=r"take 0\.\d MiB, but only 0\.\d MiB of memory is free"):
        fits(int((rest + layer) / memory.SHARE) - 2)


def test_memory_of_this_machine_is_read():
    assert 2**20 < memory.available() < 2**50


@pytest.mark.parametrize("kind", [*KINDS, "bart"])
@pytest.mark.parametrize("spec", [None, "tisa"])
def test_the_first_layers_are_those_of_the_whole(kind, spec, tmp_path):
    model = hf_models.make(kind) if kind == "bart" else deep(kind)
    if spec is not None:
        locant.swap(model, spec, keep_native=kind == "bart")
    model.save_pretrained(tmp_path)
    part = locant.load(tmp_path, layers=1)
    ours, theirs = part.state_dict(), model.state_dict()
    assert len(ours) < len(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert locant.native(part).kind == locant.native(model).kind
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        hidden, whole = ((x.get_encoder() if hasattr(x, "encoder") and hasattr(x, "decoder") else x)(
            input_ids=ids, output_hidden_states=True).hidden_states for x in (part, model))  # fmt: skip
    assert torch.equal(hidden[0], whole[0])
    with pytest.raises(ValueError, match="layers must be from 1 to"):
        locant.load(tmp_path, layers=7)


@pytest.mark.parametrize("spec", [None, "tisa"])
def test_inspect_makes_the_parts_that_can_be_made(spec, tmp_path, monkeypatch):
    for name, value in {"LENGTH": 24, "SEQUENCES": 6, "PROBE_LENGTH": 16, "PROBE_STEPS": 5}.items():
        monkeypatch.setattr(inspection, name, value)
    model = deep("gpt2")
    if spec is not None:
        locant.swap(model, spec)
    model.save_pretrained(tmp_path / "model")
    weights = memory.weigh(tmp_path / "model")
    free = int((weights.total - sum(weights.layers[3:])) / memory.SHARE) + 1
    monkeypatch.setattr(memory, "available", lambda: free)
    asked = []
    monkeypatch.setattr(
        "locant.verbs.inspecting.load", lambda *args, **given: asked.append(given) or locant.hf.load(*args, **given)
    )
    done = locant_command("inspect", tmp_path / "model", "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert asked == [{"layers": 3}]
    said = " ".join(done.output.split())
    assert "not enough memory" in said
    assert "the first 3 of 6 layers" in said
    assert "left out (behaviour, probes)" in said
    tables = {path.name[3:] for path in (tmp_path / "page-csv").glob("*.csv")}
    assert {"translation-invariance.csv", "heads.csv", "slopes.csv"} <= tables
    assert not any("probe" in name for name in tables)

    monkeypatch.setattr(memory, "available", lambda: 1000)
    done = locant_command("inspect", tmp_path / "model", "-o", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "of memory is free" in " ".join(done.output.split())


def test_what_is_seen_of_the_first_layers_is_what_is_seen_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "SEQUENCES", 6)
    model = deep("llama")
    model.save_pretrained(tmp_path)
    tokens = inspection.Tokens(None, "", 60)
    found = [
        list(inspection.inspect(each, tokens, "x", of=6))[-1][1]
        for each in (AutoModel.from_pretrained(tmp_path), locant.load(tmp_path, layers=2))
    ]
    assert [len(each.layers) for each in found] == [6, 2]
    for whole, part in zip(found[0].layers, found[1].layers, strict=False):
        assert torch.equal(whole.logit.nan_to_num(), part.logit.nan_to_num())
    rows = {(row.layer, row.step): row.values for row in found[0].variances.rows}
    assert found[1].variances.rows
    assert all(rows[row.layer, row.step] == pytest.approx(row.values) for row in found[1].variances.rows)
