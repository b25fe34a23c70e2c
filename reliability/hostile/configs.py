"""Configs that ask for more than the weights have, or for code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import locant
from reliability.hostile.case import Attack, Cases, edit, model_folder, setting, without

CASES = Cases("config")
BILLION = 10**9
RELATIVE_KEY = Path(__file__).parents[2] / "tests" / "hf" / "data" / "relative_key" / "bert_relative_key"


def with_config(change, kind: str = "bert", spec: str = "") -> Attack:
    """Opens a model with a changed config."""

    def attack(folder: Path) -> object:
        model_folder(folder, kind, spec)
        edit(folder / "config.json", change)
        return locant.load(folder)

    return attack


def with_file(content: bytes) -> Attack:
    """Opens a model with another config.json."""

    def attack(folder: Path) -> object:
        (model_folder(folder) / "config.json").write_bytes(content)
        return locant.load(folder)

    return attack


for kind, name, says in [
    ("bert", "vocab_size", "word_embeddings"),
    ("bert", "hidden_size", "numbers"),
    ("bert", "num_hidden_layers", "num_hidden_layers"),
    ("bert", "intermediate_size", "intermediate"),
    ("bert", "max_position_embeddings", "position_embeddings"),
    ("bert", "type_vocab_size", "token_type"),
    ("bert", "num_attention_heads", "multiple of the number of attention"),
    ("bert", "num_labels", "num_labels"),
    ("llama", "num_hidden_layers", "num_hidden_layers"),
    ("llama", "head_dim", "proj"),
    ("llama", "num_key_value_heads", "proj"),
    ("gpt2", "n_layer", "n_layer"),
    ("gpt2", "n_positions", "wpe"),
    ("t5", "num_layers", "num_layers"),
    ("t5", "num_decoder_layers", "num_decoder_layers"),
    ("t5", "relative_attention_num_buckets", "relative_attention_bias"),
    ("t5", "d_ff", "numbers"),
    ("vit", "image_size", "position_embeddings"),
    ("modernbert", "num_hidden_layers", "num_hidden_layers"),
]:
    CASES.add(f"{kind}, {name} of a billion", says, with_config(setting(BILLION, name), kind))
for name, says in [
    ("vocab_size", "word_embeddings"),
    ("num_hidden_layers", "num_hidden_layers"),
    ("hidden_size", "head_dim of encoder.layer.0.attention.self"),
    ("max_position_embeddings_before_locant", "position_ids"),
]:
    CASES.add(
        f"swapped, {name} of a billion", says, with_config(setting(BILLION, "locant", name), "bert", "tisa:kernels=3")
    )
CASES.add("900 layers", "parts", with_config(setting(900, "num_hidden_layers")))
CASES.add(
    "swapped, a layer more",
    "has no encoder.layer.2",
    with_config(setting(3, "locant", "num_hidden_layers"), "bert", "alibi"),
)
for name, value, says in [
    ("hidden_size", "big", "hidden_size"),
    ("hidden_size", None, "hidden_size"),
    ("hidden_size", [32], "hidden_size"),
    ("hidden_size", -32, "cannot be opened"),
    ("hidden_size", 1e308, "hidden_size"),
    ("num_attention_heads", 0, "cannot be opened"),
    ("num_attention_heads", 5, "multiple"),
    ("num_hidden_layers", -BILLION, "num_hidden_layers"),
    ("vocab_size", -5, "cannot be opened"),
    ("hidden_act", "os.system", "os.system"),
    ("model_type", ["bert"], "cannot be opened"),
    ("model_type", "evil", "evil"),
    ("model_type", 5, "model type"),
    ("architectures", "BertModel", "architectures"),
    ("architectures", [5], "architectures"),
    ("architectures", ["LlamaModel"], "LlamaModel"),
    ("architectures", ["pipeline"], "pipeline"),
    ("architectures", ["Trainer"], "Trainer"),
    ("attn_implementation", "evil/kernel", "evil/kernel"),
    ("_attn_implementation", "evil/kernel", "evil/kernel"),
    ("transformers_weights", "../../x.safetensors", "transformers_weights"),
    ("dtype", "os", "os"),
    ("num_labels", -BILLION, "num_labels"),
]:
    CASES.add(f"{name} is {value!r}", says, with_config(setting(value, name)))
CASES.add(
    "an unknown class with code",
    "custom code",
    with_config(
        lambda data: data.update(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    ),
)
CASES.add("no model_type", "model_type", with_config(without("model_type")))
CASES.add("rope_parameters of llama", "evil", with_config(setting({"rope_type": "evil"}, "rope_parameters"), "llama"))
for name, content, says in [
    ("empty", b"", "is damaged"),
    ("null", b"null", "expected a JSON object"),
    ("a list", b"[]", "expected a JSON object"),
    ("nested deeply", b"[" * 200_000, "nested too deeply"),
    ("objects nested deeply", b'{"a":' * 100_000, "nested too deeply"),
    ("not UTF-8", b'{"a": "\xff\xfe"}', "utf-8"),
    ("a name twice", b'{"model_type": "bert", "model_type": "locant"}', "twice"),
    ("a number of 5,000 digits", b'{"hidden_size": ' + b"9" * 5000 + b"}", "is damaged"),
    ("half", b'{"model_type": "be', "is damaged"),
    ("a pickle", pickle.dumps({"model_type": "bert"}), "is damaged"),
]:
    CASES.add(f"config.json is {name}", says, with_file(content))


def sparse(folder: Path) -> object:
    """Opens a model whose config has a terabyte, most of it a hole."""
    model_folder(folder)
    os.truncate(folder / "config.json", 10**12)
    return locant.load(folder)


def special(make) -> Attack:
    """Opens a model whose config.json is not a file."""

    def attack(folder: Path) -> object:
        (model_folder(folder) / "config.json").unlink()
        make(folder / "config.json")
        return locant.load(folder)

    return attack


CASES.add("config.json of a terabyte", "bytes", sparse)
CASES.add("config.json is a pipe", "config.json", special(os.mkfifo))
CASES.add("config.json is a folder", "config.json", special(os.mkdir))
CASES.add("config.json is a device", "config.json", special(lambda path: path.symlink_to("/dev/zero")))
CASES.add("config.json is a loop of links", "config.json", special(lambda path: path.symlink_to(path)))
CASES.add("a folder that is not there", "there is no folder", lambda folder: locant.load(folder / "none"))
CASES.add("a path with a null byte", "there is no folder", lambda folder: locant.load("a\0b"))
CASES.add(
    "a folder in a file",
    "not a folder",
    lambda folder: (Path(folder / "file").write_text(""), locant.load(folder / "file")),
)
CASES.add(
    "code is trusted", "never runs code", lambda folder: locant.load(model_folder(folder), trust_remote_code=True)
)


def adapter(folder: Path) -> object:
    """transformers would load the adapter on top of the model, from wherever it says."""
    (model_folder(folder) / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    return locant.load(folder)


def distributed(folder: Path) -> object:
    """transformers would open this file instead of the weights that were checked."""
    model_folder(folder)
    shutil.copy(folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors")
    return locant.load(folder)


class Evil:
    """Unpickled, it writes a file; the runner looks for it."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


