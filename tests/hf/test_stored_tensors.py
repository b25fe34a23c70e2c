"""Tensors of files and folders of weights: every format, and files that must be refused."""

import json
import os
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from locant.hf import stored_tensors as module
from locant.hf.stored_tensors import stored_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def read(path):
    return {name: each.read(name) for name, each in stored_tensors(path).items()}


def safe(folder):
    save_file(TENSORS, folder / "model.safetensors")


def safe_shards(folder):
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index(folder / "model.safetensors.index.json", ".safetensors")


def pickled(folder):
    torch.save(TENSORS, folder / "pytorch_model.bin")


def pickled_as_before_2020(folder):
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pickled_shards(folder):
    for name, tensor in TENSORS.items():
        torch.save({name: tensor}, folder / f"{name}.bin")
    index(folder / "pytorch_model.bin.index.json", ".bin")


def index(path, ending):
    path.write_text(json.dumps({"metadata": {}, "weight_map": {name: name + ending for name in TENSORS}}))


@pytest.mark.parametrize("write", [safe, safe_shards, pickled, pickled_as_before_2020, pickled_shards])
def test_formats_of_a_folder(tmp_path, write):
    write(tmp_path)
    assert {name: each.spelt for name, each in stored_tensors(tmp_path).items()} == {"a": "2 × 3, F32", "b": "3, BF16"}
    found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


def test_pickles_that_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.bin"
    view = {"a": torch.ones(1).expand(2**40)}
    for content, error in (
        ({"a": Code()}, "holds more than tensors"),
        ([torch.ones(2)], "expected a dict of tensors"),
        ({"epoch": 3}, "holds no tensors"),
        ({"a": torch.eye(3).to_sparse()}, "is not a plain tensor"),
        ({"a": torch.ones(1).expand(2**20)}, "is not a plain tensor"),
        (view, "numbers"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=error):
            read(path)
    assert not (tmp_path / "was-run").exists()
    path.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"x\.bin"):
        read(path)


def test_a_pickle_that_decompresses_is_refused(tmp_path):
    path = tmp_path / "x.bin"
    torch.save({"a": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ValueError, match="decompresses from"):
        stored_tensors(tmp_path / "y.bin")


def test_a_pickle_larger_than_memory_is_refused(tmp_path, monkeypatch):
    pickled(tmp_path)
    monkeypatch.setattr(module.machine_memory, "available", lambda: 100)
    with pytest.raises(ValueError, match="of memory is free"):
        stored_tensors(tmp_path)


def test_a_huge_tensor_is_refused_before_it_is_read(tmp_path):
    """A file with a hole of 4 TB, which takes no disk space."""
    path, rows = tmp_path / "x.safetensors", 2**20
    header = json.dumps({"wpe": {"dtype": "F32", "shape": [rows, rows], "data_offsets": [0, 4 * rows**2]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 4 * rows**2)
    with pytest.raises(ValueError, match="1,099,511,627,776 numbers"):
        read(path)


def test_damaged_and_missing_files(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 16)
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "x.txt").write_text("words")
    for name, error in (
        ("x.safetensors", "announce a header"),
        ("pipe.safetensors", "is not a regular file"),
        ("x.txt", "no file of weights by its name"),
        ("nowhere.safetensors", "there is no file or folder"),
        (".", "has no weights; expected one of model.safetensors"),
    ):
        with pytest.raises(ValueError, match=error):
            stored_tensors(tmp_path / name)


@pytest.mark.parametrize("write", [safe_shards, pickled_shards])
def test_a_shard_that_is_not_there(tmp_path, write):
    write(tmp_path)
    next(path for path in tmp_path.iterdir() if path.stem == "b").unlink()
    with pytest.raises(ValueError, match="which is not there"):
        stored_tensors(tmp_path)
