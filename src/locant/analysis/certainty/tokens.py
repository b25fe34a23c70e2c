"""The likelihood of tokens, for models that predict them.

    log p(text | θ) = Σ_t log p_θ(x_t | context)

over the next tokens (causal models) or over masked tokens (masked models). It is a log-likelihood, so the posterior has
its ordinary meaning, and no noise scale is applied. The measured one is reported: above 1, texts differ more than the
model believes, and intervals that allow for it are √T times as wide.

For drawn outcomes every x_t is drawn from p_θ with the context held constant. The scores of different t are then
uncorrelated, and the second moment of their sum is the Fisher information of the sequence, at the cost of one backward
pass for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis import text as texts
from locant.analysis.certainty.gradients import gradients, gradients_of
from locant.analysis.certainty.unit import Unit, add
from locant.hf.interrupts import check
from locant.hf.running import probe_tokens
from locant.schemes import Scheme

MASKED_SHARE = 0.15
"""Share of the tokens of a sequence that are masked for a masked language model."""


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Whether the outputs of a model are logits of tokens."""
    if model is model.base_model or model.get_output_embeddings() is None:
        return False
    with torch.no_grad():
        return "logits" in model(input_ids=probe_tokens(model.base_model, 2))


def masking(model: PreTrainedModel, tokenizer: Any) -> tuple[int, set[int]]:
    """Returns the mask token of a masked model, and the tokens that are put around each sequence."""
    token = getattr(tokenizer, "mask_token_id", None)
    if token is None:
        raise ValueError(
            f"{type(model).__name__} predicts masked tokens, but its tokenizer has no mask token; pass one that has, "
            f"or use likelihood='attention'"
        )
    before, after = texts.special_tokens(tokenizer)
    return int(token), {*before, *after}


def observe(
    model: PreTrainedModel, units: list[Unit], ids: Tensor, draws: int, generator: torch.Generator,
    *, mask_token: int | None, special: set[int],
) -> int:  # fmt: skip
    """Collects scores by the predictions of tokens; returns the number of predicted tokens.

    mask_token, special   of a masked model (`masking`); None and nothing for a causal one.
    """
    schemes, count = [unit.scheme for unit in units], 0
    with gradients_of(model, schemes):
        for row in ids:
            check()
            log, known = predictions(model, row[None], mask_token=mask_token, special=special, generator=generator)
            count += len(known)
            add(units, scores(schemes, log, known, draws, generator))
    return count


def predictions(
    model: PreTrainedModel, ids: Tensor, *, mask_token: int | None, special: set[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities [T, V] that a model gives the tokens of a sequence ids [1, L], and the tokens [T].

    mask_token   of a masked model; None for a causal one.
    """
    if mask_token is None:
        return model(input_ids=ids).logits[0, :-1].log_softmax(-1), ids[0, 1:]
    ordinary = (~torch.isin(ids[0].cpu(), torch.tensor(sorted(special), dtype=torch.long))).nonzero()[:, 0]
    count = max(1, round(MASKED_SHARE * len(ordinary)))
    places = ordinary[torch.randperm(len(ordinary), generator=generator)[:count]].to(ids.device)
    masked = ids.clone()
    masked[0, places] = mask_token
    return model(input_ids=masked).logits[0, places].log_softmax(-1), ids[0, places]


def scores(
    schemes: list[Scheme], log: Tensor, tokens: Tensor, draws: int, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Returns the drawn scores [draws, P] and the observed one [P] of each scheme, from log-probabilities [T, V]."""
    if not bool(log.detach().isfinite().all()):
        raise ValueError("the predictions of the model contain NaN or infinity; check its weights")
    probable = log.detach().exp().cpu()
    outcomes = torch.multinomial(probable, draws, replacement=True, generator=generator)
    parameters = [list(scheme.parameters()) for scheme in schemes]
    found = [
        gradients(log.gather(1, each[:, None]).sum(), parameters)
        for each in (*outcomes.to(tokens.device).unbind(1), tokens)
    ]
    return [(torch.stack([each[n] for each in found[:-1]]), found[-1][n]) for n in range(len(schemes))]
