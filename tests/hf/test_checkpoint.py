"""What a folder holds, found out from its files before a model is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from locant.hf import checkpoint
from locant.hf.checkpoint import Weights, check_counts, check_name, config_of, is_path, shards, weights_of
from locant.hf.safetensors_header import Entry

TENSORS = {"a.0.w": torch.zeros(2, 5), "b": torch.zeros(3, dtype=torch.float16)}


def index(folder, weight_map, name="model.safetensors.index.json", **rest):
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **rest}))
    return path


def sharded(folder, **announced):
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index(folder, {**{name: f"{name}.safetensors" for name in TENSORS}, **announced})


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "."])
def test_paths_never_go_to_the_hub(name):
    assert is_path(name)
    with pytest.raises(ValueError, match="there is no folder" if name != "." else "has no config"):
        check_name(name)


def test_names_of_the_hub_and_folders(tmp_path):
    for name in ("owner/model", "gpt2"):
        assert not is_path(name)
        check_name(name)
    with pytest.raises(ValueError, match="there is no folder owner/model"):
        check_name(Path("owner/model"))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text("{}")
    check_name(tmp_path / "inner")
    check_name(tmp_path, "inner")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_name(tmp_path)
    with pytest.raises(ValueError, match="is not a folder; name the folder"):
        check_name(tmp_path / "inner" / "config.json")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"attn_implementation": "owner/kernel"}, "attn_implementation is 'owner/kernel', code from the hub"),
        ({"inner": [{"_attn_implementation": "a/b"}]}, "_attn_implementation is 'a/b'"),
        ({"inner": {"experts_implementation": {"": "a/b"}}}, "experts_implementation is"),
        ({"inner": {"transformers_weights": "x"}}, "transformers_weights names another file"),
    ],
)
def test_a_config_that_asks_for_code_or_other_files_is_refused(entry, words, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "attn_implementation": "sdpa", "of": "a/b"})
    )
    assert config_of(tmp_path) == {"model_type": "bert", "attn_implementation": "sdpa", "of": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **entry}))
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [("adapter_config.json", "merge the adapter with PEFT"), ("shard-0-model-1.safetensors", "save the whole model")],
)
def test_files_that_transformers_would_open_beside_the_weights(file, words, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).touch()
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path)


def test_a_name_that_is_nowhere(tmp_path, monkeypatch):
    def missing(name, file, **where):
        raise OSError("offline")

    monkeypatch.setattr(checkpoint, "cached_file", missing)
    with pytest.raises(OSError, match="there is no folder owner/none, and no model of that name could be fetched"):
        config_of("owner/none")
    with pytest.raises(OSError, match=r"^offline$"):
        config_of(tmp_path)
    assert checkpoint.file_of("owner/none", "x") is None


def test_counts_are_bounded_by_the_weights():
    many = Weights(9, {str(n): Entry("F32", (1, 2), 0, 8) for n in range(2000)})
    wide = Weights(9, {"head": Entry("F32", (5000, 2), 0, 8)})
    for data, weights in (
        ({"num_hidden_layers": 1000, "num_labels": 1000, "vocab_size": 10**9}, None),
        ({"n_layer": 2000, "inner": [{"depth": 2000}]}, many),
        ({"num_labels": 5000}, wide),
        ({"num_hidden_layers": "many", "layers_of": 10**9}, None),
    ):
        check_counts(data, weights, "it")
    for data, weights, most in (
        ({"num_hidden_layers": 1001}, None, "1,000"),
        ({"num_layers": -1001}, None, "1,000"),
        ({"layers": 1e9}, None, "1,000"),
        ({"inner": {"depths": 2001}}, many, "2,000"),
        ({"blocks": 5000}, wide, "1,000"),
        ({"num_labels": 5001}, wide, "5,000"),
    ):
        with pytest.raises(ValueError, match=rf"it: \w+ in config\.json is .*; the weights allow {most} at most"):
            check_counts(data, weights, "it")


def test_numbers_of_weights():
    found = Weights(99, {"a": Entry("F32", (2, 5), 0, 40), "b": Entry("F16", (7,), 40, 14)})
    assert (found.count, found.widest) == (17, 7)
    assert (Weights(99, {}).count, Weights(99, {}).widest) == (99, 99)


def test_one_file_or_shards(tmp_path):
    assert weights_of(tmp_path) is None
    sharded(tmp_path)
    found = weights_of(tmp_path)
    assert (found.size, set(found.tensors)) == (46, set(TENSORS))
    save_file({"alone": torch.zeros(1)}, tmp_path / "model.safetensors")  # comes first
    assert list(weights_of(tmp_path).tensors) == ["alone"]


def test_pickles_have_a_size_alone(tmp_path):
    for name, size in (("a.bin", 30), ("b.bin", 12)):
        (tmp_path / name).write_bytes(bytes(size))
    index(tmp_path, {"x": "a.bin", "y": "b.bin", "z": "a.bin", "w": "none.bin"}, "pytorch_model.bin.index.json")
    assert weights_of(tmp_path) == Weights(42, {})
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(7))
    assert weights_of(tmp_path) == Weights(7, {})


@pytest.mark.parametrize(
    ("announced", "words"),
    [
        ({"c": "b.safetensors"}, "and the index do not agree about 'c'"),
        ({"b": "a.0.w.safetensors"}, "and the index do not agree about 'b'"),
        ({"c": "c.safetensors"}, "names 'c.safetensors', which is not there"),
    ],
)
def test_an_index_that_does_not_fit(announced, words, tmp_path):
    sharded(tmp_path, **announced)
    with pytest.raises(ValueError, match=words):
        weights_of(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    sharded(tmp_path)
    save_file({**TENSORS}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"do not agree about 'a\.0\.w'"):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"weight_map": {"a": "b"}}, {"metadata": 3, "weight_map": {"a": "b"}}, {"metadata": {}},
        {"metadata": {}, "weight_map": {}}, {"metadata": {}, "weight_map": ["a"]},
    ],
)  # fmt: skip
def test_an_index_has_two_objects(content, tmp_path):
    (tmp_path / "index").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must have an object 'metadata' and an object 'weight_map'"):
        shards(tmp_path / "index")


@pytest.mark.parametrize("file", ["../b", "/b", "x/b", "", ".", "..", 3])
def test_files_of_an_index_are_beside_it(file, tmp_path):
    with pytest.raises(ValueError, match="expected the name of a file in the same folder"):
        shards(index(tmp_path, {"a": "b", "c": file}))
    assert shards(index(tmp_path, {"a": "b", "c": "d", "e": "b"})) == {"b": {"a", "e"}, "d": {"c"}}
