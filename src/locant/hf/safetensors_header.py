"""The header of a safetensors file: names, dtypes and shapes, checked without reading a tensor.

A file has 8 bytes with the length of the header, the header in JSON, and the tensors, without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.runs import untrusted

LONGEST = 32 * 2**20
"""Bytes of the longest header. A file with 100,000 tensors has about half of it."""
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of a number, by the name of its dtype."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes, from the end of the header
    size: int  # bytes

    @property
    def count(self) -> int:
        """The number of numbers."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Returns the tensors of a file by name; ValueError names what is wrong with the file."""
    size = untrusted.size_of(path)
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(LONGEST, size - 8):
            raise ValueError(
                f"{path} is not a whole safetensors file: it has {size:,} bytes, and its first 8 bytes announce a "
                f"header of {length:,}"
            )
        header = untrusted.parse_object(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, value) for name, value in header.items()}
    if not found:
        raise ValueError(f"{path} has no tensors")
    at = 0
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != at:
            raise ValueError(f"{path}: {_short(name)} begins at byte {entry.start:,} of the tensors, expected {at:,}")
        at += entry.size
    if at != size - 8 - length:
        got = size - 8 - length
        raise ValueError(f"{path} is incomplete or damaged: its header has {at:,} bytes of tensors, the file {got:,}")
    return found


def _entry(path: Path, name: str, value: Any) -> Entry:
    """Returns one entry of a header, checked for itself."""
    where = f"{path}: {_short(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ValueError(f"{where} must have dtype, shape and data_offsets, got {untrusted.shortened(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{where} has the dtype {untrusted.shortened(dtype)}; expected one of {', '.join(BITS)}")
    if not _whole_numbers(shape):
        raise ValueError(f"{where} has the shape {untrusted.shortened(shape)}; expected whole numbers ≥ 0")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} has data_offsets {untrusted.shortened(offsets)}; expected two whole numbers ≥ 0")
    entry = Entry(dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])
    if 8 * entry.size != entry.count * BITS[dtype]:
        raise ValueError(f"{where} has the shape {untrusted.shortened(shape)} in {dtype}, but {entry.size:,} bytes")
    return entry


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**63 for each in value)


def _short(name: str) -> str:
    return untrusted.shortened(name)
