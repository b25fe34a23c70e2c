"""The warning of a bare swap: a trained model with a scheme that has learned nothing does not know word order."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from locant.hf.mapped_native import is_mapped_native
from locant.hf.plan import plan_of
from locant.hf.readout import Native


class WordOrderWarning(UserWarning):
    """A trained model was swapped to a scheme that was neither fitted nor trained."""


def is_native(spec: Any) -> bool:
    """Whether a spec is the word that restores the model's own positions."""
    return isinstance(spec, str) and spec.strip() == "native"


def loses_word_order(model: PreTrainedModel, spec: Any, *, keep_native: bool) -> bool:
    """Whether a swap discards what a model has learned about word order.

    A model counts as trained if it came from a folder or the hub, which is where transformers gets `name_or_path` from.
    A model that was built from a config has no name. Positions that were read from a model are learned ones.
    """
    trained = bool(getattr(model, "name_or_path", ""))
    own = is_native(spec) or is_mapped_native(spec) or isinstance(spec, Native)
    return trained and not keep_native and not own


def advice(model: PreTrainedModel, spec: Any) -> str:
    """Returns what is wrong after a bare swap, and what to do."""
    plan, text = plan_of(model), repr(spec) if isinstance(spec, str) else "spec"
    lost = plan is not None and plan.native_is_lost
    first = "open the original model" if lost else "call locant.swap(model, 'native')"
    return (
        f"{model.name_or_path} was trained with other positions, and this swap has taught it nothing about the new "
        f"ones: the model no longer knows word order. Train it now; or {first}, then call locant.fit(model, {text}, "
        f"text), which takes seconds, or locant.adapt, which is better and takes minutes"
    )


CARD = """
**This model does not know word order**, unless it was trained after it was saved. The original was trained with other
positions, and the scheme above was neither fitted nor trained. To keep what the original knows, adapt it instead:

    locant adapt {model} {spec} --text TEXT -o FOLDER
"""
"""Part of a model card. `model` is the hub name of the original, or a word in its place: a card has no local paths."""
