"""Laws that every position scheme obeys, for schemes of your own as well.

    locant.testing.check_scheme(MyScheme(n_heads=4))

raises an AssertionError that names the laws that fail. What they are:

    tables       the terms have a column per offset, fit the heads and are float32 or wider even for a bfloat16 model
    locality     a column depends on its own offset alone: terms(r)[part] = terms(r[part]), and an embedding on its
                 own position; asking twice gives the same, and changes nothing
    rows         a batch of sequences, each with positions of its own, equals the sequences one by one
    shift        moving every position by the same amount changes nothing, exactly where `shift_invariant` says so
    decode       one query at a time, as with a cache, equals the full pass, where `incremental` says so
    irregular    positions with gaps and in any order give the same logits as picking them out of the full matrix,
                 where `pairwise` says so
    gradient     autograd agrees with finite differences in float64, for q, k, v and every parameter
    reach        beyond `reach`, if it has one, the terms no longer change
    back ends    every back end that takes the scheme agrees with `eager`, also with fewer key/value heads
    far away     values at |r| = 100,000 are finite
    parameters   their number is `parameter_count()`, and each of them changes something
    spec         str(scheme) builds the same scheme again
    state        state_dict into a fresh scheme gives the same logits

The laws run on a copy whose parameters are moved away from where they start: a scheme that starts at zero effect
would pass most of them by doing nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.attention import BACKENDS, attend, eager
from locant.attention.request import prepare
from locant.schemes import SCHEMES, Scheme
from locant.schemes.base import DIMS
from locant.spec import scheme as from_spec

TIGHT = 1e-9  # float64 against float64, where only the order of operations differs
FAR = 100_000


@dataclass(frozen=True)
class Outcome:
    """What became of one law: passed True, False or None (does not apply), and why."""

    law: str
    passed: bool | None
    detail: str = ""


class NotApplicable(Exception):
    """Raised by a law that says nothing about this scheme."""


def check_scheme(scheme: Scheme, *, seed: int = 0) -> list[Outcome]:
    """Runs every law on a scheme; raises AssertionError with all failures, returns the outcomes if there are none."""
    outcomes = list(run_laws(scheme, seed=seed))
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    if failed:
        lines = "\n".join(f"  {outcome.law}: {outcome.detail}" for outcome in failed)
        raise AssertionError(f"{scheme} breaks {len(failed)} of {len(outcomes)} laws:\n{lines}")
    return outcomes


def run_laws(scheme: Scheme, *, seed: int = 0) -> Iterator[Outcome]:
    """Every law, one outcome at a time."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"check_scheme takes a Scheme, got {type(scheme).__name__}")
    for law, run in LAWS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                run(Bench(scheme))
                yield Outcome(law, True)
            except NotApplicable as reason:
                yield Outcome(law, None, str(reason))
            except Exception as problem:  # a scheme that crashes breaks the law it crashes in; the others still run
                kind = "" if isinstance(problem, AssertionError) else f"{type(problem).__name__}: "
                yield Outcome(law, False, f"{kind}{problem}")


class Bench:
    """A scheme under test, moved away from its starting point, with random q, k and v that fit it."""

    def __init__(self, scheme: Scheme, batch: int = 2, length: int = 11) -> None:
        self.original = scheme
        self.scheme = copy.deepcopy(scheme).double()
        with torch.no_grad():
            for parameter in self.scheme.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        n_heads, head_dim = getattr(scheme, "n_heads", 4), getattr(scheme, "head_dim", 8)
        self.length = length if scheme.max_length is None else min(length, scheme.max_length)
        shape = (batch, n_heads, self.length, head_dim)
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))

    def logits(self, pick: Tensor, pos: Tensor, scheme: Scheme | None = None) -> Tensor:
        """Logits among the tokens `pick`, standing at `pos`."""
        scheme = scheme or self.scheme
        q, k, v = (x[:, :, pick] for x in (self.q, self.k, self.v))
        return eager.logits(prepare(q, k, v, scheme, q_pos=pos, k_pos=pos))


def _tables(bench: Bench) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        scheme = copy.deepcopy(bench.scheme).to(dtype)
        q = bench.q.to(dtype)
        request = prepare(q, bench.k.to(dtype), bench.v.to(dtype), scheme)  # checks shapes, heads and dtypes
        turned_q, turned_k = scheme.rotate(request.q, request.k, request.q_pos, request.k_pos)
        _require((turned_q.shape, turned_k.shape) == (request.q.shape, request.k.shape), "rotate changes the shape")
        pos = torch.arange(bench.length)
        embedded = scheme.embed(pos)
        if embedded is not None:
            _require(embedded.shape[:1] == pos.shape and embedded.ndim == 2, "embed must give [*pos.shape, d_model]")
            _require(embedded.dtype == dtype, f"embed gives {embedded.dtype} in a {dtype} model")
            rows = scheme.embed(torch.stack([pos, pos]))
            _require(rows is not None and rows.shape[:2] == (2, len(pos)), "embed must take positions per batch row")


