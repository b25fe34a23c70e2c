"""Single tensors of a file or folder of weights, read without a model.

The headers of safetensors files are checked first, as for a model (`checkpoint.py`), and only the tensors that are
asked for are read. A pickled file is read as a whole, with `weights_only`: it may hold tensors and nothing else.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locant.hf import checkpoint
from locant.hf.building import in_words
from locant.hf.safetensors_header import read_header
from locant.runs import machine_memory, untrusted

SAFE, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
"""How the names of files of weights end."""
MOST_NUMBERS = 2**26
"""Numbers of the largest tensor that is read: 16,384 positions of width 4,096, or 512 MiB in float64."""
SHARE = 0.8
"""Share of the free memory that a pickled file may take."""
FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
"""Dtypes of tensors that are read, as safetensors names them."""
NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, not read yet."""

    dtype: str  # F32, BF16, …
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def floats(self) -> bool:
        """Whether the tensor has floating-point numbers that torch can convert."""
        return self.dtype in FLOATS

    @property
    def too_large(self) -> bool:
        """Whether the tensor has more numbers than locant reads."""
        return math.prod(self.shape) > MOST_NUMBERS

    @property
    def spelt(self) -> str:
        """The shape and the dtype: "512 × 384, F32"."""
        return f"{' × '.join(map(str, self.shape)) or 'a single number'}, {self.dtype}"

    def read(self, name: str) -> Tensor:
        """Returns the tensor. ValueError, which calls it `name`, if it is too large or cannot be read."""
        if self.too_large:
            raise ValueError(
                f"{name} has {math.prod(self.shape):,} numbers ({self.spelt}); locant reads single tensors of up to "
                f"{MOST_NUMBERS:,}. Save its first rows in a file of their own"
            )
        return self.load()


def is_weights(path: Path) -> bool:
    """Returns whether a path is a file of weights by its name: .safetensors, .bin, .pt or .pth."""
    return path.suffix in (SAFE, *PICKLED) and path.is_file()


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file of weights, or of a folder with weights, by name.

    A folder has model.safetensors, its shards with an index, pytorch_model.bin, or the shards of that; the first of
    these is read. ValueError if the files are damaged, or if there are none.
    """
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if path.suffix == SAFE:
        return _of_safetensors(path)
    if path.suffix in PICKLED:
        return _of_pickle(path)
    raise ValueError(
        f"{path} is no file of weights by its name; expected a name that ends in {SAFE}, {', '.join(PICKLED)}, or the "
        f"folder of a model"
    )


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has weights under one of the names that transformers uses."""
    return any((folder / name).is_file() for name in checkpoint.WEIGHTS)


def _of_folder(folder: Path) -> dict[str, Stored]:
    names = [name for name in checkpoint.WEIGHTS if (folder / name).is_file()]
    if not names:
        raise ValueError(f"{folder} has no weights; expected one of {', '.join(checkpoint.WEIGHTS)}")
    first = folder / names[0]
    if first.suffix != ".json":
        return _of_safetensors(first) if first.suffix == SAFE else _of_pickle(first)
    checkpoint.weights_of(folder)  # raises ValueError if the index and the headers do not agree
    found: dict[str, Stored] = {}
    for shard in checkpoint.shards(first):
        file = folder / shard
        if not file.is_file():
            raise ValueError(f"{first} names {untrusted.shortened(shard)}, which is not there")
        found |= _of_safetensors(file) if file.suffix == SAFE else _of_pickle(file)
    return found


def _of_safetensors(file: Path) -> dict[str, Stored]:
    return {
        name: Stored(entry.dtype, entry.shape, partial(_from_safetensors, file, name))
        for name, entry in read_header(file).items()
    }


def _from_safetensors(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            found: Tensor = opened.get_tensor(name)
    except SafetensorError as problem:
        raise ValueError(f"{file}: {untrusted.shortened(name)} cannot be read: {problem}") from None
    return found


def _of_pickle(file: Path) -> dict[str, Stored]:
    size, free = untrusted.size_of(file), machine_memory.available()
    if free is not None and size > SHARE * free:
        raise ValueError(
            f"{file} takes {machine_memory.spell(size)}, but only {machine_memory.spell(free)} of memory is free; "
            f"saved as safetensors, its table could be read alone"
        )
    if zipfile.is_zipfile(file):
        with in_words(file), zipfile.ZipFile(file) as parts:
            whole = sum(part.file_size for part in parts.infolist())
        if whole > size:
            raise ValueError(f"{file} decompresses from {size:,} to {whole:,} bytes; torch.save does not compress")
    with in_words(file):
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; expected a dict of tensors (a state dict)")
    found = {
        name: Stored(NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape), partial(_whole, file, name, value))
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not found:
        raise ValueError(f"{file} holds no tensors at its top level; expected a dict of tensors (a state dict)")
    return found


def _whole(file: Path, name: str, value: Tensor) -> Tensor:
    """Returns a tensor of a pickle, if the file has all its numbers: a view may claim more than it holds."""
    plain = value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{file}: {untrusted.shortened(name)} is not a plain tensor: it is sparse, empty or a view")
    return value.detach()
