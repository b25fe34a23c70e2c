"""Headers of safetensors files: read as safetensors reads them, and refused where it would be wrong to trust them."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from locant.hf import safetensors_header
from locant.hf.safetensors_header import Entry, read_header

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
WHOLE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, content=b"", *, announced=None):
    """A file with a header, as an object or as bytes, and some bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if announced is None else announced) + text + content)
    return path


@pytest.mark.parametrize("name", DTYPES)
def test_a_file_of_safetensors(name, tmp_path):
    path = tmp_path / "it.safetensors"
    save_file(
        {"a": torch.zeros(2, 3, dtype=DTYPES[name]), "b": torch.zeros((), dtype=torch.float32)}, path, {"of": "x"}
    )
    found = read_header(path)
    size = torch.empty((), dtype=DTYPES[name]).element_size()
    assert {key: (entry.dtype, entry.shape, entry.size, entry.count) for key, entry in found.items()} == {
        "a": (name, (2, 3), 6 * size, 6), "b": ("F32", (), 4, 1),
    }  # fmt: skip
    assert {entry.start for entry in found.values()} in ({0, 4}, {0, 6 * size})


def test_numbers_of_less_than_a_byte(tmp_path):
    header = {
        "a": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [3, 6]},
        "nothing": {"dtype": "F64", "shape": [0, 9], "data_offsets": [3, 3]},
    }
    found = read_header(write(tmp_path / "it", header, bytes(6)))
    assert found["b"] == Entry("F6_E2M3", (4,), 3, 3)
    assert (found["nothing"].count, found["nothing"].size) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F8_E8M0", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4)],
)
def test_dtypes_that_torch_does_not_save(dtype, bits, tmp_path):
    entry = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, bits]}
    assert read_header(write(tmp_path / "it", {"a": entry}, bytes(bits)))["a"] == Entry(dtype, (2, 4), 0, bits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F31"}, "has the dtype 'F31'; expected one of F4, "),
        ({"dtype": ["F32"]}, r"has the dtype \['F32'\]"),
        ({"shape": [2, -3]}, r"has the shape \[2, -3\]; expected whole numbers"),
        ({"shape": [2, 3.0]}, r"has the shape \[2, 3.0\]"),
        ({"shape": [6, True]}, r"has the shape \[6, True\]"),
        ({"shape": 6}, "has the shape 6"),
        ({"shape": [2**63]}, "expected whole numbers"),
        ({"shape": [2, 2]}, r"has the shape \[2, 2\] in F32, but 24 bytes"),
        ({"dtype": "F64"}, "in F64, but 24 bytes"),
        ({"data_offsets": [0, 24, 24]}, r"has data_offsets \[0, 24, 24\]; expected two whole numbers"),
        ({"data_offsets": [-24, 0]}, "expected two whole numbers"),
        ({"data_offsets": [24, 0]}, "but -24 bytes"),
        ({"data_offsets": [1, 25]}, "'a' begins at byte 1 of the tensors, expected 0"),
    ],
)
def test_a_damaged_entry_is_named(change, words, tmp_path):
    assert list(read_header(write(tmp_path / "it", {"a": WHOLE}, bytes(24)))) == ["a"]
    with pytest.raises(ValueError, match=f"it.*{words}"):
        read_header(write(tmp_path / "it", {"a": {**WHOLE, **change}}, bytes(24)))


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_entry_needs_all_three(missing, tmp_path):
    entry = {name: value for name, value in WHOLE.items() if name != missing}
    for each in (entry, 3):
        with pytest.raises(ValueError, match="'a' must have dtype, shape and data_offsets, got"):
            read_header(write(tmp_path / "it", {"a": each}, bytes(24)))


@pytest.mark.parametrize(
    ("content", "other", "words"),
    [
        (23, None, "header has 24 bytes of tensors, the file 23"),
        (25, None, "header has 24 bytes of tensors, the file 25"),
        (48, [23, 47], "'b' begins at byte 23 of the tensors, expected 24"),
        (48, [25, 49], "'b' begins at byte 25 of the tensors, expected 24"),
        (48, [0, 24], "begins at byte 0 of the tensors, expected 24"),  # both are there
    ],
)
def test_tensors_have_no_gaps_and_do_not_overlap(content, other, words, tmp_path):
    header = {"a": WHOLE} if other is None else {"b": {**WHOLE, "data_offsets": other}, "a": WHOLE}
    with pytest.raises(ValueError, match=words):
        read_header(write(tmp_path / "it", header, bytes(content)))


def test_a_header_that_is_too_long(tmp_path, monkeypatch):
    whole = write(tmp_path / "it", {"a": WHOLE}, bytes(24))
    length = whole.stat().st_size - 8 - 24
    monkeypatch.setattr(safetensors_header, "LONGEST", length)
    assert list(read_header(whole)) == ["a"]
    monkeypatch.setattr(safetensors_header, "LONGEST", length - 1)
    with pytest.raises(ValueError, match=f"its first 8 bytes announce a header of {length}"):
        read_header(whole)


def test_files_that_are_none(tmp_path):
    for content in (b"", b"1234567", struct.pack("<Q", 1)):
        (tmp_path / "it").write_bytes(content)
        with pytest.raises(ValueError, match=f"not a whole safetensors file: it has {len(content)} bytes"):
            read_header(tmp_path / "it")
    for header in ({}, {"__metadata__": {"a": "b"}}):
        with pytest.raises(ValueError, match="has no tensors"):
            read_header(write(tmp_path / "it", header))
    for header, words in ((b"[]", "expected a JSON object"), (b"{", "is damaged"), (b"", "is damaged")):
        with pytest.raises(ValueError, match=f"the header of .*it.*{words}"):
            read_header(write(tmp_path / "it", header))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_header(tmp_path / "pipe")