def _locality(bench: Bench) -> None:
    n = 300 if bench.scheme.max_length is None else bench.scheme.max_length - 1
    r = torch.arange(-n, n + 1)
    kept, random = r.clone(), torch.get_rng_state()
    whole = bench.scheme.terms(r)
    again = bench.scheme.terms(r)
    _require(torch.equal(r, kept), "terms changes the offsets it is given")
    _require(torch.equal(random, torch.get_rng_state()), "terms draws random numbers")
    for name, table in again.tables().items():
        _require(torch.equal(table, whole.tables()[name]), f"{name} differs when asked for a second time")
    for part in (slice(0, 1), slice(n, n + 1), slice(n - 10, n + 12), slice(2 * n, 2 * n + 1), slice(0, 2 * n + 1, 7)):
        for name, table in bench.scheme.terms(r[part]).tables().items():
            error = _distance(table, whole.tables()[name][:, part])
            _require(
                error < TIGHT, f"{name} for r = {r[part].tolist()[:3]}… differs by {error:.1e} from the full range"
            )
    pos = torch.arange(bench.length)
    embedded = bench.scheme.embed(pos)
    for pick in (pos[:1], pos[-1:], pos.flip(0)[::2]):
        own = bench.scheme.embed(pick)
        if embedded is not None and own is not None:
            _require(_distance(own, embedded[pick]) < TIGHT, f"the embedding of {pick.tolist()} depends on the others")
    if embedded is None and not whole.tables():
        raise NotApplicable("neither tables over the offset nor an embedding")


def _rows(bench: Bench) -> None:
    n = bench.length
    pos = torch.stack([torch.randperm(n), torch.arange(n).flip(0)])
    mask = torch.rand(2, 1, n, n) < 0.8
    together = attend(bench.q, bench.k, bench.v, bench.scheme, q_pos=pos, k_pos=pos, mask=mask, impl="eager")
    embedded = bench.scheme.embed(pos)
    for row in range(2):
        one = slice(row, row + 1)
        q, k, v = bench.q[one], bench.k[one], bench.v[one]
        alone = attend(q, k, v, bench.scheme, q_pos=pos[one], k_pos=pos[one], mask=mask[one], impl="eager")
        error = _distance(together[one], alone)
        _require(error < TIGHT, f"sequence {row} of a batch differs by {error:.1e} from the same sequence alone")
        alone_embedded = bench.scheme.embed(pos[row])
        if embedded is not None and alone_embedded is not None:
            _require(
                _distance(embedded[row], alone_embedded) < TIGHT, f"the embedding of row {row} depends on the batch"
            )


def _shift(bench: Bench) -> None:
    pos = torch.arange(bench.length)
    limit = bench.scheme.max_length
    before, embedded = bench.logits(pos, pos), bench.scheme.embed(pos)
    change, tried = 0.0, 0
    # Where a shift must show, go far: a threshold may lie anywhere.
    for by in (1, 100, FAR) if bench.scheme.shift_invariant else (1, 100, FAR, 100 * FAR):
        if limit is not None and by + bench.length > limit:
            continue
        tried += 1
        moved = bench.scheme.embed(pos + by)
        if embedded is not None and moved is not None:
            change = max(change, _distance(embedded, moved))
        change = max(change, _distance(before, bench.logits(pos, pos + by)))
    if not tried:
        raise NotApplicable(f"there is no room for a shift within {limit} positions")
    if bench.scheme.shift_invariant:
        # Angles of p = 100,000 carry rounding of 1e-11 even in float64.
        _require(change < 1e-6, f"declared shift-invariant, but a shift changes logits or embeddings by {change:.1e}")
    else:
        _require(change > 1e-6, "declared not shift-invariant, but no shift changes anything")


