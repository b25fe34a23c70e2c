"""Weights: files whose header is wrong, and indexes that point elsewhere."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import locant
from locant.hf import memory
from reliability.hostile.case import Attack, Cases, edit, model_folder, setting, without

CASES = Cases("weights")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def with_bytes(content: bytes) -> Attack:
    """Opens a model with another file of weights."""

    def attack(folder: Path) -> object:
        (model_folder(folder) / FILE).write_bytes(content)
        return locant.load(folder)

    return attack


def with_header(change) -> Attack:
    """The header is changed in place; `change` may return another object for it, or bytes."""

    def attack(folder: Path) -> object:
        path = model_folder(folder) / FILE
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header = change(header) or header
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
        return locant.load(folder)

    return attack


def first(**entries):
    """A change of the first tensor of a file."""

    def change(header) -> None:
        name = next(name for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"][0] == 0)
        header[name].update(entries)

    return change


HEADER = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
for name, content, says in [
    ("an empty file", b"", "not a whole safetensors file"),
    ("7 bytes", b"\0" * 7, "not a whole safetensors file"),
    ("only zeros", b"\0" * 64, "is damaged"),
    ("a header of 2^63", struct.pack("<Q", 2**63) + HEADER, "announce a header"),
    ("a header of 2^64 − 1", b"\xff" * 8 + HEADER, "announce a header"),
    ("a header longer than the file", struct.pack("<Q", 10**6) + HEADER, "announce a header"),
    ("a header of no tensors", struct.pack("<Q", 2) + b"{}", "no tensors"),
    ("a header that is a list", struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
    ("a header that is not JSON", struct.pack("<Q", 9) + b"{'x': 1}.", "is damaged"),
    ("a header that is not UTF-8", struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "is damaged"),
    ("a header nested deeply", struct.pack("<Q", 100_000) + b"[" * 100_000, "nested too deeply"),
    ("a tensor twice", struct.pack("<Q", 2 * len(HEADER)) + HEADER[:-1] + b", " + HEADER[1:] + b" \0\0\0\0", "twice"),
    ("a pickle", b"\x80\x04\x95", "not a whole safetensors file"),
]:
    CASES.add(name, says, with_bytes(content))
for name, change, says in [
    ("a shape of a quintillion", first(shape=[10**9, 10**9]), "shape"),
    ("a negative shape", first(shape=[-1]), "shape"),
    ("a shape of true", first(shape=[True]), "shape"),
    ("a shape of text", first(shape="x"), "shape"),
    ("a shape of 2^63", first(shape=[2**63]), "shape"),
    ("an unknown dtype", first(dtype="OBJECT"), "dtype"),
    ("a dtype that is a list", first(dtype=["F32"]), "dtype"),
    ("a dtype of another size", first(dtype="F64"), "F64"),
    ("offsets back to front", first(data_offsets=[4, 0]), "bytes"),
    ("negative offsets", first(data_offsets=[-4, 0]), "data_offsets"),
    ("one offset", first(data_offsets=[0]), "data_offsets"),
    ("offsets of floats", first(data_offsets=[0.0, 4.0]), "data_offsets"),
    ("offsets beyond the end", first(data_offsets=[10**15, 10**15 + 4], shape=[1]), "begins at byte"),
    (
        "tensors that overlap",
        lambda h: h.update(x={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
        "begins at byte",
    ),
    ("a tensor that is a number", lambda h: h.update(x=5), "must have dtype, shape"),
    ("a tensor without a shape", lambda h: h.update(x={"dtype": "F32"}), "must have dtype, shape"),
    ("all tensors gone", lambda h: b"{}", "no tensors"),
]:
    CASES.add(name, says, with_header(change))


def with_weights(change, spec: str = "tisa:kernels=3", auto=None) -> Attack:
    """Opens a swapped model with changed weights."""

    def attack(folder: Path) -> object:
        path = model_folder(folder, "bert", spec) / FILE
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})
        return locant.load(folder, auto)

    return attack


SCHEME = "encoder.layer.0.attention.self.locant.offset"
for name, change, says in [
    ("a table of a scheme missing", lambda w: w.pop(SCHEME), "missing_keys"),
    ("a table of a scheme too many", lambda w: w.update({SCHEME + "s": torch.zeros(3)}), "unexpected_keys"),
    ("a scheme too many", lambda w: w.update({"pooler.locant.offset": torch.zeros(4, 3)}), "unexpected_keys"),
    ("a table of another shape", lambda w: w.update({SCHEME: torch.zeros(1, 3)}), "locant.offset [1, 3]"),
    ("a table of whole numbers", lambda w: w.update({SCHEME: w[SCHEME].long()}), "I64"),
    ("a weight below the head missing", lambda w: w.pop("encoder.layer.1.output.dense.weight"), "missing_keys"),
    (
        "native positions as well",
        lambda w: w.update({"embeddings.position_embeddings.weight": torch.zeros(40, 32)}),
        "unexpected_keys",
    ),
]:
    CASES.add(name, says, with_weights(change))


def sharded(change) -> Attack:
    """Opens a model whose weights are in a file with an index."""

    def attack(folder: Path) -> object:
        model_folder(folder)
        (folder / FILE).rename(folder / "a.safetensors")
        names = list(load_file(folder / "a.safetensors"))
        data = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        (folder / INDEX).write_text(json.dumps(data))
        change(folder, names)
        return locant.load(folder)

    return attack


def index(change):
    """The same with a changed index."""
    return sharded(lambda folder, names: edit(folder / INDEX, change))


def pointing(file: str):
    """A change of the file of one tensor."""

    def change(data) -> None:
        data["weight_map"][next(iter(data["weight_map"]))] = file

    return change


CASES.add("an index that points above", "in the same folder", index(pointing("../a.safetensors")))
CASES.add("an index that points to the root", "in the same folder", index(pointing("/etc/passwd")))
CASES.add("an index that points to a number", "in the same folder", index(pointing(7)))  # type: ignore[arg-type]
CASES.add("an index with a missing file", "which is not there", index(pointing("b.safetensors")))
CASES.add("an index without a map", "weight_map", index(without("weight_map")))
CASES.add("an index whose map is a list", "weight_map", index(setting([], "weight_map")))
CASES.add("an index without metadata", "metadata", index(without("metadata")))
CASES.add("an index that announces more", "do not agree", index(setting("a.safetensors", "weight_map", "more")))
CASES.add("an index that is not JSON", "is damaged", sharded(lambda folder, names: (folder / INDEX).write_text("{")))
CASES.add(
    "an index with a pipe",
    "which is not there",
    sharded(
        lambda folder, names: (os.mkfifo(folder / "b.safetensors"), edit(folder / INDEX, pointing("b.safetensors")))
    ),
)


def special(make) -> Attack:
    """Opens a model with something else in the place of its weights."""

    def attack(folder: Path) -> object:
        path = model_folder(folder) / FILE
        content = path.read_bytes()
        path.unlink()
        make(path, content)
        return locant.load(folder)

    return attack


def zipped(path: Path, content: bytes) -> None:
    """Writes a zip file."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model", content)


def trailing(path: Path, content: bytes) -> None:
    """Adds a terabyte, all of it a hole."""
    path.write_bytes(content)
    os.truncate(path, 10**12)


CASES.add("cut in the middle", "incomplete", special(lambda path, content: path.write_bytes(content[:-1000])))
CASES.add("a terabyte of zeros after them", "incomplete", special(trailing))
CASES.add("a zip file", "safetensors", special(zipped))
CASES.add("a pipe", "safetensors", special(lambda path, content: os.mkfifo(path)))
CASES.add("a folder", "safetensors", special(lambda path, content: path.mkdir()))
CASES.add("none", "safetensors", special(lambda path, content: None))


def weighed(folder: Path) -> object:
    """Weighs a model without opening it."""
    (folder / FILE).write_bytes(b"\xff" * 8)
    return memory.part_that_fits(folder)


CASES.add("weighed before they are opened", "announce a header", weighed)
