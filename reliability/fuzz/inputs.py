"""The tensors and the scheme of a case, rebuilt from its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import locant
from locant.schemes.base import DIMS
from locant.schemes.map import Map
from reliability.fuzz.case import Case, named
from reliability.fuzz.problem import Part

# ------------------------------------------------------------------------------------------------- layouts


def _surrounded(x: Tensor) -> Tensor:
    """A slice of a larger tensor that is NaN everywhere else: a read outside the slice shows."""
    big = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
    view = big[tuple(slice(1, 1 + size) for size in x.shape)]
    return view.copy_(x)


def _stepped(x: Tensor) -> Tensor:
    """Every second number along the length and the head, with NaN between them."""
    big = torch.full((*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), torch.nan, dtype=x.dtype)
    return big[:, :, ::2, ::2].copy_(x)


def _one_of_three(x: Tensor) -> Tensor:
    """The middle one of q, k, v in one tensor [B, L, 3, H, D], as a joint projection makes them."""
    b, h, length, d = x.shape
    big = torch.full((b, length, 3, h, d), torch.nan, dtype=x.dtype)
    return big[:, :, 1].transpose(1, 2).copy_(x)


def _unaligned(x: Tensor) -> Tensor:
    """Contiguous, one number after the start of its memory."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def _permuted(x: Tensor) -> Tensor:
    """[B, H, L, D] stored as [L, D, B, H]."""
    return x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "blhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda x: x.mT.contiguous().mT,
    "permuted": _permuted,
    "surrounded": _surrounded,
    "stepped": _stepped,
    "one of three": _one_of_three,
    "unaligned": _unaligned,
    "one batch": lambda x: x[:1].expand(x.shape),
    "one head": lambda x: x[:, :1].expand(x.shape),
    "one token": lambda x: x[:, :, :1].expand(x.shape),
    "one number": lambda x: x[..., :1].expand(x.shape),
}
"""x [B, H, L, D] with other strides."""
REPEATING = ("one batch", "one head", "one token", "one number")
"""Layouts with strides of 0. PyTorch has no forward-mode derivative of them."""


# ------------------------------------------------------------------------------------------------- positions


def _steps(length: int, most: int, g: torch.Generator) -> Tensor:
    return torch.randint(1, most + 1, (length,), generator=g).cumsum(0)


def _integer(low: int, high: int, g: torch.Generator) -> int:
    return int(torch.randint(low, high, (1,), generator=g))


def _chosen(keys: Tensor, lq: int, g: torch.Generator) -> Tensor:
    """Queries at the positions of random keys, or one beside."""
    return keys[torch.randint(len(keys), (lq,), generator=g)] + torch.randint(-1, 2, (lq,), generator=g)


