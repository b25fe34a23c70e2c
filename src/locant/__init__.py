"""locant: how does a transformer know where its tokens are? Change it, run it, measure it, compare it."""

from locant import testing
from locant.attention import BACKENDS, attend
from locant.schemes import SCHEMES, Scheme, Sum
from locant.spec import per_layer, scheme
from locant.terms import Terms

__version__ = "0.1.0"

__all__ = ["BACKENDS", "SCHEMES", "Scheme", "Sum", "Terms", "attend", "per_layer", "scheme", "testing"]
