"""The error of a target that cannot hold a model."""

from __future__ import annotations

from collections.abc import Mapping


class CannotExport(ValueError):
    """A target cannot hold a model; the message says why, and what would be possible."""


def of_all(reasons: Mapping[str, str]) -> CannotExport:
    """Returns the error for a model that no stock architecture can hold, with the reason of each."""
    lines = "\n".join(f"  {target}: {reason}" for target, reason in reasons.items())
    return CannotExport(
        f"no stock architecture of transformers computes what this model does:\n{lines}\nto='onnx' and to='torch' hold "
        f"every scheme that can be traced; model.save_pretrained writes a folder that locant.load opens"
    )
