"""Attention that takes any scheme, on several back ends that must agree with `eager`."""

from locant.attention.attend import BACKENDS, attend

__all__ = ["BACKENDS", "attend"]
