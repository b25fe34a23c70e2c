"""Relevance at the seam: what flows from each key to each query, and which part of it is due to position.

One head computes out_i = Σ_j w_ij (v_j + u_r). Its weights are held, so with g_i, the gradient of the explained output
by out_i, the relevance that flows from key j to query i is

    R_ij = w_ij (v_j + u_r)·g_i

Let w⁰ be the weights without positions: the same queries, keys and masks, with no rotation, no gain, no vectors, no
bias and no temperature. Then R_ij = C_ij + P_ij, with

    C_ij = w⁰_ij v_j·g_i                                    through content
    P_ij = (w_ij − w⁰_ij) v_j·g_i + w_ij u_r·g_i            through position

If a scheme has several kinds of terms, they are put back one after another, in the order of KINDS, and each kind gets
the change of the weights that it makes; the sum over kinds is P_ij. Masks (causal, windows) belong to content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locant.analysis.attribution.rules import Linearized
from locant.attention import eager
from locant.attention.request import Request
from locant.hf.call import AttentionCall
from locant.schemes import Nope
from locant.terms import Sides

KINDS = ("rotation", "gain", "vectors", "bias", "temperature", "value")
"""How positions act in attention, in the order in which they are put back. `value`: vectors u_r beside the values."""


@dataclass(frozen=True)
class Flow:
    """The relevance that flows through one attention, by offset and head."""

    name: str
    offsets: Tensor  # [R]
    relevance: Tensor  # [H, R]: Σ R_ij over the pairs of each offset
    gross: Tensor  # [H, R]: Σ |R_ij|
    content: Tensor  # [H, R]: Σ |C_ij|
    position: Tensor  # [H, R]: Σ |P_ij|
    net: Tensor  # [H, R]: Σ P_ij
    kinds: dict[str, Tensor]  # kind -> [H]: Σ |P_ij| of this kind alone

    @property
    def share(self) -> Tensor:
        """[H]: Σ |P| / (Σ |C| + Σ |P|), the share of position in what flows through each head; 0 where nothing does."""
        content, position = self.content.sum(1), self.position.sum(1)
        return position / (content + position).clamp(min=1e-30)


class Path:
    """Which attention weights the backward pass takes: those of the model, or those without positions."""

    def __init__(self) -> None:
        self.content_only = False


class _Attending(torch.autograd.Function):
    """w v, linear in v, with a backward pass along the weights that a `Path` chooses."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weights: Tensor, content: Tensor, path: Path) -> Tensor:
        ctx.save_for_backward(weights, content)
        ctx.path = path
        return weights @ value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, content = ctx.saved_tensors
        chosen = content if ctx.path.content_only else weights
        return chosen.mT @ gradients[0], None, None, None


@dataclass
class Recorded:
    """One attention of the run, until its gradient is known."""

    name: str
    out: Tensor  # [B, H, Lq, D], a part of the graph
    value: Tensor  # [B, H, Lk, D]
    steps: list[tuple[str, Tensor]]  # weights [B, H, Lq, Lk] as the kinds are put back; the first is w⁰, named ""
    request: Request

    def flow(self, gradient: Tensor | None) -> Flow:
        """Returns the flow of the first sequence, from the gradient of the explained output by `out`."""
        r = (self.request.k_pos[:, None, :] - self.request.q_pos[:, :, None])[0]
        offsets, column = r.unique(return_inverse=True)
        g = torch.zeros_like(self.out[0]) if gradient is None else gradient[0]
        product = (g @ self.value[0].mT).double()  # [H, Lq, Lk]: v_j·g_i
        weights = [weight[0].double() for _, weight in self.steps]
        content, position, kinds = weights[0] * product, (weights[-1] - weights[0]) * product, {}
        for at, (kind, _) in enumerate(self.steps[1:], 1):
            kinds[kind] = ((weights[at] - weights[at - 1]) * product).abs().sum((1, 2))
        added = self.request.terms.value
        if added is not None:
            table = added.to(g.dtype).expand(g.shape[0], -1, -1)[:, self._columns()]
            by_value = weights[-1] * torch.einsum("hid,hijd->hij", g, table).double()
            position, kinds["value"] = position + by_value, by_value.abs().sum((1, 2))
        whole = content + position
        parts = (whole, whole.abs(), content.abs(), position.abs(), position)
        relevance, gross, of_content, of_position, net = (_by_offset(part, column, len(offsets)) for part in parts)
        return Flow(self.name, offsets, relevance, gross, of_content, of_position, net, kinds)

    def _columns(self) -> Tensor:
        request = self.request
        return request.offsets.columns(request.q_pos, request.k_pos, slice(None))[0]


