"""Short runs of a model that show which attention modules it has, and whether they use their schemes.

Attention modules are not listed per family. A probe records which modules call the seam; a model that does not call it
is refused, whatever its name.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.call import AttentionCall
from locant.hf.families import OUTSIDE
from locant.hf.family import Family
from locant.hf.plan import Attention
from locant.hf.running import run_probe
from locant.hf.seam import through_seam
from locant.hf.watching import watching


def find_attentions(model: PreTrainedModel, family: Family) -> dict[str, list[Attention]]:
    """Returns the self-attention modules of each stack in the order they run, found by running the model once."""
    base, kind = model.base_model, model.config.model_type
    names = {module: name for name, module in base.named_modules()}
    with watching(base) as watched:
        probe_through_seam(model)
    outside = watched.attended_elsewhere({length for call in watched.calls for length in _lengths(call)})
    found: dict[str, list[Attention]] = {}
    for path in family.stacks(base):
        inside = f"{path}." if path else ""
        # The probe gives encoder and decoder unequal lengths, so that cross-attention can be told apart.
        calls = [
            call
            for call in watched.calls
            if names.get(call.module, "").startswith(inside) and len(set(_lengths(call))) == 1 and call.module in names
        ]
        _check_choice(kind, [call.module for call in calls])
        others = sorted({type(module).__name__ for module in outside})  # in any part of the model
        if not calls or others:
            what = ", ".join(others) or f"no module of {type(base.get_submodule(path)).__name__}"
            raise NotImplementedError(
                f"{kind} models cannot be swapped ({what} {'attends by itself' if others else 'called it'}): {OUTSIDE}"
            )
        attentions = [Attention(names[call.module], call.query.shape[1], call.query.shape[3]) for call in calls]
        found[path] = list(dict.fromkeys(attentions))  # ALBERT runs one module many times
    return found


def _check_choice(kind: str, attentions: list[nn.Module]) -> None:
    """Raises NotImplementedError if an attention chooses keys first: by the positions that a swap would remove."""
    for attention in attentions:
        for module in attention.modules():
            if "Indexer" in type(module).__name__:
                raise NotImplementedError(
                    f"{kind} models cannot be swapped: {type(module).__name__} chooses the keys of each token (sparse "
                    f"attention), by positions that a swap would remove"
                )


def probe_through_seam(model: PreTrainedModel) -> Tensor:
    """Runs `run_probe` with the model's own attention through the seam, so that observers see every call."""
    with through_seam(model):
        return run_probe(model.base_model)


def _lengths(call: AttentionCall) -> tuple[int, int]:
    return call.query.shape[2], call.key.shape[2]
