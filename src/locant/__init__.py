"""locant: how does a transformer know where its tokens are? Change it, run it, measure it, compare it."""

from typing import TYPE_CHECKING, Any

from locant import testing
from locant.attention import BACKENDS, attend
from locant.schemes import SCHEMES, Scheme, Sum
from locant.spec import per_layer, scheme
from locant.terms import Terms

__version__ = "0.1.0"

if TYPE_CHECKING:
    from locant.hf import load, native, swap

__all__ = [
    "BACKENDS",
    "SCHEMES",
    "Scheme",
    "Sum",
    "Terms",
    "attend",
    "load",
    "native",
    "per_layer",
    "scheme",
    "swap",
    "testing",
]


def __getattr__(name: str) -> Any:
    """`swap`, `native` and `load` need transformers, which is only imported when one of them is asked for."""
    if name in ("swap", "native", "load"):
        try:
            from locant import hf
        except ImportError as missing:
            raise ImportError(
                f"locant.{name} needs transformers 5 or newer ({missing}); install it with: pip install 'locant[hf]'"
            ) from missing
        return getattr(hf, name)
    raise AttributeError(f"module 'locant' has no attribute {name!r}")