def _shifted(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = torch.arange(lk) + _integer(-50, 200, g)
    return keys[lk - lq :] if lq <= lk else keys[0] + torch.arange(lq), keys


def _apart(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.arange(lq) + _integer(-40, 40, g), torch.arange(lk) + _integer(-40, 40, g)


def _padded(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = (torch.arange(lk) - _integer(0, lk, g)).clamp(min=0)
    return keys[lk - lq :] if lq <= lk else torch.arange(lq), keys


def _gaps(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = _steps(lk, 6, g)
    return _chosen(keys, lq, g), keys


def _far(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = _steps(lk, 10 ** _integer(1, 7, g), g)
    return _chosen(keys, lq, g), keys


def _huge(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    q, k = _apart(lq, lk, g)
    start = _integer(2**20, 2**40, g)
    return q + start, k + start


def _clusters(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two neighbourhoods, up to a billion apart."""
    gap = 10 ** _integer(2, 10, g)
    q, k = (torch.randint(2, (n,), generator=g) * gap + torch.randint(4, (n,), generator=g) for n in (lq, lk))
    return q, k


def _negative(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    q, k = _gaps(lq, lk, g)
    return -q, -k


def _shuffled(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randperm(lq, generator=g) - 3, torch.randperm(lk, generator=g) - 3


def _repeated(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(lk // 2 + 1, (lq,), generator=g), torch.randint(lk // 2 + 1, (lk,), generator=g)


def _packed(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    length = _integer(1, lk + 2, g)
    return torch.arange(lq) % length, torch.arange(lk) % length


def _any(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(-30, 60, (lq,), generator=g), torch.randint(-30, 60, (lk,), generator=g)


def _one_place(lq: int, lk: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    place = _integer(-5, 100, g)
    return torch.full((lq,), place), torch.full((lk,), place)


POSITIONS: dict[str, Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "shifted": _shifted,
    "apart": _apart,
    "padded": _padded,
    "gaps": _gaps,
    "far": _far,
    "huge": _huge,
    "clusters": _clusters,
    "negative": _negative,
    "shuffled": _shuffled,
    "repeated": _repeated,
    "packed": _packed,
    "any": _any,
    "one place": _one_place,
}
"""Positions of the queries and keys of one sequence."""

ONE_ROW = ("L", "1L", "expanded")
"""Shapes of positions with the same numbers for every sequence."""


def full_positions(case: Case) -> tuple[Tensor, Tensor]:
    """The positions of queries and keys that a case has, [B or 1, L], with the defaults filled in."""
    one = case.pos_shape in ONE_ROW or case.positions == "none"
    rows = 1 if one and not (case.pos_shape == "expanded" and case.b == 0) else case.b
    return _full_positions(case.data, case.positions, case.given, rows, case.lq, case.lk)


def in_step(case: Case) -> bool:
    """Whether the queries are the last of the keys."""
    q_pos, k_pos = full_positions(case)
    return case.lq <= case.lk and torch.equal(*torch.broadcast_tensors(q_pos, k_pos[:, case.lk - case.lq :]))


@lru_cache(maxsize=256)
def _full_positions(data: int, kind: str, given: str, rows: int, lq: int, lk: int) -> tuple[Tensor, Tensor]:
    if kind == "none":
        keys = torch.arange(lk)[None]
        return torch.arange(lk - lq, lk)[None], keys
    g = torch.Generator().manual_seed(data + 1)
    pairs = [POSITIONS[kind](lq, lk, g) for _ in range(rows)]
    queries = torch.stack([q for q, _ in pairs]) if rows else torch.zeros(0, lq, dtype=torch.long)
    keys = torch.stack([k for _, k in pairs]) if rows else torch.zeros(0, lk, dtype=torch.long)
    if given == "q" and lq == lk:
        keys = queries
    if given == "k" and lq <= lk:
        queries = keys[:, lk - lq :]
    return queries, keys


def _passed(pos: Tensor, case: Case) -> Tensor:
    """Positions in the shape, dtype and layout of the case."""
    dtype = named(case.pos_dtype)
    limits = torch.iinfo(dtype)
    if pos.numel() and limits.min <= int(pos.min()) and int(pos.max()) <= limits.max:
        pos = pos.to(dtype)
    if case.pos_shape == "L":
        return pos[0]
    if case.pos_shape == "expanded":
        return pos.expand(case.b, -1)
    if case.pos_shape == "strided":
        return pos.repeat_interleave(2, dim=1)[:, ::2]
    if case.pos_shape == "reversed":  # rows that lie behind each other in memory
        return pos.mT.contiguous().mT
    return pos.clone()


# ------------------------------------------------------------------------------------------------- masks


def _of_length(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    b, _, _, k = shape
    return (torch.arange(k) < torch.randint(1, k + 1, (b, 1), generator=g))[:, None, None].expand(shape)


def _dead(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    alive = torch.rand(*shape[:3], 1, generator=g) < 0.6
    return (torch.rand(shape, generator=g) < 0.8) & alive


MASK_KINDS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "random": lambda shape, g: torch.rand(shape, generator=g) < 0.7,
    "sparse": lambda shape, g: torch.rand(shape, generator=g) < 0.15,
    "right": _of_length,
    "left": lambda shape, g: _of_length(shape, g).flip(-1),
    "dead": _dead,
    "nothing": lambda shape, g: torch.zeros(shape, dtype=torch.bool),
    "all": lambda shape, g: torch.ones(shape, dtype=torch.bool),
    "blocks": lambda shape, g: (torch.arange(shape[2])[:, None] // 3 == torch.arange(shape[3]) // 3).expand(shape),
}


def _mask(case: Case, g: torch.Generator) -> Tensor | None:
    """The mask with four dimensions, each 1 or full."""
    if case.mask == "none":
        return None
    dims = {"BK": "B11K", "QK": "11QK", "1K": "111K"}.get(case.mask, case.mask)
    sizes = {"B": case.b, "H": case.h, "Q": case.lq, "K": case.lk, "1": 1}
    return MASK_KINDS[case.mask_kind](tuple(sizes[dim] for dim in dims), g).clone()


def _passed_mask(mask: Tensor, case: Case) -> Tensor:
    """The mask in the shape and layout of the case."""
    if case.mask_layout == "strided":
        mask = mask.repeat_interleave(2, dim=-1)[..., ::2]
    elif case.mask_layout == "transposed":
        mask = mask.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    elif case.mask_layout == "expanded" and len(case.mask) == 4:
        return mask.expand(case.b, case.h, case.lq, case.lk)
    if case.mask in ("BK", "1K"):
        return mask[:, 0, 0]
    return mask[0, 0] if case.mask == "QK" else mask


def _additive(case: Case) -> Tensor | None:
    """Numbers to add to the logits, some of them −∞."""
    if case.additive == "none":
        return None
    g = torch.Generator().manual_seed(case.data + 4)
    sizes = {"B": case.b, "H": case.h, "Q": case.lq, "K": case.lk, "1": 1}
    shape = tuple(sizes[dim] for dim in case.additive)
    hidden = torch.rand(shape, generator=g) < 0.15
    return torch.randn(shape, generator=g).masked_fill(hidden, -torch.inf).to(case.torch_dtype)


# ------------------------------------------------------------------------------------------------- hidden states


def _states(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """The hidden states of queries and keys that a case passes."""
    if not case.reads:
        return None, None
    g = torch.Generator().manual_seed(case.data + 5)
    x_q, x_k = (torch.randn(case.b, n, case.d_model, generator=g).to(case.torch_dtype) for n in (case.lq, case.lk))
    return (None if case.states == "keys" else x_q), (None if case.states == "queries" else x_k)


# ------------------------------------------------------------------------------------------------- sinks

SINKS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": lambda heads, g: 2 * torch.randn(heads, generator=g),
    "large": lambda heads, g: 30 * torch.randn(heads, generator=g),
    "none of it": lambda heads, g: torch.full((heads,), -torch.inf),
    "strided": lambda heads, g: torch.stack([torch.randn(heads, generator=g), torch.full((heads,), torch.nan)], 1)[
        :, 0
    ],
    "one number": lambda heads, g: torch.randn(1, generator=g).expand(heads),
}
"""One logit per head. A sink of −∞ has no effect."""

# ------------------------------------------------------------------------------------------------- all of them


@dataclass
class Inputs:
    """What a case passes to `attend`, and what the reference needs to know about it."""

    q: Tensor
    k: Tensor
    v: Tensor
    scheme: locant.Scheme
    q_pos: Tensor | None
    k_pos: Tensor | None
    mask: Tensor | None
    additive: Tensor | None
    sinks: Tensor | None  # [H]
    x_q: Tensor | None  # [B, Lq, d_model], the hidden states of the queries; None if they are among those of the keys
    x_k: Tensor | None  # [B, Lk, d_model], of the keys; None if they are not passed
    hidden: Tensor | None  # [B or 1, Lk], keys that the mask hides from all queries
    grad: Tensor  # of the output
    weights_grad: Tensor  # of the weights
    positions: tuple[Tensor, Tensor]  # with defaults, [B or 1, L]
    visible: Tensor  # [B, H, Lq, Lk]

    def tensors(self) -> list[Tensor]:
        """Every tensor that a call must leave alone."""
        rest = (self.q_pos, self.k_pos, self.mask, self.additive, self.sinks, self.x_q, self.x_k)
        return [self.q, self.k, self.v, *(x for x in rest if x is not None), *self.scheme.parameters()]


def build(case: Case) -> Inputs:
    """The inputs of a case."""
    g = torch.Generator().manual_seed(case.data)
    dtype = case.torch_dtype

    def numbers(heads: int, length: int, d: int, layout: str, size: float) -> Tensor:
        return LAYOUTS[layout]((size * torch.randn(case.b, heads, length, d, generator=g)).to(dtype))

    q = numbers(case.h, case.lq, case.d, case.q_layout, case.size)
    k = numbers(case.kv, case.lk, case.d, case.k_layout, case.size)
    v = numbers(case.kv, case.lk, case.dv, case.v_layout, 1.0)
    grad = numbers(case.h, case.lq, case.dv, case.grad_layout, 1.0)
    positions = full_positions(case)
    mask = _mask(case, g)
    visible = torch.ones(case.b, case.h, case.lq, case.lk, dtype=torch.bool)
    if mask is not None:
        visible &= mask
    r = (positions[1][:, None, :] - positions[0][:, :, None])[:, None]
    if case.causal:
        visible &= r <= 0
    left, right = case.window or (None, None)
    if left is not None:
        visible &= r >= -left
    if right is not None:
        visible &= r <= right
    additive = _additive(case)
    if additive is not None:
        visible &= additive != -torch.inf
    passes = case.positions != "none"
    own = torch.Generator().manual_seed(case.data + 3)
    x_q, x_k = _states(case)
    return Inputs(
        q=q,
        k=k,
        v=v,
        scheme=build_scheme(case),
        q_pos=_passed(positions[0], case) if passes and case.given != "k" else None,
        k_pos=_passed(positions[1], case) if passes and case.given != "q" else None,
        mask=None if mask is None else _passed_mask(mask, case),
        additive=additive,
        sinks=None if case.sinks == "none" else SINKS[case.sinks](case.h, own).to(named(case.parameters)),
        x_q=x_q,
        x_k=x_k,
        hidden=None if mask is None else ~mask.expand(-1, -1, -1, case.lk).any(2).any(1),
        grad=grad,
        weights_grad=torch.randn(visible.shape, generator=g).to(dtype),
        positions=positions,
        visible=visible,
    )


def build_scheme(case: Case) -> locant.Scheme:
    """The scheme of a case. Its parameters are away from where they start, where some have no effect."""
    torch.default_generator.manual_seed(case.data)
    scheme = locant.scheme(case.spec, n_heads=case.h, head_dim=case.d, d_model=case.d_model)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    scheme.to(named(case.parameters))
    with torch.no_grad():
        for parameter in scheme.parameters():  # at 2 the power of kerple has a kink: no derivative to compare
            parameter[parameter == 2] = 1.5
    return scheme.requires_grad_("p" in case.wanted)


def parts_of(scheme: locant.Scheme) -> list[tuple[Part, list[str]]]:
    """The parts of a scheme for the reference, and for each the names of its parameters in `named_parameters`."""
    names = {id(parameter): name for name, parameter in scheme.named_parameters()}
    parts = []
    for whole in scheme.parts_of_sum():
        mapped = None
        part = whole
        if isinstance(whole, Map):
            part, mapped = whole.scheme, (whole.name(), {**_defaults(whole), **whole.options()})
        constants = {name: x for name, x in part.named_buffers() if name == "coefficients"}  # of fope
        speeds = {name: x for name, x in part.named_buffers() if name == "speeds"}  # of a rotation
        params = {**dict(part.named_parameters()), **speeds}
        found = [names[id(x)] for x in params.values() if id(x) in names]
        options = {**_defaults(part), **part.options(), **constants}
        parts.append((Part(part.name(), params, options, mapped), found))
    return parts


def _defaults(scheme: locant.Scheme) -> dict[str, Any]:
    return {name: x.default for name, x in scheme.arguments().items() if name not in DIMS}
