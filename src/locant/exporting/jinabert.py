"""BERT with ALiBi would be JinaBERT, whose code is not a part of transformers."""

from __future__ import annotations

from locant.exporting.refusal import CannotExport
from locant.exporting.source import Source
from locant.exporting.stock import Stock


def jinabert(source: Source, length: int | None) -> Stock:
    """Raises CannotExport: nothing can be proven about code that is not there."""
    raise CannotExport(
        "the code of JinaBERT is in a repository of its own, not in transformers, and locant runs no code from "
        "repositories; so nothing could prove that such a folder computes the same. Export it with to='onnx' or "
        "to='torch', or adapt the model with t5:shared=layers and export it as MPNet"
    )
