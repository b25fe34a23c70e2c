"""The laws, one function each: it raises an AssertionError if the law is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from locant.attention import BACKENDS, attend, eager
from locant.attention.request import Request, prepare
from locant.schemes import Scheme
from locant.testing.checks import FAR, TIGHT, NotApplicable, distance, require
from locant.testing.reading import reading
from locant.testing.subject import Subject, effects, rebuild

STEPS = (97, 9_973)  # between the positions of neighbours, for shifts of sparse positions


def _tables(subject: Subject) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        scheme = copy.deepcopy(subject.scheme).to(dtype)
        q = subject.q.to(dtype)
        how = subject.how(dtype=dtype)
        request = prepare(q, subject.k.to(dtype), subject.v.to(dtype), scheme, **how)  # checks shapes, heads and dtypes
        _check_rotated(scheme, request)
        pos = torch.arange(subject.length)
        embedded = scheme.embed(pos)
        if embedded is not None:
            require(embedded.shape[:1] == pos.shape and embedded.ndim == 2, "embed must give [*pos.shape, d_model]")
            require(embedded.dtype == dtype, f"embed gives {embedded.dtype} in a {dtype} model")
            rows = scheme.embed(torch.stack([pos, pos]))
            require(rows is not None and rows.shape[:2] == (2, len(pos)), "embed must take positions per batch row")


def _check_rotated(scheme: Scheme, request: Request) -> None:
    rotated = scheme.rotate(request.q, request.k, request.q_pos, request.k_pos)
    for given, got in zip((request.q, request.k), rotated, strict=True):
        require(got.shape[:3] == given.shape[:3], f"rotate changes the shape from {given.shape} to {got.shape}")
    before, after = request.q.shape[3], {x.shape[3] for x in rotated}
    require(len(after) == 1, f"rotate returns queries and keys of different sizes, {sorted(after)}")
    wider = after.pop()
    if scheme.widens:
        require(wider > before, f"declared to widen, but rotate returns {wider} numbers for {before}")
    else:
        require(wider == before, f"rotate returns {wider} numbers for {before}; a scheme that does declares widens")


def _locality(subject: Subject) -> None:
    n = 300 if subject.scheme.max_length is None else subject.scheme.max_length - 1
    r = torch.arange(-n, n + 1)
    kept, random = r.clone(), torch.get_rng_state()
    whole = subject.scheme.terms(r)
    again = subject.scheme.terms(r)
    require(torch.equal(r, kept), "terms changes the offsets it is given")
    require(torch.equal(random, torch.get_rng_state()), "terms draws random numbers")
    for name, table in again.tables().items():
        require(torch.equal(table, whole.tables()[name]), f"{name} differs in a second call")
    for part in (slice(0, 1), slice(n, n + 1), slice(n - 10, n + 12), slice(2 * n, 2 * n + 1), slice(0, 2 * n + 1, 7)):
        for name, table in subject.scheme.terms(r[part]).tables().items():
            error = distance(table, whole.tables()[name][:, part])
            require(error < TIGHT, f"{name} for r = {r[part].tolist()[:3]}… differs by {error:.1e} from the full range")
    pos = torch.arange(subject.length)
    embedded = subject.scheme.embed(pos)
    for pick in (pos[:1], pos[-1:], pos.flip(0)[::2]):
        own = subject.scheme.embed(pick)
        if embedded is not None and own is not None:
            require(distance(own, embedded[pick]) < TIGHT, f"the embedding of {pick.tolist()} depends on the others")
    if embedded is None and not whole.tables():
        raise NotApplicable("neither tables over the offset nor an embedding")


def _rows(subject: Subject) -> None:
    n = subject.length
    pos = torch.stack([torch.randperm(n), torch.arange(n).flip(0)])
    mask = torch.rand(2, 1, n, n) < 0.8
    how = subject.how()
    together = attend(
        subject.q, subject.k, subject.v, subject.scheme, q_pos=pos, k_pos=pos, mask=mask, impl="eager", **how
    )
    embedded = subject.scheme.embed(pos)
    for row in range(2):
        one = slice(row, row + 1)
        q, k, v = subject.q[one], subject.k[one], subject.v[one]
        where: dict[str, Any] = {"q_pos": pos[one], "k_pos": pos[one], "mask": mask[one]}
        alone = attend(q, k, v, subject.scheme, impl="eager", **where, **subject.how(rows=one))
        error = distance(together[one], alone)
        require(error < TIGHT, f"sequence {row} of a batch differs by {error:.1e} from the same sequence alone")
        alone_embedded = subject.scheme.embed(pos[row])
        if embedded is not None and alone_embedded is not None:
            require(distance(embedded[row], alone_embedded) < TIGHT, f"the embedding of row {row} depends on the batch")


def _shift(subject: Subject) -> None:
    pos = torch.arange(subject.length)
    limit = subject.scheme.max_length
    before, embedded = subject.logits(pos, pos), subject.scheme.embed(pos)
    change, tried = 0.0, 0
    # A scheme that depends on the position may do so only far out: try large shifts.
    for by in (1, 100, FAR) if subject.scheme.shift_invariant else (1, 100, FAR, 100 * FAR):
        if limit is not None and by + subject.length > limit:
            continue
        tried += 1
        moved = subject.scheme.embed(pos + by)
        if embedded is not None and moved is not None:
            change = max(change, distance(embedded, moved))
        change = max(change, distance(before, subject.logits(pos, pos + by)))
    # A map may change nothing but positions that are far apart.
    for step in () if limit is not None else STEPS:
        apart = subject.logits(pos, step * pos)
        change = max([change, *(distance(apart, subject.logits(pos, step * pos + by)) for by in (1, step // 2))])
    if not tried:
        raise NotApplicable(f"there is no room for a shift within {limit} positions")
    if subject.scheme.shift_invariant:
        # Angles of p = 100,000 carry rounding of 1e-11 even in float64.
        require(change < 1e-6, f"declared shift-invariant, but a shift changes logits or embeddings by {change:.1e}")
    else:
        require(change > 1e-6, "declared not shift-invariant, but no shift changes anything")


def _decode(subject: Subject) -> None:
    if not subject.scheme.incremental:
        raise NotApplicable("not incremental: later keys change the output of earlier queries")
    n = subject.length
    how = {**subject.how(), "causal": True}
    full = attend(subject.q, subject.k, subject.v, subject.scheme, impl="eager", **how)
    for i in (0, n // 2, n - 1):
        past = slice(0, i + 1)
        q, k, v = subject.q[:, :, i : i + 1], subject.k[:, :, past], subject.v[:, :, past]
        one = attend(q, k, v, subject.scheme, impl="eager", **subject.how(past))
        error = distance(one, full[:, :, i : i + 1])
        require(error < TIGHT, f"query {i} alone differs by {error:.1e} from the full pass")


def _irregular(subject: Subject) -> None:
    if not subject.scheme.pairwise:
        raise NotApplicable("not pairwise: the logit of a pair depends on other keys")
    pos = torch.arange(subject.length)
    full = subject.logits(pos, pos)
    for pick in (pos[torch.randperm(len(pos))], pos[::3], pos.flip(0)[:3]):
        error = distance(subject.logits(pick, pick), full[:, :, pick][..., pick])
        require(error < TIGHT, f"positions {pick.tolist()} differ by {error:.1e} from the full matrix")
    if subject.scheme.max_length is None:
        # With a gap so wide that the offsets are not consecutive, compare with one key at a time.
        apart = torch.tensor([0, 3, 5_000, 5_001])
        picked = torch.arange(4).clamp(max=subject.length - 1)
        together = subject.logits(picked, apart)
        for j in range(4):
            one = subject.logits(picked, apart, keys=slice(j, j + 1))
            error = distance(one, together[..., j : j + 1])
            require(error < TIGHT, f"key {apart[j]} alone differs by {error:.1e} from positions {apart.tolist()}")


def _gradient(subject: Subject) -> None:
    n = min(5, subject.length)
    q, k, v = (x[:1, :, :n].clone().requires_grad_() for x in (subject.q, subject.k, subject.v))
    states = () if subject.x is None else (subject.x[:1, :n].clone().requires_grad_(),)
    names = [name for name, _ in subject.scheme.named_parameters()]
    # Other values than those of the module: a scheme that reads the module after `terms` then fails.
    values = [(x + 0.05 * torch.randn_like(x)).detach().requires_grad_() for x in subject.scheme.parameters()]
    pos = torch.arange(n)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scheme = subject.scheme

        def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None) -> tuple[Tensor, ...]:
            embedded = self.scheme.embed(pos)
            out = attend(q, k, v, self.scheme, causal=True, impl="eager", x=x)
            return (out,) if embedded is None or not embedded.requires_grad else (out, embedded)

    whole = Whole()

    inputs = (q, k, v, *states)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        parameters = given[len(inputs) :]
        named = {f"scheme.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        result: tuple[Tensor, ...] = torch.func.functional_call(whole, named, given[: len(inputs)])
        return result

    pairs = subject.scheme.terms(pos).pair is not None
    for chunk in (eager.CHUNK, 1) if pairs else (eager.CHUNK,):  # in slices, the backward pass calls `pair` again
        with _slices_of(chunk):
            require(torch.autograd.gradcheck(run, (*inputs, *values), fast_mode=True), "gradcheck failed")


def _precision(subject: Subject) -> None:
    if not any(parameter.numel() for parameter in subject.scheme.parameters()):
        raise NotApplicable("no parameters")
    narrow = copy.deepcopy(subject.scheme).bfloat16()
    sums = [_gradient_sums(subject, scheme) for scheme in (narrow, copy.deepcopy(narrow).float())]
    for name, got in sums[0].items():
        truth = sums[1][name]
        # A sum in float32 is rounded once, to the parameter's bfloat16; the rest is for sums near 0.
        allowed = torch.finfo(torch.bfloat16).eps * (truth.abs() + truth.abs().max() / 8)
        worst = ((got - truth).abs() - allowed).argmax()
        values = f"{got.flatten()[worst]:.4g} in bfloat16 and {truth.flatten()[worst]:.4g} in float32"
        require(
            bool(((got - truth).abs() <= allowed).all()),
            f"the gradient of {name} is {values}; widen the parameter (locant.schemes.base.wide) before indexing it",
        )


def _gradient_sums(subject: Subject, scheme: Scheme) -> dict[str, Tensor]:
    """Gradients of all parameters in float64, from a sequence so long that hundreds of offsets share a parameter."""
    n, limit = 128, scheme.max_length
    generator = torch.Generator().manual_seed(0)
    shape = (1, subject.q.shape[1], n, subject.q.shape[3])
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    pos = torch.arange(n) if limit is None else torch.arange(n) % limit
    x = None
    if scheme.reads:
        x = torch.randn(1, n, subject.d_model, generator=generator)
    total = (attend(q, k, v, scheme, q_pos=pos, k_pos=pos, impl="eager", x=x, causal=scheme.causal_only) * grad).sum()
    embedded = scheme.embed(torch.arange(8 * n) % 3)
    if embedded is not None:
        total = total + embedded.sum()
    scheme.zero_grad()
    total.backward()
    return {name: x.grad.double() for name, x in scheme.named_parameters() if x.grad is not None}


def _back_ends(subject: Subject) -> None:
    pos = torch.arange(subject.length) + 3
    mask = torch.rand(subject.q.shape[0], 1, subject.length, subject.length) < 0.7
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "masked": {"causal": True, "mask": mask, "q_pos": pos, "k_pos": pos},
        "one key head": {"causal": True},
    }
    if subject.scheme.causal_only:
        del cases["plain"]
    if subject.scheme.own_keys:
        del cases["one key head"]
    narrow = copy.deepcopy(subject.scheme).float()
    supported = False
    for name in ("fused", "sdpa"):  # not flex, which takes long to compile
        for scheme, dtype in ((subject.scheme, torch.float64), (narrow, torch.float32)):
            q, k, v = (x.to(dtype) for x in (subject.q, subject.k, subject.v))
            states = subject.how(dtype=dtype)
            if BACKENDS[name].unsupported(prepare(q, k, v, scheme, **states)) is not None:
                continue
            supported = True
            for case, how in cases.items():
                few = slice(1 if case == "one key head" else None)
                wide = [subject.q, subject.k[:, few], subject.v[:, few]]
                given = [x.to(dtype) for x in wide]
                truth = attend(wide[0], wide[1], wide[2], subject.scheme, impl="eager", x=subject.x, **how)
                how = {**how, "x": states["x"]}
                # in float32 the reference is wrong too: allow a few times its error
                own = attend(given[0], given[1], given[2], scheme, impl="eager", **how)
                rounding = 40 * torch.finfo(dtype).eps * float(truth.detach().abs().max())
                allowed = TIGHT + 4 * distance(own.double(), truth) + rounding
                error = distance(attend(given[0], given[1], given[2], scheme, impl=name, **how).double(), truth)
                require(error <= allowed, f"{name}, {case}, {dtype}: differs from eager by {error:.1e}")
            break
    if not supported:
        raise NotApplicable("only eager supports it")


def _reach(subject: Subject) -> None:
    reach = subject.scheme.reach
    if reach is None:
        raise NotApplicable("no reach: its terms change at every distance")
    r = torch.cat([torch.arange(reach, reach + 50), torch.tensor([reach * 3 + 100, FAR + reach])])
    for side in (r, -r):
        for name, table in subject.scheme.terms(side).tables().items():
            error = distance(table, table[:, :1].expand_as(table))
            require(error == 0, f"{name} changes by {error:.1e} beyond reach={reach}")


def _far_away(subject: Subject) -> None:
    scheme = copy.deepcopy(subject.scheme).float()
    for name, table in scheme.terms(torch.tensor([-FAR, FAR])).tables().items():
        require(table.isfinite().all(), f"{name} is not finite at |r| = {FAR:,}")
    q, k, v = (x[:, :, :2].float() for x in (subject.q, subject.k, subject.v))
    there = torch.tensor([0, FAR])[: q.shape[2]]
    x = None if subject.x is None else subject.x[:, :2].float()
    for causal in (True,) if scheme.causal_only else (True, False):
        out = attend(q, k, v, scheme, q_pos=there, k_pos=there, causal=causal, impl="eager", x=x)
        require(out.isfinite().all(), f"attention over |r| = {FAR:,} is not finite (causal={causal})")
    if scheme.max_length is None:
        embedded = scheme.embed(there)
        require(embedded is None or embedded.isfinite().all(), f"the embedding of position {FAR:,} is not finite")


def _parameters(subject: Subject) -> None:
    count, formula = sum(p.numel() for p in subject.scheme.parameters()), subject.scheme.parameter_count()
    require(count == formula, f"it has {count} parameters, but parameter_count() is {formula}")
    pos = torch.arange(subject.length)
    before, embedded = effects(subject, pos)
    for name, parameter in subject.scheme.named_parameters():
        if parameter.numel() == 0:
            continue
        value = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        after, moved = effects(subject, pos)
        with torch.no_grad():
            parameter.copy_(value)
        same = distance(after, before) == 0 and (moved is None or embedded is None or distance(moved, embedded) == 0)
        require(not same, f"{name} changes neither logits nor outputs nor embeddings")


def _spec(subject: Subject) -> None:
    again = rebuild(subject.original)
    require(str(again) == str(subject.original), f"{subject.original} builds {again}")
    shapes = [{name: x.shape for name, x in s.state_dict().items()} for s in (subject.original, again)]
    require(shapes[0] == shapes[1], f"the rebuilt scheme has other parameters: {shapes}")


def _state(subject: Subject) -> None:
    pos = torch.arange(subject.length)
    again = rebuild(subject.original).double()
    again.load_state_dict(subject.scheme.state_dict())
    require(
        torch.equal(subject.logits(pos, pos, again), subject.logits(pos, pos)), "logits differ after load_state_dict"
    )
    first, second = again.embed(pos), subject.scheme.embed(pos)
    require((first is None) == (second is None), "one of the two has an embedding")
    if first is not None and second is not None:
        require(torch.equal(first, second), "embeddings differ after load_state_dict")


@contextmanager
def _slices_of(chunk: int) -> Iterator[None]:
    before, eager.CHUNK = eager.CHUNK, chunk
    try:
        yield
    finally:
        eager.CHUNK = before


LAWS: dict[str, Callable[[Subject], None]] = {
    "tables": _tables,
    "locality": _locality,
    "rows": _rows,
    "shift": _shift,
    "decode": _decode,
    "irregular": _irregular,
    "gradient": _gradient,
    "precision": _precision,
    "reading": reading,
    "reach": _reach,
    "back ends": _back_ends,
    "far away": _far_away,
    "parameters": _parameters,
    "spec": _spec,
    "state": _state,
}
