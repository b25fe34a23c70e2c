"""The folder of a sentence-transformers model: a transformer, and the modules that make one vector of its states.

modules.json lists the modules, each with a folder. Without it `SentenceTransformer(folder)` opens the transformer alone
and adds mean pooling. So a folder with a changed transformer needs a copy of everything else.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from locant.hf.checkpoint import CONFIG, file_of, is_path
from locant.hf.facts import maximum_length
from locant.runs import files, untrusted
from locant.runs.untrusted import shortened

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
"""Prompts, similarity function and versions."""
LENGTHS = "sentence_*_config.json"
"""Settings of the transformer module: sentence_bert_config.json, in old folders sentence_roberta_config.json, ….
`max_seq_length` in it overrides the length of the tokenizer."""
OWN = "sentence_transformers."
"""Prefix of the classes that sentence-transformers opens without running code of the folder."""
WITHOUT_FILES = ("Normalize",)
"""Modules that may have no folder."""


@dataclass(frozen=True)
class SentenceFolder:
    """A folder with a modules.json, which was checked."""

    root: Path
    name: str  # as the caller gave it: a folder or a hub name
    modules: tuple[dict[str, Any], ...]

    @property
    def kinds(self) -> list[str]:
        """The class names of the modules, in order: Transformer, Pooling, Normalize."""
        return [module["type"].rpartition(".")[2] for module in self.modules]

    @property
    def transformer(self) -> str:
        """The folder or hub name that `locant.load` opens: the first module, in the root or in a folder of its own."""
        path = self.modules[0]["path"]
        return str(self.root / path) if path else self.name

    @property
    def max_seq_length(self) -> int | None:
        """Tokens after which its authors let the transformer truncate a text; None if the tokenizer says it."""
        for path in sorted((self.root / self.modules[0]["path"]).glob(LENGTHS)):
            length = untrusted.read_json(path).get("max_seq_length")
            if isinstance(length, int) and not isinstance(length, bool) and length > 0:
                return length
        return None

    def settings(self, kind: str) -> dict[str, Any]:
        """Returns config.json of the first module of a kind."""
        path = self.root / self.modules[self.kinds.index(kind)]["path"] / "config.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing; copy or download the whole model")
        return untrusted.read_json(path)

    def copy_to(self, out: Path, model: PreTrainedModel) -> None:
        """Copies everything but the transformer into the folder of a swapped model, and raises `max_seq_length`.

        The transformer is in the root of `out`, wherever it was.
        """
        self.copy_modules(out, partial(maximum_length, model))

    def copy_modules(self, out: Path, longest: Callable[[int], int]) -> None:
        """Copies everything but the transformer into a folder. `longest` maps the old maximum length to the new."""
        for module in self.modules[1:]:
            for path in _files(self.root / module["path"], self.root):
                copy = out / path.relative_to(self.root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        if (self.root / PROMPTS).is_file():
            shutil.copy(self.root / PROMPTS, out / PROMPTS)
        for path in (self.root / self.modules[0]["path"]).glob(LENGTHS):
            files.write_json(out / path.name, _with_length(untrusted.read_json(path), longest))
        first, *rest = self.modules
        files.write(out / MODULES, json.dumps([{**first, "path": ""}, *rest], indent=2) + "\n")


def sentence_folder(name: str) -> SentenceFolder | None:
    """Returns the folder of a sentence-transformers model; None for any other model.

    name   a folder, the folder of the transformer inside of it, or a hub name.
    """
    root = _root(name)
    if root is None:
        return None
    modules = _checked(root / MODULES)
    if not Path(name).is_dir():
        folders = [f"{module['path']}/*" for module in modules if module["path"]]
        root = Path(snapshot_download(name, allow_patterns=[MODULES, PROMPTS, LENGTHS, *folders]))
    for module in modules:
        if not (root / module["path"]).is_dir() and module["type"].rpartition(".")[2] not in WITHOUT_FILES:
            raise ValueError(
                f"{name}: modules.json names the folder {module['path']}, which is missing; copy or download the whole "
                f"model"
            )
    return SentenceFolder(root, name, modules)


def _root(name: str) -> Path | None:
    """The folder that has modules.json, downloaded if need be; None if there is none."""
    folder = Path(name)
    if folder.is_dir():
        if (folder / MODULES).is_file():
            return folder
        parent = folder.resolve().parent
        if (parent / MODULES).is_file() and _checked(parent / MODULES)[0]["path"] == folder.resolve().name:
            return parent
        return None
    if not name or is_path(name):
        return None
    try:
        return Path(hf_hub_download(name, MODULES)).parent
    except LocalEntryNotFoundError:
        if file_of(name, CONFIG) is None:  # there is no such model at all, and opening it raises
            return None
        warnings.warn(
            f"cannot tell whether {name} is a sentence-transformers model: modules.json is not in the cache, and the "
            f"hub cannot be reached. It is treated as a plain model",
            stacklevel=3,
        )
        return None
    except (EntryNotFoundError, HFValidationError):
        return None


def _checked(path: Path) -> tuple[dict[str, Any], ...]:
    """The entries of modules.json; raises ValueError where they cannot be copied safely."""
    modules = untrusted.read_list(path)
    if not modules or not all(_is_module(module) for module in modules):
        raise ValueError(f"{path} must be a list of modules, each with a type and a path; download the model again")
    for module in modules:
        place, kind = module["path"], module["type"]
        if PureWindowsPath(place).anchor or PurePosixPath(place).is_absolute() or ".." in PureWindowsPath(place).parts:
            raise ValueError(
                f"{path}: the path {shortened(place)} leads out of the folder; expected a folder inside of it"
            )
        if not kind.startswith(OWN):
            raise ValueError(
                f"{path}: {shortened(kind)} is code of that folder, which locant neither runs nor copies; open the "
                f"transformer with AutoModel, call locant.swap, and save it with save_pretrained"
            )
    places = ["" if module["path"] == "." else module["path"] for module in modules]
    if "" in places[1:] or len(set(places)) < len(places):  # copying a module must not touch the transformer
        raise ValueError(f"{path}: each module needs a folder of its own; got the paths {shortened(places)}")
    return tuple({**module, "path": place} for module, place in zip(modules, places, strict=True))


def _is_module(module: Any) -> bool:
    return isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("path", "type"))


def _files(folder: Path, root: Path) -> Iterator[Path]:
    """Yields the files of a module. ValueError for a link out of the model, a pipe or a device.

    In the cache of the hub, files are links to a folder beside the snapshots.
    """
    within = (root.resolve(), root.resolve().parent.parent / "blobs")
    for base, folders, names in os.walk(folder):
        for path in (Path(base, name) for name in (*folders, *names)):
            inside = any(path.resolve().is_relative_to(place) for place in within)
            if not inside or (path.is_symlink() and path.is_dir()):
                raise ValueError(f"{path} is a link to {path.resolve()}; put the files themselves there")
        for path in (Path(base, name) for name in names):
            untrusted.size_of(path)
            yield path


def _with_length(settings: dict[str, Any], longest: Callable[[int], int]) -> dict[str, Any]:
    """The settings of a transformer module, with new lengths in place of those that they name."""
    found = dict(settings)
    if found.get("max_seq_length") is not None:
        found["max_seq_length"] = longest(found["max_seq_length"])
    for key in ("tokenizer_args", "processor_kwargs"):
        if "model_max_length" in (found.get(key) or {}):
            found[key] = {**found[key], "model_max_length": longest(found[key]["model_max_length"])}
    return found
