"""Code of your own: files and modules with schemes, tasks or models, named by `--import` or `imports=`.

    my_schemes.py         a file
    my_package.schemes    a module; the current folder is searched too

Every scheme that the code defines is then known by its name. Code runs only if its user names it. Folders of runs and
of models remember what they need and keep a copy of a file, but opening one never runs that copy: `locant.load` and the
commands ask for it by name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from locant import notation, schemes

REFERENCE = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?!\w|\s*=)")
"""`module:Class`. An option has an equals sign after its name."""


@dataclass(frozen=True)
class Code:
    """A file or module that was imported."""

    module: ModuleType
    source: str  # the absolute path of a file, or the name of a module
    content: bytes | None = None  # of a file

    @property
    def digest(self) -> str:
        """SHA-256 of a file; empty for a module."""
        return "" if self.content is None else hashlib.sha256(self.content).hexdigest()

    @property
    def is_file(self) -> bool:
        """Whether it is a file, not a module."""
        return self.content is not None

    @property
    def name(self) -> str:
        """What folders remember: `my_schemes.py`, without its path, or the name of the module."""
        return Path(self.source).name if self.is_file else self.source

    @property
    def stem(self) -> str:
        """What a reference names: the `my_schemes` of `my_schemes:Cauchy`."""
        return Path(self.source).stem if self.is_file else self.source


_LOADED: dict[str, Code] = {}
"""Everything that was imported, by the name of its module."""


def load(sources: str | Path | Sequence[str | Path]) -> tuple[Code, ...]:
    """Imports files (`….py`) and modules, and makes their schemes known. ImportError if one fails."""
    several = [sources] if isinstance(sources, str | Path) else sources
    return tuple(_load_file(Path(x)) if str(x).endswith(".py") else _load_module(str(x)) for x in several)


def _load_file(path: Path) -> Code:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ImportError(f"there is no file {path}") from None
    except OSError as problem:
        raise ImportError(f"{path} could not be imported: {problem}") from None
    # Named after its content: a copy of the file is the same code, and a file that was changed is another.
    name = f"locant_import_{path.stem}_{hashlib.sha256(content).hexdigest()[:12]}"
    if name not in _LOADED:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            _register(module)
        except BaseException as problem:
            del sys.modules[name]
            raise _in_words(str(path), problem) from problem
        _LOADED[name] = Code(module, str(path.resolve()), content)
    return _LOADED[name]


def _load_module(name: str) -> Code:
    if name not in _LOADED:
        here = str(Path.cwd())
        sys.path.append(here)  # as `python -m` would; last, so that it hides nothing
        try:
            module = importlib.import_module(name)
            _register(module)
        except BaseException as problem:
            raise _in_words(name, problem) from problem
        finally:
            sys.path.remove(here)
        _LOADED[name] = Code(module, name)
    return _LOADED[name]


def _in_words(source: str, problem: BaseException) -> BaseException:
    """The error of an import. Ctrl-C stays what it is."""
    if isinstance(problem, KeyboardInterrupt):
        return problem
    return ImportError(f"{source} could not be imported: {type(problem).__name__}: {problem}")


def _register(module: ModuleType) -> None:
    """Makes the schemes and maps of a module known, by the names of their classes in lower case."""
    maps = _classes(module, schemes.Map)
    for cls in _classes(module, schemes.Scheme):
        name = cls.name()
        known = schemes.class_of(name)
        if known is None or known is cls or _earlier_version(known, module):
            (schemes.MAPS if cls in maps else schemes.SCHEMES)[name] = cls
        else:
            raise ValueError(
                f"it defines {cls.__name__}, but {name} is already a scheme or map ({known.__module__}); rename it"
            )


def _earlier_version(known: type, module: ModuleType) -> bool:
    """Whether a class is from the same file before it was changed."""
    return known.__module__.startswith("locant_import_") and known.__module__[:-12] == module.__name__[:-12]


def _classes(module: ModuleType, kind: type) -> list[Any]:
    """The public subclasses of a class in a module that are not of locant itself."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and not name.startswith("_")
        and not value.__module__.startswith("locant.")
    ]  # fmt: skip


def defined(kind: type) -> list[Any]:
    """Returns the subclasses of a class that imported code defines."""
    return [cls for code in _LOADED.values() for cls in _classes(code.module, kind)]


def code_of(thing: Any) -> Code | None:
    """Returns the imported code that defines a class or a function; None if it was not imported from here."""
    if thing.__module__.startswith("locant."):  # a file may import it
        return None
    having = (x for x in _LOADED.values() if any(value is thing for value in vars(x.module).values()))
    return _LOADED.get(thing.__module__) or next(having, None)


def find(reference: str, *, load_module: bool) -> tuple[Any, Code]:
    """Returns what `module:name` names, in code that is imported; with `load_module`, the module is imported now."""
    stem, _, name = reference.partition(":")
    code = next((x for x in reversed(_LOADED.values()) if x.stem == stem), None)
    if code is None and load_module:
        (code,) = load(stem)
    if code is None:
        raise ValueError(f"{reference} names code that is not imported; pass imports='{stem}.py'")
    if not hasattr(code.module, name):
        raise ValueError(f"{code.name} has no {name!r}")
    return getattr(code.module, name), code


def is_reference(text: str) -> bool:
    """Whether a text has the form `module:name`."""
    return REFERENCE.fullmatch(text) is not None


def expanded(specs: str) -> str:
    """Returns specs with the name of a scheme in place of every `module:Class`, whose module is imported.

    Only for the words of a user. The specs in a folder never pass through here.
    """

    def name(found: re.Match[str]) -> str:
        if found[1].lower() in (*schemes.names(), *schemes.map_names()):
            return found[0]  # an option without a value, which is reported as one
        cls, _ = find(found[0], load_module=True)
        if not (isinstance(cls, type) and issubclass(cls, schemes.Scheme)):
            raise ValueError(f"{found[0]} must be a subclass of locant.Scheme, got {cls!r}")
        return cls.name()

    return REFERENCE.sub(name, specs) if isinstance(specs, str) else specs


def needed(specs: Iterable[str]) -> dict[str, Code]:
    """Returns scheme -> its code, for the schemes in specs that are not of locant.

    ValueError for a scheme that was registered by hand: another process could not know it.
    """
    found = {}
    used = {name for spec in specs for layer in notation.layers(spec) for name in notation.names(layer)}
    known = {*schemes.names(), *schemes.map_names()} - schemes.CLASSES.keys() - schemes.MAP_CLASSES.keys()
    for name in used & known:
        code = code_of(schemes.class_of(name))
        if code is None:
            raise ValueError(
                f"the scheme {name} is known to this process alone, and runs have processes of their own; write its "
                f"class to a file and pass imports='FILE.py'"
            )
        found[name] = code
    return found


def is_loaded(name: str, content: bytes | None) -> bool:
    """Whether code of this name was imported; for a file, with exactly this content."""
    return any(code.name == name and code.content == content for code in _LOADED.values())
