"""locant: how does a transformer know where its tokens are? Change it, run it, measure it, compare it.

Each name is imported when it is first used. `import locant` alone imports neither torch nor transformers, so
the command line answers at once.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from locant.registering import register as _register
from locant.version import __version__ as __version__

if TYPE_CHECKING:
    from locant import attention as attention
    from locant import imports as imports
    from locant import schemes as schemes
    from locant import spec as spec
    from locant import terms as terms
    from locant import testing
    from locant.adaptation import adapt, fit
    from locant.adaptation.sharpening import sharpen
    from locant.attention.attend import attend
    from locant.attention.choice import BACKENDS
    from locant.exporting import export
    from locant.hf import load, native, swap
    from locant.hf.support import families
    from locant.schemes import SCHEMES, Scheme, Sum
    from locant.spec import per_layer, scheme
    from locant.terms import Terms
    from locant.verbs.comparing import compare
    from locant.verbs.inspecting import inspect

__all__ = [
    "BACKENDS",
    "SCHEMES",
    "Scheme",
    "Sum",
    "Terms",
    "adapt",
    "attend",
    "compare",
    "export",
    "families",
    "fit",
    "inspect",
    "load",
    "native",
    "per_layer",
    "scheme",
    "sharpen",
    "swap",
    "testing",
]

_NAMES = {
    "attention": ("BACKENDS", "attend"),
    "schemes": ("SCHEMES", "Scheme", "Sum"),
    "spec": ("per_layer", "scheme"),
    "terms": ("Terms",),
    "testing": (),
    "imports": (),
    "hf": ("load", "native", "swap"),
    "hf.support": ("families",),
    "adaptation": ("adapt", "fit"),
    "adaptation.sharpening": ("sharpen",),
    "exporting": ("export",),
    "verbs.comparing": ("compare",),
    "verbs.inspecting": ("inspect",),
}
"""Module -> the names that locant takes from it."""
_MODULE = {name: module for module, names in _NAMES.items() for name in names}
_EXTRAS = {
    "hf": "hf",
    "hf.support": "hf",
    "adaptation": "compare",
    "adaptation.sharpening": "sentences",
    "exporting": "hf",
    "verbs.comparing": "compare",
    "verbs.inspecting": "hf",
}
"""Modules that need transformers -> the extra that installs it."""

_register()


def __getattr__(name: str) -> Any:
    """Returns a public name or module of locant, imported now and kept for the next time."""
    if name in _NAMES and name not in _EXTRAS:
        return import_module(f"locant.{name}")  # which makes it an attribute of locant
    if name not in _MODULE:
        raise AttributeError(f"module 'locant' has no attribute {name!r}")
    module = _MODULE[name]
    try:
        value = getattr(import_module(f"locant.{module}"), name)
    except ImportError as missing:
        if module not in _EXTRAS:
            raise
        raise ImportError(
            f"locant.{name} needs transformers 5 or newer and the packages it is used with ({missing}); install them "
            f"with: pip install 'locant[{_EXTRAS[module]}]'"
        ) from missing
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    """Returns all names and modules that can be used; those that need transformers only where it is installed."""
    missing = _EXTRAS if find_spec("transformers") is None else ()
    modules = (name for name in _NAMES if name not in _EXTRAS)
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *modules, *(name for name in __all__ if _MODULE.get(name) not in missing)})