def _decode(bench: Bench) -> None:
    if not bench.scheme.incremental:
        raise NotApplicable("the scheme says that later keys change what earlier queries see")
    n = bench.length
    full = attend(bench.q, bench.k, bench.v, bench.scheme, causal=True, impl="eager")
    for i in (0, n // 2, n - 1):
        past = slice(0, i + 1)
        one = attend(bench.q[:, :, i : i + 1], bench.k[:, :, past], bench.v[:, :, past], bench.scheme, impl="eager")
        error = _distance(one, full[:, :, i : i + 1])
        _require(error < TIGHT, f"query {i} alone differs by {error:.1e} from the full pass")


def _irregular(bench: Bench) -> None:
    if not bench.scheme.pairwise:
        raise NotApplicable("the scheme says that the logit of a pair depends on other keys")
    pos = torch.arange(bench.length)
    full = bench.logits(pos, pos)
    for pick in (pos[torch.randperm(len(pos))], pos[::3], pos.flip(0)[:3]):
        error = _distance(bench.logits(pick, pick), full[:, :, pick][..., pick])
        _require(error < TIGHT, f"positions {pick.tolist()} differ by {error:.1e} from the full matrix")
    if bench.scheme.max_length is None:
        # A gap so wide that the offsets are no longer consecutive, against the same pairs one key at a time.
        apart = torch.tensor([0, 3, 5_000, 5_001])
        picked = torch.arange(4).clamp(max=bench.length - 1)
        together = bench.logits(picked, apart)
        q, k, v = (x[:, :, picked] for x in (bench.q, bench.k, bench.v))
        for j in range(4):
            one = eager.logits(
                prepare(q, k[:, :, j : j + 1], v[:, :, j : j + 1], bench.scheme, q_pos=apart, k_pos=apart[j : j + 1])
            )
            error = _distance(one, together[..., j : j + 1])
            _require(error < TIGHT, f"key {apart[j]} alone differs by {error:.1e} from positions {apart.tolist()}")


def _gradient(bench: Bench) -> None:
    n = min(5, bench.length)
    q, k, v = (x[:1, :, :n].clone().requires_grad_() for x in (bench.q, bench.k, bench.v))
    names = [name for name, _ in bench.scheme.named_parameters()]
    # Other values than the module holds: a scheme that looks at the module itself later on is found out.
    values = [(x + 0.05 * torch.randn_like(x)).detach().requires_grad_() for x in bench.scheme.parameters()]
    pos = torch.arange(n)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scheme = bench.scheme

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            embedded = self.scheme.embed(pos)
            out = attend(q, k, v, self.scheme, causal=True, impl="eager")
            return (out,) if embedded is None or not embedded.requires_grad else (out, embedded)

    whole = Whole()

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        named = {f"scheme.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        result: tuple[Tensor, ...] = torch.func.functional_call(whole, named, (q, k, v))
        return result

    pairs = bench.scheme.terms(pos).pair is not None
    for chunk in (eager.CHUNK, 1) if pairs else (eager.CHUNK,):  # in slices, `pair` runs again in the backward pass
        with _slices_of(chunk):
            _require(torch.autograd.gradcheck(run, (q, k, v, *values), fast_mode=True), "gradcheck failed")


def _back_ends(bench: Bench) -> None:
    pos = torch.arange(bench.length) + 3
    mask = torch.rand(bench.q.shape[0], 1, bench.length, bench.length) < 0.7
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "masked": {"causal": True, "mask": mask, "q_pos": pos, "k_pos": pos},
        "one key head": {"causal": True},
    }
    narrow = copy.deepcopy(bench.scheme).float()
    taken = False
    for name in ("fused", "sdpa"):  # flex would have to be compiled first
        for scheme, dtype in ((bench.scheme, torch.float64), (narrow, torch.float32)):
            q, k, v = (x.to(dtype) for x in (bench.q, bench.k, bench.v))
            if BACKENDS[name].unsupported(prepare(q, k, v, scheme)) is not None:
                continue
            taken = True
            for case, how in cases.items():
                few = slice(1 if case == "one key head" else None)
                wide = [bench.q, bench.k[:, few], bench.v[:, few]]
                given = [x.to(dtype) for x in wide]
                truth = attend(wide[0], wide[1], wide[2], bench.scheme, impl="eager", **how)
                # float32 may be as wrong as the reference itself is in float32
                own = attend(given[0], given[1], given[2], scheme, impl="eager", **how)
                rounding = 40 * torch.finfo(dtype).eps * float(truth.detach().abs().max())
                allowed = TIGHT + 4 * _distance(own.double(), truth) + rounding
                error = _distance(attend(given[0], given[1], given[2], scheme, impl=name, **how).double(), truth)
                _require(error <= allowed, f"{name}, {case}, {dtype}: differs from eager by {error:.1e}")
            break
    if not taken:
        raise NotApplicable("only eager takes it")


def _reach(bench: Bench) -> None:
    reach = bench.scheme.reach
    if reach is None:
        raise NotApplicable("it has none: terms go on changing")
    r = torch.cat([torch.arange(reach, reach + 50), torch.tensor([reach * 3 + 100, FAR + reach])])
    for side in (r, -r):
        for name, table in bench.scheme.terms(side).tables().items():
            error = _distance(table, table[:, :1].expand_as(table))
            _require(error == 0, f"{name} changes by {error:.1e} beyond reach={reach}")


def _far_away(bench: Bench) -> None:
    scheme = copy.deepcopy(bench.scheme).float()
    for name, table in scheme.terms(torch.tensor([-FAR, FAR])).tables().items():
        _require(table.isfinite().all(), f"{name} is not finite at |r| = {FAR:,}")
    q, k, v = (x[:, :, :2].float() for x in (bench.q, bench.k, bench.v))
    there = torch.tensor([0, FAR])[: q.shape[2]]
    for causal in (True, False):
        out = attend(q, k, v, scheme, q_pos=there, k_pos=there, causal=causal, impl="eager")
        _require(out.isfinite().all(), f"attention over |r| = {FAR:,} is not finite (causal={causal})")
    if scheme.max_length is None:
        embedded = scheme.embed(there)
        _require(embedded is None or embedded.isfinite().all(), f"the embedding of position {FAR:,} is not finite")


def _parameters(bench: Bench) -> None:
    there, formula = sum(p.numel() for p in bench.scheme.parameters()), bench.scheme.parameter_count()
    _require(there == formula, f"there are {there} parameters, parameter_count() says {formula}")
    pos = torch.arange(bench.length)
    before, embedded = _effects(bench, pos)
    for name, parameter in bench.scheme.named_parameters():
        if parameter.numel() == 0:
            continue
        value = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        after, moved = _effects(bench, pos)
        with torch.no_grad():
            parameter.copy_(value)
        same = _distance(after, before) == 0 and (moved is None or embedded is None or _distance(moved, embedded) == 0)
        _require(not same, f"{name} changes neither logits nor outputs nor embeddings")


def _spec(bench: Bench) -> None:
    again = _rebuild(bench.original)
    _require(str(again) == str(bench.original), f"{bench.original} builds {again}")
    shapes = [{name: x.shape for name, x in s.state_dict().items()} for s in (bench.original, again)]
    _require(shapes[0] == shapes[1], f"the rebuilt scheme has other parameters: {shapes}")


def _state(bench: Bench) -> None:
    pos = torch.arange(bench.length)
    again = _rebuild(bench.original).double()
    again.load_state_dict(bench.scheme.state_dict())
    _require(torch.equal(bench.logits(pos, pos, again), bench.logits(pos, pos)), "logits differ after load_state_dict")
    first, second = again.embed(pos), bench.scheme.embed(pos)
    _require((first is None) == (second is None), "one of the two has an embedding")
    if first is not None and second is not None:
        _require(torch.equal(first, second), "embeddings differ after load_state_dict")


def _effects(bench: Bench, pos: Tensor) -> tuple[Tensor, Tensor | None]:
    """Everything a scheme can change: logits and outputs, near and far, and embeddings."""
    far = pos * 40 if bench.scheme.max_length is None else pos
    parts = [bench.logits(pos, pos), bench.logits(pos, far)]
    parts.append(attend(bench.q, bench.k, bench.v, bench.scheme, impl="eager"))
    return torch.cat([part.detach().flatten() for part in parts]), bench.scheme.embed(pos)


@contextmanager
def _slices_of(chunk: int) -> Iterator[None]:
    before, eager.CHUNK = eager.CHUNK, chunk
    try:
        yield
    finally:
        eager.CHUNK = before


def _require(holds: bool | Tensor, otherwise: str) -> None:
    """assert, but also under python -O."""
    if not holds:
        raise AssertionError(otherwise)


def _rebuild(scheme: Scheme) -> Scheme:
    known = {**SCHEMES, **{part.name(): type(part) for part in scheme.parts_of_sum()}}
    return from_spec(str(scheme), schemes=known, **{dim: getattr(scheme, dim, None) for dim in DIMS})


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to values above 1."""
    if a.numel() == 0:
        return 0.0
    return float(((a - b).detach().abs() / b.detach().abs().clamp(min=1.0)).max())


LAWS: dict[str, Callable[[Bench], None]] = {
    "tables": _tables,
    "locality": _locality,
    "rows": _rows,
    "shift": _shift,
    "decode": _decode,
    "irregular": _irregular,
    "gradient": _gradient,
    "reach": _reach,
    "back ends": _back_ends,
    "far away": _far_away,
    "parameters": _parameters,
    "spec": _spec,
    "state": _state,
}