def _by_offset(x: Tensor, column: Tensor, count: int) -> Tensor:
    """[H, count]: sums of x [H, Lq, Lk] over the pairs of each column."""
    return x.new_zeros(x.shape[0], count).scatter_add(1, column.flatten().expand(x.shape[0], -1), x.flatten(1))


class Attentions:
    """An observer of attention that computes every call by the rules, and records it."""

    def __init__(self, mode: Linearized, names: dict[Any, str]) -> None:
        self.mode, self.names, self.path = mode, names, Path()
        self.calls: list[Recorded] = []
        self.values: list[Tensor] = []
        """Leaves of what vectors u_r add to the outputs, [B, H, Lq, D]."""

    def before(self, call: AttentionCall) -> AttentionCall:
        """Returns the call to compute: queries and keys held, and with a scheme, weights held too."""
        held = replace(call, query=call.query.detach(), key=call.key.detach(), dropout=0.0)
        if call.scheme is None:
            return held
        with self.mode.off(), torch.no_grad():
            request = held.request()
            steps = _steps(request)
            value = None
            if request.terms.value is not None:
                value = _value_part(request, steps[-1][1])

        def attention(module: Any, query: Tensor, key: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._attend(self.names.get(call.module, type(call.module).__name__), request, steps, v, value), None

        return replace(
            held, scheme=None, positions=None, transformers_attention=attention, states=None, position_bias=None
        )

    def _attend(
        self, name: str, request: Request, steps: list[tuple[str, Tensor]], v: Tensor, value: Tensor | None
    ) -> Tensor:
        """The output [B, Lq, H, D]."""
        v = v[:, :, : request.k.shape[2]].to(request.wide)
        groups = request.q.shape[1] // v.shape[1]
        v = v if groups == 1 else v.repeat_interleave(groups, dim=1)
        with self.mode.off():
            out = _Attending.apply(v, steps[-1][1].to(v.dtype), steps[0][1].to(v.dtype), self.path)
        if value is not None:
            leaf = value.to(v.dtype).requires_grad_()
            self.values.append(leaf)
            out = out + leaf
        assert isinstance(out, Tensor)
        if out.requires_grad:
            self.calls.append(Recorded(name, out, v.detach(), steps, request))
        return out.to(request.q.dtype).transpose(1, 2).contiguous()


def _steps(request: Request) -> list[tuple[str, Tensor]]:
    """Attention weights without positions, then with one kind of terms after another."""
    used = kinds_of(request)
    found = []
    for count in range(len(used) + 1):
        part = _without(request, set(used[count:]))
        found.append(("" if count == 0 else used[count - 1], _weights(part)))
    return found


def kinds_of(request: Request) -> list[str]:
    """The kinds of terms that change the weights of a request, in the order of KINDS."""
    terms, sides = request.terms, request.sides
    used = {
        "rotation": request.scheme.rotates or request.far is not None,
        "gain": terms.gain is not None,
        "vectors": terms.query is not None or terms.key is not None,
        "bias": any(x is not None for x in (terms.bias, terms.pair, sides.query_level, sides.key_level)),
        "temperature": sides.temperature is not None,
    }
    return [kind for kind in KINDS if used.get(kind)]


def _without(request: Request, kinds: set[str]) -> Request:
    """A request without some kinds of terms."""
    terms, sides = request.terms, request.sides
    if "rotation" in kinds:
        request = replace(request, scheme=Nope(), far=None, rotated=(request.q, request.k))
    if "gain" in kinds:
        terms = replace(terms, gain=None)
    if "vectors" in kinds:
        terms = replace(terms, query=None, key=None)
    if "bias" in kinds:
        terms = replace(terms, bias=None, pair=None, level=None)
        sides = Sides(query=sides.query, key=sides.key, temperature=sides.temperature)
    if "temperature" in kinds:
        sides = replace(sides, temperature=None)
    return replace(request, terms=terms, sides=sides)


def _weights(request: Request) -> Tensor:
    """The attention weights [B, H, Lq, Lk] of a request."""
    return eager.attend(replace(request, need_weights=True))[1]  # type: ignore[return-value]


def _value_part(request: Request, weights: Tensor) -> Tensor:
    """Σ_j w_ij u_r, [B, H, Lq, D]."""
    zero = torch.zeros_like(request.v)
    out = eager.attend(replace(request, v=zero))[0]
    return out.to(weights.dtype)
