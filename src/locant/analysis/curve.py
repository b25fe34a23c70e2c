"""A scheme as curves over the offset r = key − query: one curve per head, or one for all heads.

bias               added to the logit
gain               the factor on q·k; for a vector gain, its mean over the head
query, key, value  the norm of the vector
query_side, …      the norm of the vector that meets what a scheme computes of each query (or key_side: key)
level              the factor on the numbers that a scheme computes of the query and of the key
levels             what these numbers add to the logit when all tokens are the same: q = k = (1, …, 1), hidden states 0
temperature        the factor on the whole logit of a query, by its position and not by the offset
rotate             (R_p x)·(R_{p+r} x) / x·x for x = (1, …, 1), p in the middle: the factor on q·k when q = k
embed              cosine between the embeddings of positions p and p + r, p in the middle
pair               added to the logit when all tokens are the same (q = k = (1, …, 1)), query at p

`kernels` returns the parts that TISA's curve is the sum of: a_s · exp(−|b_s| (r − c_s)²) for each kernel s. For the
later version, tisa2, they are the steps |a_s| · sigmoid(± (r − c_s) / b_s) inside its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.schemes import Scheme
from locant.terms import VECTORS, Tokens


@dataclass(frozen=True)
class Curve:
    """One quantity over the offset. `values` is [heads, offsets]; heads = 1 where all heads share it."""

    spec: str
    field: str
    what: str
    r: list[int]
    values: list[list[float]]
    axis: str = "offset"
    """What `r` holds: offsets, or for a temperature the positions of queries."""

    def rows(self) -> list[dict[str, str | int | float]]:
        """Returns the long form, for a csv file. A field that is not over offsets says so in its name."""
        field = self.field if self.axis == "offset" else f"{self.field} by {self.axis}"
        return [
            {"scheme": self.spec, "field": field, "head": head, "r": r, "value": value}
            for head, line in enumerate(self.values, start=1)
            for r, value in zip(self.r, line, strict=True)
        ]


@dataclass(frozen=True)
class Kernels:
    """The curve of TISA and the kernels that it is the sum of, per head."""

    spec: str
    what: str
    r: list[int]
    total: list[list[float]]  # [heads, offsets]: the sum
    kernels: list[list[list[float]]]  # [heads, kernels, offsets]
    amplitude: list[list[float]]  # [heads, kernels], like the two below
    sharpness: list[list[float]]  # for tisa2 its inverse: the width of a step
    offset: list[list[float]]


@dataclass(frozen=True)
class Bank:
    """Curves over the offset that every token mixes to one of its own (Inkling)."""

    spec: str
    r: list[int]
    curves: list[list[float]]  # [curves, offsets], of the first head


WHAT = {
    "bias": "added to the logit",
    "gain": "factor on q·k",
    "query": "norm of the vector multiplied by q",
    "key": "norm of the vector multiplied by k",
    "value": "norm of the vector added to v",
    "query_side": "norm of the vector multiplied by what is read of the query",
    "key_side": "norm of the vector multiplied by what is read of the key",
    "level": "factor on the levels of query and key",
    "levels": "added to the logit, all tokens the same",
    "temperature": "factor on the whole logit",
    "rotate": "factor on q·k where q = k",
    "embed": "cosine of two embeddings",
    "pair": "added to the logit, all tokens the same",
}
"""The quantity on the vertical axis, by the field of a curve."""
POSITIONS = [2**step - 1 for step in range(18)]
"""Positions of queries at which temperatures are shown."""


@torch.no_grad()
def curves(scheme: Scheme, reach: int = 64) -> list[Curve]:
    """Returns the curves of a scheme for r from −reach to reach; an empty list for a scheme that does nothing."""
    r, found = quantities(scheme, reach)
    lines = [
        Curve(str(scheme), name, WHAT[name], r.tolist(), values.double().tolist()) for name, values in found.items()
    ]
    return [*lines, *_of_sides(scheme, r)]


def quantities(scheme: Scheme, reach: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the offsets r [R], and each quantity of the list above over them, [H or 1, R], by the name of its field.

    Gradients by the parameters of the scheme pass through.
    """
    if reach < 1:
        raise ValueError(f"reach must be 1 or more; got {reach}")
    if scheme.max_length is not None:
        reach = min(reach, (scheme.max_length - 1) // 2)
    r = torch.arange(-reach, reach + 1)
    found: dict[str, Tensor] = {}

    terms = scheme.terms(r)
    if terms.score is not None:  # the part of the bias that the model's scale multiplies
        scaled = terms.score * scheme.scale(getattr(scheme, "head_dim", 64))
        found["bias"] = scaled if terms.bias is None else terms.bias + scaled
    elif terms.bias is not None:
        found["bias"] = terms.bias
    if terms.gain is not None:
        found["gain"] = terms.gain if terms.gain.ndim == 2 else terms.gain.mean(-1)
    if terms.level is not None:
        found["level"] = terms.level
    for name in VECTORS:
        vectors = getattr(terms, name)
        if vectors is not None:
            found[name] = vectors.norm(dim=-1)

    here, there = torch.tensor([[reach]]), reach + r[None]
    double = any(parameter.dtype == torch.float64 for parameter in scheme.parameters())
    ones = torch.ones(
        1, getattr(scheme, "n_heads", 1), 2 * reach + 1, getattr(scheme, "head_dim", 64),
        dtype=torch.float64 if double else torch.float32,
    )  # fmt: skip
    q = ones[:, :, :1]
    if scheme.rotates:
        products = _rotated(scheme, q, ones, here, there)[0, :, 0] / ones.shape[-1]
        found["rotate"] = products[:1] if bool((products == products[:1]).all()) else products
    if terms.pair is not None:
        pair = terms.pair(q, ones, here, there, scale=scheme.scale(ones.shape[-1]), visible=None)
        found["pair"] = pair[0, :, 0]
    embedded = scheme.embed(there[0])
    if embedded is not None:
        found["embed"] = F.cosine_similarity(embedded[reach : reach + 1], embedded)[None]
    return r, found


def _of_sides(scheme: Scheme, r: Tensor) -> list[Curve]:
    """The curves of what a scheme computes for each token: levels, and temperatures by position."""
    if not scheme.has_sides:
        return []
    terms = scheme.terms(r)
    found, keys, middle = [], r + len(r) // 2, torch.tensor([len(r) // 2])
    sides = scheme.sides(_same_tokens(scheme, middle, keys))
    levels = [x for x in (sides.query_level, sides.key_level) if x is not None]
    if levels:
        # the query has one number, every key its own
        of_pairs = torch.stack([x[0].expand(-1, len(r)) for x in levels]).sum(0)
        added = of_pairs if terms.level is None else terms.level * of_pairs
        shown = r <= 0 if scheme.causal_only else r == r  # for later keys the formula is not meant
        found.append(Curve(str(scheme), "levels", WHAT["levels"], r[shown].tolist(), added[:, shown].double().tolist()))
    pos = torch.tensor(POSITIONS)
    heat = scheme.sides(_same_tokens(scheme, pos, pos)).temperature
    if heat is not None:
        values = heat[0].double().tolist()
        found.append(Curve(str(scheme), "temperature", WHAT["temperature"], POSITIONS, values, "position"))
    return found


def _same_tokens(scheme: Scheme, q_pos: Tensor, k_pos: Tensor) -> Tokens:
    """Tokens with queries and keys (1, …, 1) and hidden states 0."""
    heads, size = getattr(scheme, "n_heads", 1), getattr(scheme, "head_dim", 64)
    q, k = (torch.ones(1, heads, len(pos), size) for pos in (q_pos, k_pos))
    states = [torch.zeros(1, len(pos), getattr(scheme, "d_model", 1)) for pos in (q_pos, k_pos)]
    read_q, read_k = (scheme.read(x) if scheme.reads else None for x in states)
    return Tokens(q, k, (q_pos[None], k_pos[None]), read_q, read_k, scheme.scale(size))


def _rotated(scheme: Scheme, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The products of rotated queries and keys, [B, H, Lq, Lk]."""
    turned_q, turned_k = scheme.rotate(q, k, q_pos, k_pos)
    product, far = turned_q @ turned_k.mT, scheme.rotate_far(q, k, q_pos, k_pos)
    if far is None:
        return product
    r = k_pos[:, None, None, :] - q_pos[:, None, :, None]
    product = torch.where(r < -far.window, far.left @ far.keys.mT, product)
    return torch.where(r > far.window, far.right @ far.keys.mT, product)


@torch.no_grad()
def kernels(scheme: Scheme, reach: int = 64) -> list[Kernels]:
    """Returns the kernels of each part of a scheme that is a sum of kernels (TISA); none for all other schemes."""
    found = []
    for part in scheme.parts_of_sum():
        r = torch.arange(-reach, reach + 1, device=next(part.parameters(), torch.empty(0)).device)
        components = part.components(r)
        if components is None:
            continue
        found.append(
            Kernels(
                str(part),
                components.meaning,
                r.tolist(),
                components.total.double().tolist(),
                components.kernels.mT.double().tolist(),
                components.amplitude.double().tolist(),
                components.sharpness.abs().double().tolist(),
                components.offset.double().tolist(),
            )
        )
    return found


@torch.no_grad()
def banks(scheme: Scheme, reach: int = 64) -> list[Bank]:
    """Returns the curves that tokens mix, of each part of a scheme that has such curves (Inkling)."""
    found = []
    for part in scheme.parts_of_sum():
        r = torch.arange(-reach, reach + 1, device=next(part.parameters(), torch.empty(0)).device)
        basis = part.basis(r)
        if basis is None:
            continue
        used = (basis[0] != 0).any(-1).nonzero()[:, 0]
        if len(used):
            r, basis = r[used[0] : used[-1] + 1], basis[:, used[0] : used[-1] + 1]
        found.append(Bank(str(part), r.tolist(), basis[0].mT.double().tolist()))
    return found
