"""Attention with every scheme as whole tensors, in any dtype: what the random calls are compared with.

`tests/oracles.py` states the equations as loops over (i, j); this file states them once more, as tensor operations that
autograd can differentiate. Nothing is shared with the code under test. A test compares it with the loops.

`Arithmetic` says how it rounds. In float64 without jitter the result is the truth. In the dtype of a call it is the
plain computation whose error sets the tolerance (see `reliability.fuzz.tolerance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from reliability.fuzz import maps
from reliability.fuzz.problem import Arithmetic, Options, Part, Problem
from tests import oracles


def attention(p: Problem, a: Arithmetic) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and weights [B, H, Lq, Lk] by the equations of `locant.terms`."""
    k, v = p.all_heads(p.k), p.all_heads(p.v)
    temperature = _temperature(p, a)
    logit = p.scale * _content(p, a, k, temperature)
    for part in p.parts:
        if part.name in ADDED:
            added = _of_offsets(p, part, lambda p, part: ADDED[part.name](p, a, part, k)).to(a.dtype)
            logit = logit + (added if temperature is None else added * temperature)
    if p.softcap is not None:
        logit = p.softcap * _tanh(logit / p.softcap, a)
    if p.additive is not None:
        logit = logit + p.additive
    nothing = ~p.visible.any(-1, keepdim=True)
    logit = logit.masked_fill(~p.visible, -torch.inf).masked_fill(nothing, 0.0)
    sink = None if p.sinks is None else p.sinks.to(logit.dtype)[:, None, None].expand(*logit.shape[:-1], 1)
    weights = _softmax(logit, sink).masked_fill(nothing, 0.0)
    kept = _rounded_weights(a, weights if p.keep is None else weights * p.keep, logit)
    if a.coarse:
        kept = a.store(kept)
    out = kept @ v
    for part in p.parts:
        if part.name == "shaw" and part.options["values"]:
            out = out + (kept[..., None] * _of_offsets(p, part, _value_rows)).sum(-2)
    out = a.store(out)
    if a.jitter is not None and logit.requires_grad:
        _round_backward(a, logit, sink, weights.detach(), v.detach(), out)
    return out, kept


def _tanh(x: Tensor, a: Arithmetic) -> Tensor:
    """tanh. The slope that autograd computes for torch's, 1 − tanh², is rounding where tanh is flat."""
    if not a.steep:
        return torch.tanh(x)
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    small = (-2 * sign * x).exp()
    return sign * (1 - small) / (1 + small)  # the two terms of its derivative have the same sign


def _softmax(logit: Tensor, sink: Tensor | None) -> Tensor:
    """exp(l_ij) / (exp(s_h) + Σ_j exp(l_ij)), shifted by the largest of them. `sink` is [B, H, Lq, 1]."""
    if sink is None:
        return logit.softmax(-1)
    top = torch.maximum(logit.amax(-1, keepdim=True), sink).detach()
    numerator = (logit - top).exp()
    return numerator / ((sink - top).exp() + numerator.sum(-1, keepdim=True))


def _rounded_weights(a: Arithmetic, weights: Tensor, logit: Tensor) -> Tensor:
    """The weights, each moved by a unit in the last place, and those of a query together by one of its largest logit.

    The second is the rounding of the logarithm of a sum of exponentials, from which kernels compute weights backwards.
    """
    if a.jitter is None:
        return weights
    top = logit.detach().amax(-1, keepdim=True).abs()
    return a.moved(weights) * (1 + torch.finfo(a.dtype).eps * top * a.noise(top))


