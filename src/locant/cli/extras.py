"""Packages that only some commands need, and the extras of locant that install them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """An extra of locant, as in `pip install 'locant[hf]'`."""

    name: str
    packages: tuple[str, ...]

    def check(self, what: str) -> None:
        """Raises an ImportError for a package that is missing. Imports none: that would take seconds."""
        for package in self.packages:
            if find_spec(package) is None:
                raise ImportError(f"{what} needs {package}; install it with: pip install 'locant[{self.name}]'")


HF = Extra("hf", ("transformers",))
COMPARE = Extra("compare", ("accelerate", "datasets", "scipy", "torchmetrics", "transformers"))
PLOT = Extra("plot", ("matplotlib", "plotext"))
SENTENCES = Extra("sentences", ("sentence_transformers", "transformers"))
