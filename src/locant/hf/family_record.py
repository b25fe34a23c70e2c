"""A `Family` that was found by running a model, as JSON: a saved model opens without being run first."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, get_type_hints

from transformers import PreTrainedModel

from locant.hf.counting import COUNTS
from locant.hf.families import FAMILIES
from locant.hf.family import Family, StartsAt, these_stacks
from locant.hf.finding import FOUND
from locant.hf.mechanisms import Bias, Biases, CarriedTable, Nothing, Rotary
from locant.runs.untrusted import shortened

MECHANISMS: dict[str, Any] = {each.__name__: each for each in (Bias, Biases, CarriedTable, Nothing, Rotary)}
"""Mechanisms that can be found by running a model."""
ENTRIES = {"stacks", "mechanism", "settings", "count", "starts_at", "causal"}


def to_json(model: PreTrainedModel) -> dict[str, Any] | None:
    """Returns the record of a model's family; None if the family is listed."""
    base = model.base_model
    family: Family | None = base.__dict__.get(FOUND)
    if family is None or model.config.model_type in FAMILIES:
        return None
    return {
        "stacks": family.stacks(base),
        "mechanism": type(family.mechanism).__name__,
        "settings": dataclasses.asdict(family.mechanism),  # type: ignore[call-overload]
        "count": next(name for name, rule in COUNTS.items() if rule is family.count),
        "starts_at": family.shift(base),
        "causal": dict(family.causal),
    }


def from_json(data: Any) -> Family:
    """Returns the family of a record; ValueError if the record is damaged."""
    if not isinstance(data, dict) or set(data) != ENTRIES:
        raise ValueError(
            f"the record of the family must have the entries {', '.join(sorted(ENTRIES))}; got {shortened(data)}"
        )
    kind = MECHANISMS.get(data["mechanism"]) if isinstance(data["mechanism"], str) else None
    stacks, starts_at = data["stacks"], data["starts_at"]
    fits = (
        kind is not None
        and isinstance(data["settings"], dict)
        and isinstance(stacks, list)
        and all(isinstance(path, str) for path in stacks)
        and isinstance(data["count"], str)
        and data["count"] in COUNTS
        and type(starts_at) is int
        and isinstance(data["causal"], dict)
        and all(isinstance(path, str) and isinstance(value, bool) for path, value in data["causal"].items())
    )
    if not fits:
        raise ValueError(f"the record of the family is damaged: {shortened(data)}")
    assert kind is not None
    return Family(
        _mechanism(kind, data["settings"]),
        stacks=partial(these_stacks, stacks),
        count=COUNTS[data["count"]],
        shift=StartsAt(starts_at),
        causal=data["causal"],
    )


def restore(model: PreTrainedModel, data: Any) -> None:
    """Gives a model the family of a record, as if it had been found by running it."""
    if model.config.model_type in FAMILIES:
        return
    if data is None:
        raise ValueError(
            f"the folder does not say how {model.config.model_type} models handle positions: it was written by an "
            f"older locant. Swap the original model again"
        )
    family, base = from_json(data), model.base_model
    names = dict(base.named_modules())
    missing = [path for path in family.stacks(base) if path not in names]
    if missing:
        raise ValueError(f"the record of the family names {shortened(missing[0])}, which the model does not have")
    base.__dict__[FOUND] = family


def _mechanism(kind: Any, settings: Any) -> Any:
    """Builds a record of plain data; records may contain records."""
    types = get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(settings, dict) or set(settings) != fields:
        raise ValueError(f"the settings of {kind.__name__} are damaged: {shortened(settings)}")
    values = {name: _value(value, types[name]) for name, value in settings.items()}
    if not all(_is(value, types[name]) for name, value in values.items()):
        raise ValueError(f"the settings of {kind.__name__} are damaged: {shortened(settings)}")
    return kind(**values)


def _value(value: Any, expected: Any) -> Any:
    """A value of a record from its JSON, which has lists in place of tuples, and objects in place of records."""
    options: list[Any] = list(getattr(expected, "__args__", ()))
    if isinstance(value, list):
        return tuple(_value(each, options[0] if options else None) for each in value)
    if isinstance(value, dict) and dataclasses.is_dataclass(expected):
        return _mechanism(expected, value)
    return value


def _is(value: Any, expected: Any) -> bool:
    """Whether a value has a type of a record: a plain type, tuple[…], or one of several."""
    options: list[Any] = list(getattr(expected, "__args__", ()))
    if getattr(expected, "__origin__", None) is tuple:
        if len(options) == 2 and options[1] is Ellipsis:
            return isinstance(value, tuple) and all(_is(each, options[0]) for each in value)
        return isinstance(value, tuple) and len(value) == len(options) and all(map(_is, value, options))
    if options:
        return any(_is(value, option) for option in options)
    return type(value) is expected
