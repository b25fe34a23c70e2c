"""What locant can do with a family, or with one model: `locant.families`, `locant doctor MODEL`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from locant.hf.families import FAMILIES, REFUSED, seam_of
from locant.hf.finding import family_of
from locant.hf.layers import other_layers
from locant.hf.listening import observing
from locant.hf.plan import Attention, plan_of
from locant.hf.probing import find_attentions, probe_through_seam
from locant.hf.readout import native
from locant.hf.seams.families import SEAMS
from locant.hf.swapping import check_model, exchange

How = Literal["listed", "by a seam", "by running", "refused"]


@dataclass(frozen=True)
class Support:
    """A family of models by the `model_type` of its config, and how locant knows what to do with it."""

    family: str
    how: How
    note: str  # how positions enter; the reason of a refusal

    def __str__(self) -> str:
        return f"{self.family}: {self.how} ({self.note})"


def families() -> list[Support]:
    """Returns the families that are listed, those that have a seam, and those that are refused by name.

    All others are tried: what they do with positions is found by running the model (`locant doctor MODEL`).
    """
    known = [
        Support(name, "listed" if family.seam is None else "by a seam", family.mechanism.kind)
        for name, family in FAMILIES.items()
    ]
    seams = [Support(name, "by a seam", "how positions enter is found by running the model") for name in SEAMS]
    refused = [Support(name, "refused", why) for name, why in REFUSED.items()]
    return sorted([*known, *seams, *refused], key=lambda each: each.family)


@dataclass(frozen=True)
class Layers:
    """The layers of one stack."""

    stack: str  # its name below the base model; "" if the base model runs the layers itself
    attention: int  # modules of self-attention, which a swap changes
    others: int  # layers without self-attention, which it leaves alone


@dataclass(frozen=True)
class ModelSupport:
    """What locant can do with one model. A problem is empty if there is none."""

    support: Support
    layers: tuple[Layers, ...] = ()
    positions: str = ""  # that it has now
    not_swapped: str = ""  # why it cannot be swapped
    not_read: str = ""  # why its positions cannot be read
    not_fitted: str = ""  # why `fit` and `adapt` refuse it


def support_of(model: PreTrainedModel) -> ModelSupport:
    """Tries what can be done with a model, and leaves it as it was."""
    check_model(model)
    kind = model.config.model_type
    try:
        family = family_of(model)
    except NotImplementedError as problem:
        why = str(problem)
        return ModelSupport(Support(kind, "refused", why), not_swapped=why, not_read=why, not_fitted="needs a swap")
    how: How = "by a seam" if seam_of(model) is not None else "listed" if kind in FAMILIES else "by running"
    support = Support(kind, how, family.mechanism.kind)
    try:
        found = find_attentions(model, family) if plan_of(model) is None else planned_attentions(model)
    except NotImplementedError as problem:
        return ModelSupport(support, not_swapped=str(problem), not_read=str(problem), not_fitted="needs a swap")
    layers = tuple(Layers(path, len(each), other_layers(model.base_model, path, each)) for path, each in found.items())
    positions = not_read = not_swapped = ""
    try:
        positions = str(native(model))
    except NotImplementedError as problem:
        not_read = str(problem)
    if plan_of(model) is None:
        try:
            exchange(model, "nope")
            exchange(model, "native")
        except (NotImplementedError, RuntimeError) as problem:
            not_swapped = str(problem)
    not_fitted = "needs a swap" if not_swapped else "needs its positions" if not_read else ""
    return ModelSupport(support, layers, positions, not_swapped, not_read, not_fitted or _sinks(model))


def _sinks(model: PreTrainedModel) -> str:
    """Why a model with sinks cannot be fitted; nothing for other models."""
    found: list[bool] = []
    with observing(before=lambda call: found.append(call.sinks is not None)):
        probe_through_seam(model)
    return "its attention has sinks, and the fit compares weights that sum to 1" if any(found) else ""


def planned_attentions(model: PreTrainedModel) -> dict[str, list[Attention]]:
    """Returns the attention modules of a swapped model by stack."""
    plan = plan_of(model)
    return {} if plan is None else {stack.path: stack.attentions for stack in plan.stacks}
