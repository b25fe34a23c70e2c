"""What a folder or hub name holds, found out before anything is built from it: its config and its weights.

Nothing in a folder is trusted. The config says how large a model is, so a wrong one could take all memory; the weights
bound it. A config may name code, kernels of the hub or files elsewhere; such a config is refused. Code from a folder is
never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from locant.hf.safetensors_header import Entry, read_header
from locant.runs import untrusted

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights, or indexes of them, in the order in which a folder is searched for them."""
FEW = 1000
"""A number of layers or labels that costs nothing, whatever the weights are."""
COUNT = re.compile(r"(layers?|blocks|depths?|num_labels)$")
"""Config entries that transformers counts through when it builds a config or a model."""
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


@dataclass(frozen=True)
class Weights:
    """The weights of a model. `tensors` is empty where only the size is known (pickled files)."""

    size: int  # bytes
    tensors: dict[str, Entry]

    @property
    def count(self) -> int:
        """The number of numbers; of pickled files an upper bound."""
        return sum(entry.count for entry in self.tensors.values()) or self.size

    @property
    def widest(self) -> int:
        """The largest dimension of a tensor."""
        sizes = [size for entry in self.tensors.values() for size in entry.shape]
        return max(sizes, default=self.size)


def is_path(name: str) -> bool:
    """Whether a string is a path, not a name of the hub: it begins with / . or ~, or has more than one slash."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def hub_name(name: str | None) -> str | None:
    """Returns a name if it is one of the hub; None for a path, for a folder that is there, and for no name."""
    return None if not name or is_path(name) or Path(name).exists() else name


def check_name(name: str | Path, subfolder: str = "") -> None:
    """Raises ValueError if `name` is a path and there is no folder. Only a name such as "owner/model" goes to the hub.

    A path is a Path, or a string for which `is_path` holds.
    """
    folder, text = Path(name), str(name)
    if folder.is_dir():
        if not (folder / subfolder / CONFIG).is_file():
            raise ValueError(f"{folder / subfolder} has no {CONFIG}: it is not the folder of a Hugging Face model")
    elif folder.exists():
        raise ValueError(f"{name} is not a folder; name the folder of a Hugging Face model")
    elif isinstance(name, Path) or is_path(text):
        raise ValueError(f"there is no folder {name}")


def config_of(name: str | Path, **where: Any) -> dict[str, Any]:
    """Returns the content of config.json; ValueError if it is damaged or asks for what locant does not do.

    OSError if there is neither a folder nor a model of the hub with this name.
    """
    try:
        found = Path(str(cached_file(name, CONFIG, **where)))
    except OSError as problem:
        if Path(name).exists():
            raise
        raise OSError(
            f"there is no folder {name}, and no model of that name could be fetched from the Hugging Face hub"
        ) from problem
    data = untrusted.read_json(found)
    for key, value in _entries(data):
        if key.lstrip("_") in IMPLEMENTATIONS and "/" in str(value):
            raise ValueError(
                f"{found}: {key} is {untrusted.shortened(value)}, code from the hub, which locant does not run; delete "
                f"the entry"
            )
        if key == "transformers_weights":
            raise ValueError(
                f"{found}: {key} names another file; locant opens model.safetensors alone; delete the entry"
            )
    if Path(name).is_dir():
        _check_files(found.parent)
    return data


def _check_files(folder: Path) -> None:
    """Raises ValueError for files that transformers would open beside or instead of the weights."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} has an adapter_config.json; locant opens whole models: merge the adapter with PEFT and save the "
            f"result, or delete the file"
        )
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise ValueError(f"{folder} has the shards of a distributed training; save the whole model first")


def check_counts(data: dict[str, Any], weights: Weights | None, name: str | Path) -> None:
    """Raises ValueError if a config names more layers than the weights have tensors, or more labels than rows."""
    for key, value in _entries(data):
        most = max(FEW, 0 if weights is None else max(len(weights.tensors), weights.widest if "label" in key else 0))
        if COUNT.search(key) and isinstance(value, int | float) and abs(value) > most:
            raise ValueError(
                f"{name}: {key} in {CONFIG} is {untrusted.shortened(value)}; the weights allow {most:,} at most"
            )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every entry of a config with its name, those of inner configs and lists included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def weights_of(name: str | Path, **where: Any) -> Weights | None:
    """Returns the weights of a folder or hub name from the headers of its files; None if there are none."""
    single = file_of(name, "model.safetensors", **where)
    if single is not None:
        return _whole([single])
    index = file_of(name, INDEX, **where)
    if index is not None:
        announced = shards(index)
        files = {shard: file_of(name, shard, **where) for shard in announced}
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise ValueError(f"{index} names {untrusted.shortened(missing[0])}, which is not there")
        return _whole([file for file in files.values() if file is not None], announced)
    pickled = file_of(name, "pytorch_model.bin", **where)
    if pickled is not None:
        return Weights(untrusted.size_of(pickled), {})
    index = file_of(name, "pytorch_model.bin.index.json", **where)
    if index is not None:
        files = {shard: file_of(name, shard, **where) for shard in shards(index)}
        return Weights(sum(untrusted.size_of(file) for file in files.values() if file is not None), {})
    return None


def _whole(files: list[Path], shards: dict[str, set[str]] | None = None) -> Weights:
    """The tensors of all files. `shards` has the names that an index announces for each."""
    tensors: dict[str, Entry] = {}
    for file in files:
        found = read_header(file)
        announced = found.keys() if shards is None else shards[file.name]
        for wrong in (found.keys() ^ announced) | (found.keys() & tensors.keys()):
            raise ValueError(f"{file} and the index do not agree about {untrusted.shortened(wrong)}")
        tensors |= found
    return Weights(sum(entry.size for entry in tensors.values()), tensors)


def shards(index: Path) -> dict[str, set[str]]:
    """Returns the names of the tensors in each file of an index. Every file is in the folder of the index."""
    data = untrusted.read_json(index)
    places = data.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(data.get("metadata"), dict):
        raise ValueError(
            f"{index} must have an object 'metadata' and an object 'weight_map' with a file for each tensor"
        )
    found: dict[str, set[str]] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise ValueError(
                f"{index}: {untrusted.shortened(tensor)} is in {untrusted.shortened(file)}; expected the name of a "
                f"file in the same folder"
            )
        found.setdefault(file, set()).add(tensor)
    return found


def file_of(name: str | Path, file: str, **where: Any) -> Path | None:
    """Returns a file of a folder or hub name; None if there is none."""
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where)
    except OSError:
        return None
    return None if found is None else Path(found)
