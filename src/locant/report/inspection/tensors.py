"""Tensors as the lists of numbers that figures take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from locant.report.figures import Number, shortened

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 128
"""Rows and columns of the largest heat map."""


def numbers(x: Tensor) -> list[Number]:
    """Returns all values with 5 significant digits, and None for values that are not finite."""
    return [shortened(value) for value in x.flatten().tolist()]


def matrix(x: Tensor) -> list[list[Number]]:
    """Returns the rows of a matrix as `numbers`."""
    return [numbers(row) for row in x]


def thinned(count: int) -> list[int]:
    """Returns evenly spaced indices below `count`, at most LARGEST of them."""
    return list(range(0, count, max(1, math.ceil(count / LARGEST))))