def pickled(kind: str) -> Attack:
    """Opens a model whose weights are a pickle with code."""

    def attack(folder: Path) -> object:
        model_folder(folder)
        if kind == "relative_key":
            edit(folder / "config.json", setting("relative_key", "position_embedding_type"))
        (folder / "model.safetensors").unlink()
        torch.save({"x": Evil()}, folder / "pytorch_model.bin")
        return locant.load(folder)

    return attack


def old_tables(change) -> Attack:
    """Opens a checkpoint of transformers 4 with changed weights."""

    def attack(folder: Path) -> object:
        shutil.copytree(RELATIVE_KEY, folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return locant.load(folder)

    return attack


def one_row(weights) -> None:
    """Leaves one row of the last table; copying it would fill a whole table with it."""
    name = [name for name in weights if name.endswith("distance_embedding.weight")][-1]
    weights[name] = weights[name][:1].clone()


CASES.add("an adapter beside it", "adapter_config.json", adapter)
CASES.add("shards beside it", "shards of a distributed training", distributed)
CASES.add("a pickle that runs code", "a pickle that holds more than tensors", pickled("bert"))
CASES.add("a pickle of an old model that runs code", "a pickle that holds more than tensors", pickled("relative_key"))
CASES.add("an old table with one row", "has the shape [1,", old_tables(one_row))
CASES.add(
    "an old model without tables",
    "distance_embedding",
    old_tables(lambda weights: [weights.pop(name) for name in list(weights) if "distance" in name]),
)