def _round_backward(a: Arithmetic, logit: Tensor, sink: Tensor | None, weights: Tensor, v: Tensor, out: Tensor) -> None:
    """Adds the rounding of dS_ij = P_ij (g_i·v_j − g_i·o_i) to the gradient of the logits, with g that of the output.

    The gradient of a sink, which has no value, is −P_i (g_i·o_i).

    The two products round apart: g·v as a sum of `dtype`, and g·o for all keys of a query at once, with an output that
    was stored. Autograd alone would compute both alike, and cancel their errors (see tests/attention/rounding.py).
    """
    seen: list[Tensor] = []
    out.register_hook(lambda g: seen.append(g))
    stored = out.detach()

    def rounded(gradient: Tensor) -> Tensor:
        pair = weights * (seen[0].square() @ v.square().mT).sqrt() * torch.finfo(a.dtype).eps
        return gradient + pair * a.noise(pair) + weights * of_query()

    def of_query() -> Tensor:
        size = (seen[0] * stored).square().sum(-1, keepdim=True).sqrt() * torch.finfo(a.stored).eps
        return size * a.noise(size)

    logit.register_hook(rounded)
    if sink is not None and sink.requires_grad:
        sink.register_hook(lambda gradient: gradient + (1 - weights.sum(-1, keepdim=True)) * of_query())


def _of_offsets(p: Problem, part: Part, compute: Callable[[Problem, Part], Tensor]) -> Tensor:
    """What a part computes for every pair, at the offsets, or for a `PAIRS` the positions, of its map."""
    if part.map is None:
        return compute(p, part)
    if part.name in PAIRS:
        return compute(replace(p, **_mapped_positions(p, part.map)), part)
    at = maps.offsets(*part.map, p.r)
    if not at.is_floating_point() or part.name in maps.FORMULAS:
        return compute(replace(p, offsets=at), part)
    below = at.floor().long()
    lower, upper = (compute(replace(p, offsets=index), part) for index in (below, below + 1))
    share = (at - below)[:, None].to(lower.dtype)
    return lower + (share[..., None] if lower.ndim == 5 else share) * (upper - lower)


def _mapped_positions(p: Problem, mapped: tuple[str, Options]) -> dict[str, Tensor]:
    return {name: maps.positions(*mapped, getattr(p, name)) for name in ("q_pos", "k_pos")}


def _temperature(p: Problem, a: Arithmetic) -> Tensor | None:
    """The product of all temperatures; None if there is none."""
    found = [TEMPERATURES[part.name](p, a, part) for part in p.parts if part.name in TEMPERATURES]
    return math.prod(found[1:], start=found[0]) if found else None


def _content(p: Problem, a: Arithmetic, k: Tensor, temperature: Tensor | None) -> Tensor:
    """τ_i Σ_t (R q_i)_t gain_t (R k_j)_t, [B, H, Lq, Lk]; with SelfExtend the positions depend on the distance."""
    far = [part.map[1] for part in p.parts if part.map is not None and _turns_far(part)]
    if not far:
        return _product(p, a, k, temperature, None)
    near, before, after = (_product(p, a, k, temperature, side) for side in (None, 1, -1))
    r, window = p.r[:, None], int(far[0]["window"])
    return torch.where(r < -window, before, torch.where(r > window, after, near))


def _turns_far(part: Part) -> bool:
    return part.name in ROTATIONS and part.map is not None and part.map[0] == "selfextend"


def _turned_positions(p: Problem, part: Part, side: int | None) -> tuple[Tensor, Tensor]:
    """The positions by which a part rotates queries and keys; `side` is that of `maps.far_positions`."""
    if part.map is None or (_turns_far(part) and side is None):
        return p.q_pos, p.k_pos
    if _turns_far(part) and side is not None:
        return maps.far_positions(part.map[1], p.q_pos, p.k_pos, side)
    mapped = _mapped_positions(p, part.map)
    return mapped["q_pos"], mapped["k_pos"]


