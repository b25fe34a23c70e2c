"""Attention that takes any scheme, on several back ends that must agree with `eager`."""

from locant.attention.attend import attend
from locant.attention.choice import BACKENDS

__all__ = ["BACKENDS", "attend"]
