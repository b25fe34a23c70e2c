"""Puts a mutant in the place of the original: in functions that exist already, or when a module is imported."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from reliability.mutants.mutant import Mutant

Functions = dict[tuple[str, int, str], list[FunctionType]]


def functions_by_code(folder: Path) -> Functions:
    """All functions whose code is in a folder: (file, first line, name) -> functions, wherever they are kept."""
    gc.unfreeze()  # tests/conftest.py freezes what was imported, and frozen objects are not listed
    found: Functions = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(folder)):
            code = each.__code__
            found.setdefault((code.co_filename, code.co_firstlineno, code.co_name), []).append(each)
    gc.collect()
    gc.freeze()
    return found


def replace_code(root: Path, mutant: Mutant, functions: Functions) -> bool:
    """Gives the existing functions the code of the mutant. False if that is not possible: then import it instead."""
    file = str(root / mutant.path)
    original = _code_at(Path(file).read_text(), file, mutant)
    mutated = _code_at(mutant.text, file, mutant)
    if original is None or mutated is None:
        return False
    targets = functions.get((file, original.co_firstlineno, original.co_name), [])
    if any((file, inner.co_firstlineno, inner.co_name) in functions for inner in _inside(original)):
        return False  # the function has run already, e.g. as a decorator, and what it made would stay as it is
    try:
        for function in targets:
            function.__code__ = mutated
    except ValueError:  # the mutant uses other variables of the enclosing scope
        return False
    return bool(targets)


def _code_at(text: str, file: str, mutant: Mutant) -> CodeType | None:
    """The code of the mutant's function: of several with one name the last that begins before the changed line."""
    codes = [compile(text, file, "exec", dont_inherit=True)]
    for name in mutant.function.split("."):
        codes = [
            part for code in codes for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name
        ]
    return max((code for code in codes if code.co_firstlineno <= mutant.line), key=_first_line, default=None)


def _inside(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions defined inside a function."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _inside(part)


def _first_line(code: CodeType) -> int:
    return code.co_firstlineno


def import_instead(root: Path, mutant: Mutant) -> None:
    """From now on, importing the module of the mutant imports the mutant."""
    sys.meta_path.insert(0, Finder(root, mutant.path, mutant.text))


def import_everywhere(root: Path, mutant: Mutant, folder: Path) -> None:
    """Python processes that this one starts import the mutant too.

    Python runs a module `sitecustomize` when it starts. Ours (in `shadow/`) calls `shadow_file`.
    """
    (folder / "mutant.json").write_text(json.dumps([str(root), mutant.path, mutant.text]))
    shadow = Path(__file__).with_name("shadow")
    os.environ["LOCANT_MUTANT"] = str(folder / "mutant.json")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(shadow), str(root), os.environ.get("PYTHONPATH", "")])


def shadow_file(root: Path, path: str, text: str) -> None:
    """From now on, importing or running a source file gives a text in its place. Used in processes that tests start."""
    sys.meta_path.insert(0, Finder(root, path, text))
    file, open_code = str(root / path), io.open_code
    # `runpy.run_path` opens the file itself.
    io.open_code = lambda name: io.BytesIO(text.encode()) if name == file else open_code(name)  # type: ignore[assignment]


class Finder(importlib.machinery.PathFinder):
    """Finds the module of a mutant."""

    def __init__(self, root: Path, path: str, text: str) -> None:
        self.file, self.text = root / path, text
        parts = self.file.relative_to(root / "src").with_suffix("").parts
        self.package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.package else parts)

    def find_spec(  # type: ignore[override]
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if fullname != self.name:
            return None
        loader = _Loader(fullname, str(self.file))
        loader.text = self.text
        places = [str(self.file.parent)] if self.package else None
        return importlib.util.spec_from_file_location(
            fullname, self.file, loader=loader, submodule_search_locations=places
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the text of a mutant under the name of its file, without the cached bytecode."""

    text: str

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


def compile_instead(mutant: Mutant, folder: Path) -> None:
    """From now on, the kernel is built from the mutant, with this folder as the cache."""
    from locant.attention import build  # the library must not be imported before a mutant is in place

    source = folder / "fused.c"
    source.write_text(mutant.text)
    os.environ["LOCANT_CACHE"] = str(folder)
    build.SOURCE = source
    build.FLAGS = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]  # compiles in a quarter of the time
    build.build.cache_clear()
    if build.build().library is None:
        raise ValueError(f"the mutant does not compile: {build.build().why}")