def _product(p: Problem, a: Arithmetic, k: Tensor, temperature: Tensor | None, side: int | None) -> Tensor:
    q = p.q
    for part in p.parts:
        if part.name in ROTATIONS:
            q_pos, k_pos = _turned_positions(p, part, side)
            at = replace(p, q_pos=q_pos, k_pos=k_pos)
            q = ROTATIONS[part.name](at, a, part, q, q_pos, 1)
            k = ROTATIONS[part.name](at, a, part, k, k_pos, -1)
    gains = [_of_offsets(p, part, GAINS[part.name]) for part in p.parts if part.name in GAINS]
    if any(part.name in ROTATIONS for part in p.parts) and q.dtype == a.dtype:  # xpos may have widened them
        q, k = a.store(q), a.store(k)
    if temperature is not None:  # torch's kernel knows none, and gets queries times the temperature
        q = a.store(q * temperature) if q.dtype == a.dtype else q * temperature
    vectors = [gain for gain in gains if gain.ndim == 5]
    if vectors:
        pairs = q[:, :, :, None] * k[:, :, None]
        for gain in vectors:
            pairs = pairs * gain
        product = pairs.sum(-1)
    else:
        product = q @ k.mT
    for gain in gains:
        product = product * gain if gain.ndim == 4 else product
    return product.to(a.dtype)


def embedding(part: Part, pos: Tensor, d_model: int, a: Arithmetic) -> Tensor:
    """What the scheme adds to the token embeddings, [*pos.shape, d_model]."""
    if part.map is not None:
        return _mapped_embedding(part, pos, d_model, a)
    if part.name == "learned":
        return part.params["table"][pos]
    if part.name == "first":
        return torch.where((pos == 0)[..., None], part.params["first"], part.params["rest"])
    pairs = torch.arange(d_model, dtype=torch.float64) // 2
    angle = a.constant(pos.double()[..., None] * part.options["theta"] ** (-2 * pairs / d_model))
    waves = torch.where(torch.arange(d_model) % 2 == 0, angle.sin(), angle.cos())
    return a.store((part.options["amplitude"] * waves).to(a.dtype))


def _mapped_embedding(part: Part, pos: Tensor, d_model: int, a: Arithmetic) -> Tensor:
    assert part.map is not None
    at, plain = maps.positions(*part.map, pos), replace(part, map=None)
    if not at.is_floating_point() or part.name in maps.FORMULAS:
        return embedding(plain, at, d_model, a)
    below = at.floor().long()
    above = (below + 1).clamp(max=part.options["length"] - 1) if part.name == "learned" else below + 1
    lower, upper = (embedding(plain, index, d_model, a) for index in (below, above))
    return lower + (at - below)[..., None].to(lower.dtype) * (upper - lower)


# ------------------------------------------------------------------------------------------------- tables


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """The row of every pair, [B or 1, H or 1, Lq, Lk, …], of a table [H or 1, N, …]."""
    return table[:, index].transpose(0, 1)


def _clipped(r: Tensor, clip: int) -> Tensor:
    return r.clamp(-clip, clip) + clip


def _value_rows(p: Problem, part: Part) -> Tensor:
    return _rows(part.params["value_table"], _clipped(p.r, part.options["clip"]))


def _q_dot(p: Problem, rows: Tensor) -> Tensor:
    return (p.q[:, :, :, None, :] * rows).sum(-1)


def _k_dot(k: Tensor, rows: Tensor) -> Tensor:
    return (k[:, :, None, :, :] * rows).sum(-1)


def _by_offset(r: Tensor, row: Callable[[int], int]) -> Tensor:
    """The table row of every pair, by a function of one offset."""
    offsets, inverse = torch.unique(r, return_inverse=True)
    return torch.tensor([row(x) for x in offsets.tolist()])[inverse]


