"""DeBERTa's positions: one table of offsets, projected in every layer, and often a table of absolute positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding
from locant.hf.mechanisms.table import Table, learned
from locant.hf.methods import replace_method
from locant.schemes import Deberta, Scheme

PROJECTIONS = ("pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj")
"""Layers of an attention that project the vectors of offsets and nothing else."""


@dataclass(frozen=True)
class Disentangled:
    """DeBERTa, DeBERTa-v2 and v3. A scheme holds the vectors of its layer, after the projections.

    In training DeBERTa drops out entries of the vectors. The scheme does not.
    """

    path: str = "embeddings.position_embeddings"
    kind: str = "disentangled"

    def table(self, stack: Any) -> Table | None:
        """Returns the mechanism of the absolute positions; None if the model has none."""
        return None if stack.embeddings.position_embeddings is None else Table(self.path)

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        table, encoder = self.table(stack), stack.get_submodule("encoder")
        replaced = add_embedding(stack, embed) if table is None else table.silence(stack, embed, keep)
        # The tables of offsets between all tokens, and a mask between all tokens, take memory that grows with L².
        for name, function in (
            ("get_rel_pos", _nothing),
            ("get_rel_embedding", _nothing),
            ("get_attention_mask", _mask_of_keys),
        ):
            replace_method(encoder, name, function)
            replaced.append(Replaced(encoder, name, None))
        unused = [(encoder, "rel_embeddings"), (encoder, "LayerNorm")]
        unused += [(module, name) for module in encoder.modules() for name in PROJECTIONS]
        for parent, name in unused:
            if name in parent._modules:
                replaced.append(Replaced(parent, name, getattr(parent, name)))
                setattr(parent, name, nn.Identity())
        return replaced

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        table = self.table(stack)
        embed = None if table is None else learned(table.table(stack))
        encoder: Any = stack.get_submodule("encoder")
        layers = None
        with torch.no_grad():
            vectors = encoder.get_rel_embedding()
            if vectors is not None and any(attention.pos_att_type for attention in attentions):
                layers = [_scheme(attention, vectors) for attention in attentions]
        kind = self.kind if layers is not None else "absolute"
        return Read(f"absolute and {kind}" if layers and embed else kind, embed, layers)

    def own_table(self, stack: nn.Module) -> Tensor | None:
        table = self.table(stack)
        return None if table is None else table.own_table(stack)

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


def _scheme(attention: Any, vectors: Tensor) -> Scheme:
    buckets = getattr(attention, "position_buckets", -1)
    options: dict[str, Any] = {"buckets": attention.max_relative_positions, "spacing": "linear"}
    if buckets > 0:
        options = {"buckets": buckets, "max_distance": attention.max_relative_positions}
    kinds = [kind for kind in ("c2p", "p2c") if kind in attention.pos_att_type]
    if len(kinds) != len(attention.pos_att_type):
        raise NotImplementedError(f"cannot read pos_att_type={attention.pos_att_type}; known are c2p and p2c")
    if len(kinds) == 1:
        options["products"] = kinds[0]
    heads, size = attention.num_attention_heads, attention.attention_head_size
    scheme = Deberta(**options, n_heads=heads, head_dim=size).to(vectors)
    rows = vectors[: 2 * options["buckets"]]
    for kind, parameter in (("c2p", scheme.key_table), ("p2c", scheme.query_table)):
        if parameter is not None:
            projected = _projection(attention, kind)(rows)
            parameter.copy_(projected.view(len(rows), heads, size).transpose(0, 1))
    return scheme


def _projection(attention: Any, kind: str) -> nn.Module:
    """The layer that projects the vectors for q·K (c2p) or k·Q (p2c)."""
    if getattr(attention, "share_att_key", False):
        found: nn.Module = attention.key_proj if kind == "c2p" else attention.query_proj
        return found
    names = ("pos_key_proj", "pos_proj") if kind == "c2p" else ("pos_query_proj", "pos_q_proj")
    projections: list[nn.Module] = [getattr(attention, name) for name in names if hasattr(attention, name)]
    return projections[0]


def _nothing(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    return None


def _mask_of_keys(self: nn.Module, attention_mask: Tensor) -> Tensor | None:
    """Which keys may be attended to, [B, 1, 1, L]; None for all. DeBERTa also masks the queries of padding."""
    mask = attention_mask.bool()
    traced = torch.compiler.is_compiling()
    if mask.ndim > 2:
        if not traced and bool((attention_mask != mask).any()):
            raise TypeError(
                f"a swapped DeBERTa model takes attention masks of 0 and 1 (1 = may attend); got {list(mask.shape)} in "
                f"{attention_mask.dtype} with other values"
            )
        return mask if mask.ndim == 4 else mask.unsqueeze(1)
    if not traced and bool(mask.all()):
        return None
    return mask[:, None, None]
