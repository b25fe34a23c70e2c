"""locant: how does a transformer know where its tokens are? Change it, run it, measure it, compare it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from locant import testing
from locant.attention import BACKENDS, attend
from locant.schemes import SCHEMES, Scheme, Sum
from locant.spec import per_layer, scheme
from locant.terms import Terms
from locant.version import __version__

if TYPE_CHECKING:
    from locant.adaptation import adapt, fit
    from locant.hf import load, native, swap

__all__ = [
    "BACKENDS",
    "SCHEMES",
    "Scheme",
    "Sum",
    "Terms",
    "__version__",
    "adapt",
    "attend",
    "fit",
    "load",
    "native",
    "per_layer",
    "scheme",
    "swap",
    "testing",
]


def __getattr__(name: str) -> Any:
    """What needs transformers imports it when it is asked for."""
    for names, module, extra in ((("swap", "native", "load"), "hf", "hf"), (("fit", "adapt"), "adaptation", "compare")):
        if name in names:
            try:
                return getattr(import_module(f"locant.{module}"), name)
            except ImportError as missing:
                raise ImportError(
                    f"locant.{name} needs transformers 5 or newer and what goes with it ({missing}); install it with: "
                    f"pip install 'locant[{extra}]'"
                ) from missing
    raise AttributeError(f"module 'locant' has no attribute {name!r}")
