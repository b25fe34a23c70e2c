"""Which pairs of tokens attention can see: the offsets ω that curves are centred by, measured in one run."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.schemes import Scheme


@torch.no_grad()
def visible_pairs(model: PreTrainedModel, ids: Tensor, schemes: Collection[Scheme]) -> dict[Scheme, Tensor]:
    """Returns the visible pairs of tokens at offsets −(L − 1) … L − 1, [2 L − 1], in all layers of each scheme.

    `ids` is one sequence [1, L]. Causality and windows count as the model itself applies them, layer by layer. A scheme
    that no attention ran is missing.
    """
    reach = ids.shape[1] - 1
    found: dict[Scheme, Tensor] = {}

    def record(call: AttentionCall) -> None:
        if call.scheme is None or call.scheme not in schemes:
            return
        request = call.request()
        r = (request.k_pos[:, None, :] - request.q_pos[:, :, None])[:, None]  # [1, 1, Lq, Lk]
        seen = request.visible()
        weight = torch.ones_like(r) if seen is None else seen.expand(-1, -1, *r.shape[2:])
        weight = weight.double().mean(1, keepdim=True)  # over heads
        columns = (r.expand_as(weight) + reach).flatten().cpu()
        inside = (columns >= 0) & (columns <= 2 * reach)
        counts = torch.bincount(columns[inside], weight.flatten().cpu()[inside], minlength=2 * reach + 1)
        found[call.scheme] = found[call.scheme] + counts if call.scheme in found else counts

    with observing(before=record):
        model.base_model(input_ids=ids)
    return found