def _shaw(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    return p.scale * _q_dot(p, _rows(part.params["table"], _clipped(p.r, part.options["clip"])))


def _huang4(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    rows = _rows(part.params["table"], _clipped(p.r, part.options["clip"]))
    return p.scale * (_q_dot(p, rows) + _k_dot(k, rows))


def _toeplitz(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    return _rows(part.params["table"], _clipped(p.r, part.options["clip"]))


def _t5(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    o = part.options
    sizes = o["buckets"], o["max_distance"], o["bidirectional"]
    return _rows(part.params["table"], _by_offset(p.r, lambda r: oracles.t5_bucket(r, *sizes)))


def _deberta(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    o, buckets = part.options, part.options["buckets"]

    def row(r: int) -> int:
        bucket = oracles.deberta_bucket(-r, buckets, o["max_distance"]) if o["spacing"] == "log" else -r
        return max(0, min(bucket + buckets, 2 * buckets - 1))

    index = _by_offset(p.r, row)
    total = torch.zeros((), dtype=k.dtype)
    if o["products"] in ("both", "c2p"):
        total = total + _q_dot(p, _rows(part.params["key_table"], index))
    if o["products"] in ("both", "p2c"):
        total = total + _k_dot(k, _rows(part.params["query_table"], index))
    return p.scale * total


def _xl(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """scale * (u.k_j + (q_i + v).(W s(-r)))."""
    w, u, v = (part.params[name] for name in ("project", "content_bias", "position_bias"))
    pairs = torch.arange(w.shape[2] // 2, dtype=torch.float64)
    angle = a.constant(-p.r.double()[..., None] * part.options["theta"] ** (-2 * pairs / w.shape[2]))
    s = torch.cat([angle.sin(), angle.cos()], dim=-1).to(w.dtype)  # [B or 1, Lq, Lk, d_model]
    projected = torch.einsum("bijm,hdm->bhijd", s, w)
    with_v = (v[:, None, None, :] * projected).sum(-1)
    return p.scale * (_q_dot(p, projected) + with_v + (u[:, None, :] * k).sum(-1)[:, :, None, :])


# ------------------------------------------------------------------------------------------------- biases


def _per_head(x: Tensor) -> Tensor:
    """[H, …] → [H, 1, 1, …], against pairs [B, H, Lq, Lk, …]."""
    return x[:, None, None]


def _tisa(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    amplitude, sharpness, centre = (_per_head(part.params[x]) for x in ("amplitude", "sharpness", "offset"))
    distance = p.r.to(a.dtype)[:, None, :, :, None] - centre
    return (amplitude * torch.exp(-sharpness.abs() * distance**2)).sum(-1)


def _tisa2(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    amplitude, sharpness, centre = (_per_head(part.params[x]) for x in ("amplitude", "sharpness", "offset"))
    distance = p.r.to(a.dtype)[:, None, :, :, None] - centre
    steps = amplitude.abs() * torch.sigmoid(amplitude.sign() * distance / sharpness)
    aware = torch.arange(p.n_heads) < p.n_heads - part.options["free"]
    inside = 1e-8 + _per_head(part.params["bias"].abs()) + steps.sum(-1) * _per_head(aware)
    slopes = [oracles.tisa2_slope(h, p.n_heads, part.options) for h in range(p.n_heads)]
    return inside.log() - _slanted(p, a, slopes)


def _slanted(p: Problem, a: Arithmetic, slopes: list[float]) -> Tensor:
    """slope_h |r| with slopes that are no parameters."""
    slope = _per_head(torch.tensor(slopes, dtype=torch.float64))
    return a.constant(slope * p.r.abs()[:, None]).to(a.dtype)


def _alibi(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    scale = p.scale if part.options["scaled"] else 1.0
    if part.options["rounding"] == "bfloat16":
        slopes = torch.tensor([oracles.bfloat16(slope) for slope in oracles.alibi_slopes(p.n_heads)]).bfloat16()
        rounded = slopes[:, None, None] * p.k_pos[:, None, None, :].to(torch.bfloat16)
        return scale * rounded.to(a.dtype)
    if part.options["slopes"] == "fixed":
        return -scale * _slanted(p, a, oracles.alibi_slopes(p.n_heads))
    return -scale * _per_head(part.params["slope"]) * p.r.abs()[:, None].to(a.dtype)


def _kerple(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    power, factor = _per_head(part.params["p"].abs()), _per_head(part.params["a"].abs())
    distance = p.r.abs().to(a.dtype)[:, None]
    if part.options["kind"] == "log":
        return -power * torch.log1p(factor * distance)
    power = torch.where(power > 2, 4 - power, power)
    return -factor * torch.where(distance > 0, torch.where(distance > 0, distance, 1.0) ** power, 0.0)


def _fade(p: Problem, part: Part) -> Tensor:
    """exp(-a_h |r|^p_h), p reflected into [0, 2]."""
    factor, power = _per_head(part.params["a"].abs()), _per_head(part.params["p"].abs())
    power = torch.where(power > 2, 4 - power, power)
    distance = p.r.abs()[:, None].to(factor.dtype)
    grown = torch.where(distance > 0, torch.where(distance > 0, distance, 1.0) ** power, 0.0)
    return torch.exp(-factor * grown)


def _sandwich(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    width, theta = part.options["width"], part.options["theta"]
    speed = theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    waves = a.constant(p.r.double()[..., None] * speed).cos().sum(-1)[:, None]
    return (waves * p.n_heads / (8 * _per_head(torch.arange(1, p.n_heads + 1)))).to(a.dtype)


def _fire(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    params = part.params
    c, threshold = params["c"].abs() + 1e-6, params["threshold"].abs() * part.options["length"]
    furthest = torch.maximum(threshold, p.q_pos.to(a.dtype)).clamp(min=1)[:, :, None]
    x = torch.log(c * p.r.abs().to(a.dtype) + 1) / torch.log(c * furthest + 1)
    hidden = F.linear(x[..., None], params["hidden.weight"], params["hidden.bias"]).relu()
    return F.linear(hidden, params["out.weight"], params["out.bias"]).movedim(-1, 1)


# ------------------------------------------------------------------------------------------------- contextual


def _cope(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    table = part.params["table"]  # [H or 1, positions, D]
    gates = torch.sigmoid(p.scale * (p.q @ k.mT)) * p.visible
    at_or_after = p.k_pos[:, :, None] >= p.k_pos[:, None, :]  # [B or 1, t, j]
    count = (gates @ at_or_after[:, None].to(a.dtype)).clamp(max=table.shape[1] - 1)
    below = count.detach().floor().long()
    above = (below + 1).clamp(max=table.shape[1] - 1)
    z, part_above = p.q @ table.mT, count - below
    return (1 - part_above) * z.gather(-1, below) + part_above * z.gather(-1, above)


def _dape(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """b_h + MLP([s_1 … s_H, b_1 … b_H])_h of every pair, s = scale q.k."""
    params, content = part.params, p.scale * (p.q @ k.mT)
    if part.options["bias"] == "kerple":
        power, factor = _per_head(params["p"].abs()), _per_head(params["a"].abs())
        bias = -power * torch.log1p(factor * p.r.abs()[:, None].to(a.dtype))
    else:
        bias = -_slanted(p, a, oracles.alibi_slopes(p.n_heads))
    bias = bias.expand_as(content)
    z = torch.cat([content, bias], dim=1).movedim(1, -1)
    hidden = F.linear(z, params["hidden.weight"], params["hidden.bias"])
    hidden = torch.where(hidden >= 0, hidden, 0.01 * hidden)
    return bias + F.linear(hidden, params["out.weight"], params["out.bias"]).movedim(-1, 1)


# ------------------------------------------------------------------------------------------------- levels and sides


def _inkling(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """Σ_c (W_h x_i)_c P[c, i - j] for 0 <= i - j < extent."""
    assert p.x_q is not None
    profiles, extent, heads = part.params["profiles"], part.options["extent"], p.n_heads
    mixture = torch.einsum("blm,hcm->bhlc", p.x_q, part.params["project"].view(heads, -1, p.x_q.shape[-1]))
    distance = -p.r
    inside = (distance >= 0) & (distance < extent)
    columns = profiles[:, distance.clamp(0, extent - 1)] * inside  # [width, B or 1, Lq, Lk]
    return (mixture[:, :, :, None] * columns.permute(1, 2, 3, 0)[:, None]).sum(-1)


def _fox(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """c_i - c_j, or c_j - c_i for later keys with `two_sided`; c are sums of log-gates, in float64."""
    assert p.x_k is not None
    gates = F.logsigmoid(
        torch.einsum("blm,hm->bhl", p.x_k, part.params["gate"]) + part.params["bias"][:, None]
    ).double()
    if p.hidden is not None:
        gates = gates * ~p.hidden[:, None]
    of_queries, of_keys = (
        _rounded_apart(a, gates[:, :, None] @ x.double().mT[:, None]) for x in _counted(p.q_pos, p.k_pos)
    )
    difference = of_queries.mT - of_keys
    if part.options["two_sided"]:
        difference = torch.where(p.r[:, None] > 0, -difference, difference)
    return difference.to(a.dtype)


def _rounded_apart(a: Arithmetic, x: Tensor) -> Tensor:
    """x, whose gradient rounds by itself: kernels sum those of c_i and c_j separately, where autograd cancels them."""
    if a.jitter is not None and x.requires_grad:
        x = x * 1.0
        x.register_hook(lambda g: g * (1 + torch.finfo(a.dtype).eps * a.noise(g)))
    return x


def _counted(q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
    """[B or 1, Lq, Lk] and [B or 1, Lk, Lk], bool: whether key l is at or before a query, and at or before a key.

    By position, or by index in a row whose positions repeat: there the queries are the last of the keys.
    """
    lq, lk = q_pos.shape[1], k_pos.shape[1]
    repeats, index = _repeats(k_pos)[:, None, None], torch.arange(lk)
    by_index = index <= index[:, None]
    of_queries = k_pos[:, None, :] <= q_pos[:, :, None]
    if lq <= lk:
        of_queries = torch.where(repeats, by_index[lk - lq :], of_queries)
    return of_queries, torch.where(repeats, by_index, k_pos[:, None, :] <= k_pos[:, :, None])


def _repeats(pos: Tensor) -> Tensor:
    """[B or 1]: whether a position occurs twice in a row."""
    return (pos.sort(dim=-1)[0].diff(dim=-1) == 0).any(-1)


def fox_order(q_pos: Tensor, k_pos: Tensor) -> str | None:
    """Why the tokens of a call have no order, in the words of a refusal; None if they have one."""
    lq, lk = q_pos.shape[1], k_pos.shape[1]
    queries = q_pos.expand(max(len(q_pos), len(k_pos)), -1)
    for row, at in zip(k_pos.expand(len(queries), -1), queries, strict=True):
        if not bool(_repeats(row[None])):
            continue
        if bool(((row.diff() < 0) & (row[1:] != row.min())).any()):
            return "in the order of their positions, which is not defined"
        if lq > lk or not torch.equal(at, row[lk - lq :]):
            return "each query must be one of the last keys"
    return None


def _grape(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """r omega_h (softplus(v_h.q_i / sqrt D) + softplus(u_h.k_j / sqrt D)), or -|r| in place of r."""
    root = p.q.shape[3] ** 0.5
    query, key = (
        F.softplus((x * part.params[name][:, None]).sum(-1) / root)
        for x, name in ((p.q, "query_gate"), (k, "key_gate"))
    )
    r = (-p.r.abs() if part.options["two_sided"] else p.r)[:, None].to(a.dtype)
    return r * _per_head(part.params["log_speed"].exp()) * (query[..., None] + key[:, :, None])


def _local(p: Problem, a: Arithmetic, part: Part, k: Tensor) -> Tensor:
    """-10000 beyond the window, but for pairs with the token at position 0."""
    far = p.r.abs() > part.options["window"]
    if part.options["first"]:
        far = far & (p.q_pos != 0)[:, :, None] & (p.k_pos != 0)[:, None, :]
    return -10000.0 * far[:, None].to(a.dtype)


def _logn_tau(p: Problem, a: Arithmetic, part: Part) -> Tensor:
    keys = (p.q_pos.double() + 1).clamp(min=1)
    tau = a.constant((keys.log() / math.log(part.options["n0"])).clamp(min=1)).to(a.dtype)[:, None, :, None]
    return 1 + _per_head(part.params["strength"]) * (tau - 1) if part.options["learned"] else tau


def _inkling_tau(p: Problem, a: Arithmetic, part: Part) -> Tensor:
    alpha, n0 = part.options["alpha"], part.options["n0"]
    if not alpha:
        return torch.ones((), dtype=a.dtype)
    growth = ((p.q_pos.double() + 1) / n0).clamp(min=1).log()
    return a.constant(1 + alpha * growth).to(a.dtype)[:, None, :, None]


# ------------------------------------------------------------------------------------------------- rotations


def _turned(x: Tensor, angle: Tensor, layout: str, factor: Tensor) -> Tensor:
    """The leading coordinates of x [B, H, L, D], rotated by angle [B or 1, L, pairs] and multiplied by factor."""
    pairs = angle.shape[-1]
    cos, sin = ((f(angle) * factor)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    t = torch.arange(pairs)
    first, second = (t, t + pairs) if layout == "half" else (2 * t, 2 * t + 1)
    x1, x2 = x[..., first], x[..., second]
    turned = torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos, x[..., 2 * pairs :]], dim=-1)
    back = torch.cat([first, second, torch.arange(2 * pairs, x.shape[-1])]).argsort()
    return turned[..., back]


def _rope(p: Problem, a: Arithmetic, part: Part, x: Tensor, pos: Tensor, sign: int) -> Tensor:
    o, begin = part.options, part.options["first"]
    dims = int(x.shape[3] * o["partial"])
    largest = torch.maximum(p.q_pos.amax(-1), p.k_pos.amax(-1)).tolist()
    speed = torch.tensor([oracles.rope_frequencies(dims, o, n, part.params) for n in largest], dtype=torch.float64)
    angle = a.constant(pos.double()[..., None] * speed[:, None, :])
    factor = torch.tensor(oracles.rope_magnitude(o), dtype=torch.float64)
    return torch.cat([x[..., :begin], _turned(x[..., begin:], angle, o["layout"], factor)], dim=-1)


def _xpos(p: Problem, a: Arithmetic, part: Part, x: Tensor, pos: Tensor, sign: int) -> Tensor:
    o, d = part.options, x.shape[3]
    speed = torch.tensor(oracles.frequencies(o["theta"], d), dtype=torch.float64)
    zeta = torch.tensor([(2 * t / d + o["gamma"]) / (1 + o["gamma"]) for t in range(d // 2)], dtype=torch.float64)
    lowest = torch.minimum(p.q_pos.amin(-1), p.k_pos.amin(-1))
    highest = torch.maximum(p.q_pos.amax(-1), p.k_pos.amax(-1))
    exponent = (pos - (lowest + highest)[:, None].double() / 2)[..., None] * (sign / o["base"])
    fading = torch.exp(a.constant(exponent * zeta.log()))
    wide = x.double() if _overflows(p, o, a.dtype) else x
    return _turned(wide, a.constant(pos.double()[..., None] * speed), o["layout"], fading)


def _pope(p: Problem, a: Arithmetic, part: Part, x: Tensor, pos: Tensor, sign: int) -> Tensor:
    """softplus(x_c) at the angle pos theta^(-c/D), minus the phase for queries (sign 1): real and imaginary parts."""
    d = x.shape[3]
    speed = part.options["theta"] ** -(torch.arange(d, dtype=torch.float64) / d)
    angle = a.constant(pos.double()[..., None] * speed)[:, None]
    if sign == 1:
        angle = angle - part.params["phase"].double()[:, None]
    size = F.softplus(x)
    return torch.cat([size * angle.cos().to(x.dtype), size * angle.sin().to(x.dtype)], dim=-1)


def _fope(p: Problem, a: Arithmetic, part: Part, x: Tensor, pos: Tensor, sign: int) -> Tensor:
    """Pairs (t, t + D/2) with mixtures of cosines and sines; those that are not mixed have (1, 0) or (1, 1)."""
    o, half = part.options, x.shape[3] // 2
    cosines, sines = o["coefficients"].double() * 2.0**-26
    speed = torch.tensor(oracles.frequencies(o["theta"], 2 * half), dtype=torch.float64)[: cosines.shape[-1]]
    angle = a.constant(pos.double()[..., None] * speed)[:, None]  # [B or 1, 1, L, mixed]
    cos, sin = angle.cos() @ cosines, angle.sin() @ sines
    left = half - cos.shape[-1]
    cos = F.pad(cos, (0, left), value=1.0).to(x.dtype)
    sin = F.pad(sin, (0, left), value=1.0 if o["rest"] == "turned" else 0.0).to(x.dtype)
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def _overflows(p: Problem, o: Options, dtype: torch.dtype) -> bool:
    """Whether the powers of zeta need a wider dtype."""
    return xpos_growth(o, p.q_pos, p.k_pos) > math.log(torch.finfo(dtype).max) / 2


def xpos_growth(o: Options, q_pos: Tensor, k_pos: Tensor, mapped: tuple[str, Options] | None = None) -> float:
    """The logarithm of the largest factor zeta^(r/base) of any pair of a row."""
    if q_pos.numel() == 0:
        return 0.0
    if mapped is not None:
        q_pos, k_pos = (maps.positions(*mapped, pos) for pos in (q_pos, k_pos))
    span = torch.maximum(q_pos.amax(-1), k_pos.amax(-1)) - torch.minimum(q_pos.amin(-1), k_pos.amin(-1))
    return -math.log(o["gamma"] / (1 + o["gamma"])) * float(span.max()) / float(o["base"])


Added = Callable[[Problem, Arithmetic, Part, Tensor], Tensor]
ADDED: dict[str, Added] = {
    "shaw": _shaw,
    "xl": _xl,
    "huang4": _huang4,
    "tisa": _tisa,
    "tisa2": _tisa2,
    "t5": _t5,
    "toeplitz": _toeplitz,
    "alibi": _alibi,
    "kerple": _kerple,
    "sandwich": _sandwich,
    "fire": _fire,
    "cope": _cope,
    "deberta": _deberta,
    "dape": _dape,
    "inkling": _inkling,
    "fox": _fox,
    "grape": _grape,
    "local": _local,
}
"""What a scheme adds to the logit, [B or 1, H or 1, Lq, Lk]; the Tensor argument is k with all heads."""
PAIRS = ("fire", "cope", "dape")
"""Those that go by both positions, and not by the offset."""
TEMPERATURES: dict[str, Callable[[Problem, Arithmetic, Part], Tensor]] = {"logn": _logn_tau, "inkling": _inkling_tau}
"""What multiplies the whole logit of a query, at its true position."""

ROTATIONS: dict[str, Callable[[Problem, Arithmetic, Part, Tensor, Tensor, int], Tensor]] = {
    "rope": _rope,
    "xpos": _xpos,
    "pope": _pope,
    "fope": _fope,
}

GAINS: dict[str, Callable[[Problem, Part], Tensor]] = {
    "huang1": lambda p, part: _rows(part.params["table"], p.r.abs().clamp(max=part.options["clip"])),
    "huang2": lambda p, part: _rows(part.params["table"], _clipped(p.r, part.options["clip"])),
    "huang3": lambda p, part: _rows(part.params["table"], _clipped(p.r, part.options["clip"])),
    "fade": _fade,
}
