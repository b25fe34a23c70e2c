"""How translation-invariant the positions of a model are. Wennberg & Henter 2021, arXiv 2106.01950.

What position adds to a logit is translation-invariant when its matrix is Toeplitz, M_ij = f(j − i). With E the table of
positions and W_Q, W_K of the first layer, the paper looks at

    P = E Eᵀ          F̂ = E W_Q W_Kᵀ Eᵀ / √head_dim, per head          R² = 1 − Σ(M_ij − m_{j−i})² / Σ(M_ij − m)²

with m_r the mean of diagonal r and m the mean of all. R² is not 0 for noise: of n random rows of width d with equal
norms, the main diagonal alone explains n d² of n d² + n² d, so that R² of P is about d/(n + d), 0.43 for 512 × 384.
Every R² of a table therefore comes with that of random tables with the same norms of rows, and R² of E Eᵀ also without
its main diagonal.

`structure` looks for what the same authors found later (RepL4NLP 2024): a table lives in few dimensions, which are
sine/cosine pairs of low frequency. Layers and heads count from 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.attention import eager
from locant.attention.request import prepare
from locant.schemes import Nope, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.hf.plan import Attention

LENGTH = 128
"""Positions at which a scheme without a table is measured."""
NONE = math.nan

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Control:
    """R² of what has no order by design: mean over samples, 2.5 % and 97.5 % quantiles."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Invariance:
    """R² of a table over positions first … last (both included). `cosine` is NaN where a row is zero."""

    first: int
    last: int
    gram: float  # of E Eᵀ
    gram_interval: tuple[float, float]  # 95 %, over positions
    gram_control: Control
    off_diagonal: float  # of E Eᵀ without its main diagonal, which is what noise scores by
    off_diagonal_interval: tuple[float, float]
    off_diagonal_control: Control
    cosine: float  # of the cosines between rows
    cosine_interval: tuple[float, float]
    cosine_control: Control
    norm_of_0: float  # of position 0, divided by the median norm over first … last


@dataclass(frozen=True)
class HeadInvariance:
    head: int
    r2: float
    control: Control


@dataclass(frozen=True)
class Row:
    """One number about a model. `exact` is 1 where the mathematics of the scheme says so, whatever its parameters."""

    stack: str  # "" or, of an encoder-decoder, which
    layer: int | None  # None: added to the tokens, before the first layer
    head: int | None
    scheme: str
    quantity: str  # "E Eᵀ", "E Eᵀ, i ≠ j", "cosine", "E W_Q W_Kᵀ Eᵀ" (F̂), "logits"
    first: int
    last: int
    r2: float
    exact: float | None
    interval: tuple[float, float] | None
    control: Control | None
    note: str


@dataclass(frozen=True)
class Component:
    """A principal component of a table, as a function of position."""

    number: int  # from 1, the largest first
    share: float  # of the variance
    frequency: int  # the dominant one, cycles per sequence
    power: float  # the share of the component that is a wave of this frequency
    phase: float  # degrees; cos is 0, sin is −90


@dataclass(frozen=True)
class Structure:
    first: int
    last: int
    width: int
    spectrum: tuple[float, ...]  # shares of the variance, all of them
    dimensions: dict[int, int]  # components needed for 90, 95 and 99 % of the variance
    components: tuple[Component, ...]  # the leading ones
    pairs: tuple[tuple[int, int], ...]  # numbers of components that are sine and cosine of one frequency


# ---- matrices and tables --------------------------------------------------------------------------


def toeplitz_r2(matrix: Tensor) -> float:
    """R² of the best Toeplitz fit of a square matrix, its diagonal means, in float64.

    A constant matrix (up to rounding) scores 1: there is nothing to explain, but it is Toeplitz, and that is asked.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] < 2:
        raise ValueError(f"matrix must be square, 2 × 2 or larger, got {list(matrix.shape)}")
    if not matrix.is_floating_point():
        raise TypeError(f"matrix must hold floats, got {matrix.dtype}")
    if not matrix.isfinite().all():
        raise ValueError("matrix holds NaN or infinity")
    return float(_r2(matrix.detach()))


def _r2(matrix: Tensor) -> Tensor:
    """The same for [..., n, n]."""
    rounding = 8 * torch.finfo(matrix.dtype).eps * matrix.abs().amax((-2, -1)).double()
    matrix = matrix.double()
    matrix = matrix - matrix.mean((-2, -1), keepdim=True)
    n = matrix.shape[-1]
    count = n - (torch.arange(2 * n - 1, device=matrix.device) - n + 1).abs()
    explained = (_diagonals(matrix).sum(-2).square() / count).sum(-1)  # Σ(m_r − m)²: total minus what is left
    total = matrix.square().sum((-2, -1))
    constant = total <= (n * rounding).square()
    share: Tensor = explained / total.masked_fill(constant, 1.0)
    return share.clamp(max=1.0).masked_fill(constant, 1.0)


def _without_diagonal(matrix: Tensor) -> Tensor:
    """The mean of the other pairs on the main diagonal: R² is then that of the pairs i ≠ j."""
    n, main = matrix.shape[-1], matrix.diagonal(dim1=-2, dim2=-1)
    mean = (matrix.sum((-2, -1)) - main.sum(-1)) / (n * (n - 1))
    changed: Tensor = matrix + torch.diag_embed(mean[..., None] - main)
    return changed


def _diagonals(matrix: Tensor) -> Tensor:
    """[..., n, n] → [..., n, 2n − 1]: column c holds diagonal j − i = c − (n − 1), zeros elsewhere."""
    n = matrix.shape[-1]
    rows = F.pad(matrix.flip(-2), (0, n)).flatten(-2)  # one column too many, so that each row begins one place later
    lines: Tensor = rows[..., : n * (2 * n - 1)].unflatten(-1, (n, 2 * n - 1))
    return lines


@torch.no_grad()
def of_table(table: Tensor, *, first: int = 1, last: int | None = None, samples: int = 50, seed: int = 0) -> Invariance:
    """R² of E Eᵀ and of cosines, over positions first … last (default: all but 0, an outlier in BERT-like tables).

    The interval resamples positions, for R² is about positions (coordinates torn from their sine/cosine partners would
    not be Toeplitz where the table is): see `_interval`. The control is `samples` tables with random directions and
    the norms of E's rows.
    """
    rows, first, last = _rows(table, first, last)
    generator = torch.Generator().manual_seed(seed)
    norms = rows.norm(dim=-1, keepdim=True)
    gram = rows @ rows.mT
    of_gram, of_rest, of_cosine = [], [], []
    for _ in range(samples):
        random = _unit(rows.shape, generator)
        of_cosine.append(float(_r2(random @ random.mT)))
        random = random * norms
        of_gram.append(float(_r2(random @ random.mT)))
        of_rest.append(float(_r2(_without_diagonal(random @ random.mT))))
    cosine, by_cosine = NONE, (NONE, NONE)
    if bool((norms > 0).all()):
        unit = rows / norms
        cosine, by_cosine = float(_r2(unit @ unit.mT)), _interval(unit @ unit.mT)
    return Invariance(
        first=first,
        last=last,
        gram=float(_r2(gram)),
        gram_interval=_interval(gram),
        gram_control=_control(of_gram),
        off_diagonal=float(_r2(_without_diagonal(gram))),
        off_diagonal_interval=_interval(_without_diagonal(gram)),
        off_diagonal_control=_control(of_rest),
        cosine=cosine,
        cosine_interval=by_cosine,
        cosine_control=_control(of_cosine),
        norm_of_0=float(table[0].double().norm().cpu() / norms.median()),
    )


def _rows(table: Tensor, first: int, last: int | None) -> tuple[Tensor, int, int]:
    """Rows first … last in float64 on the CPU."""
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(f"table must be floats [positions, width], got {table.dtype} {list(table.shape)}")
    last = table.shape[0] - 1 if last is None else last
    if not 0 <= first < last < table.shape[0]:
        raise ValueError(
            f"positions {first} … {last}: expected 0 ≤ first < last < {table.shape[0]}, the length of the table"
        )
    rows = table[first : last + 1].detach().double().cpu()
    if not rows.isfinite().all():
        raise ValueError("the table holds NaN or infinity")
    return rows, first, last


def _unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


def _control(values: list[float]) -> Control:
    if not values:
        return Control(NONE, NONE, NONE)
    found = torch.tensor(values, dtype=torch.float64)
    return Control(float(found.mean()), float(found.quantile(0.025)), float(found.quantile(0.975)))


def _interval(matrix: Tensor) -> tuple[float, float]:
    """95 % interval of R²: the jackknife over blocks of √n neighbouring positions, each left out once.

    Positions that stay keep their place, so that what is Toeplitz stays so. Not the bootstrap: a position drawn twice
    fills diagonals with copies, which lifts R² (by 0.03 … 0.1 in simulated tables of known R²). There this interval
    held the true value in 97 … 100 % of the cases: it errs on the wide side.
    """
    n = matrix.shape[0]
    size = max(1, round(math.sqrt(n)))
    place, values = torch.arange(n), []
    for start in range(0, n, size):
        kept = torch.cat([place[:start], place[start + size :]])
        if len(kept) < 2:
            return NONE, NONE
        part = matrix[kept][:, kept]
        part = (part - part.mean()).flatten()
        offset = (kept[None] - kept[:, None] + n - 1).flatten()
        sums, count = torch.bincount(offset, part), torch.bincount(offset)
        total = part.square().sum()
        constant = float(total) <= n**2 * (1e-14 * float(matrix.abs().max())) ** 2
        values.append(1.0 if constant else float((sums.square() / count.clamp(min=1)).sum() / total))
    found, blocks = torch.tensor(values, dtype=torch.float64), len(values)
    error = math.sqrt((blocks - 1) ** 2 / blocks * float(found.var()))  # (blocks − 1)/blocks · Σ(x − mean)²
    middle = float(_r2(matrix))
    return max(0.0, middle - 1.96 * error), min(1.0, middle + 1.96 * error)


@torch.no_grad()
def of_heads(
    table: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    n_heads: int,
    *,
    norm: Norm | None = None,
    first: int = 1,
    last: int | None = None,
    samples: int = 20,
    seed: int = 0,
) -> list[HeadInvariance]:
    """R² of F̂ = E W_Q W_Kᵀ Eᵀ / √head_dim, per head.

    w_q and w_k are [heads · head_dim, width], as in nn.Linear; w_k may have fewer heads (grouped queries). A model
    normalises token + position before (or after) it gets there; the paper leaves that out, and so do we unless `norm`
    is given, which is then applied to E. The control sends random tables with E's norms through the same weights.
    """
    rows, first, last = _rows(table, first, last)
    if w_q.ndim != 2 or w_q.shape[0] % n_heads or w_q.shape[1] != rows.shape[1] or w_k.shape[1:] != w_q.shape[1:]:
        raise ValueError(
            f"w_q and w_k must be [heads · head_dim, {rows.shape[1]}] with {n_heads} heads, "
            f"got {list(w_q.shape)} and {list(w_k.shape)}"
        )
    if w_k.shape[0] == 0 or w_q.shape[0] % w_k.shape[0]:
        raise ValueError(f"the {w_q.shape[0]} rows of w_q must be a multiple of the {w_k.shape[0]} of w_k")
    w_q, w_k = (w.detach().double().cpu() for w in (w_q, w_k))
    norms, generator = rows.norm(dim=-1, keepdim=True), torch.Generator().manual_seed(seed)
    found = _r2(_head_logits(rows, w_q, w_k, n_heads, norm))
    control = [
        _r2(_head_logits(_unit(rows.shape, generator) * norms, w_q, w_k, n_heads, norm)).tolist()
        for _ in range(samples)
    ]
    return [
        HeadInvariance(head + 1, float(r2), _control([draw[head] for draw in control])) for head, r2 in enumerate(found)
    ]


def _head_logits(rows: Tensor, w_q: Tensor, w_k: Tensor, n_heads: int, norm: Norm | None) -> Tensor:
    head_dim = w_q.shape[0] // n_heads
    rows = rows if norm is None else norm(rows)
    q, k = ((rows @ w.mT).unflatten(-1, (-1, head_dim)).transpose(0, 1) for w in (w_q, w_k))
    logits: Tensor = q @ k.repeat_interleave(n_heads // k.shape[0], dim=0).mT / math.sqrt(head_dim)  # [H, n, n]
    return logits


@torch.no_grad()
def of_logits(logits: Tensor, *, samples: int = 20, seed: int = 0) -> list[HeadInvariance]:
    """R² of positional logits [heads, n, n] however they were measured. The control is the same numbers, permuted."""
    if logits.ndim != 3 or logits.shape[1] != logits.shape[2] or logits.shape[1] < 2:
        raise ValueError(f"logits must be [heads, n, n] with n ≥ 2, got {list(logits.shape)}")
    if not logits.isfinite().all():
        raise ValueError("the logits hold NaN or infinity")
    logits, generator = logits.detach().cpu(), torch.Generator().manual_seed(seed)
    control = []
    for _ in range(samples):
        order = torch.randperm(logits[0].numel(), generator=generator)
        control.append(_r2(logits.flatten(1)[:, order].view_as(logits)).tolist())
    return [
        HeadInvariance(head + 1, float(r2), _control([draw[head] for draw in control]))
        for head, r2 in enumerate(_r2(logits))
    ]


@torch.no_grad()
def scheme_logits(
    scheme: Scheme, *, length: int = LENGTH, n_heads: int = 1, head_dim: int = 64, causal: bool = False, draws: int = 8,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """The logits [draws, heads, length, length] of a scheme when all tokens are alike, float64.

    For a bias q = k = 0, and one draw: the bias itself. Otherwise one random q and one random k per draw and head, the
    same at every position, so that whatever differs between pairs is due to position.
    """
    if scheme.max_length is not None:
        length = min(length, scheme.max_length)
    scheme = copy.deepcopy(scheme).double()
    here = next(scheme.parameters(), torch.empty(0)).device
    terms = scheme.terms(torch.zeros(1, dtype=torch.long, device=here))
    rotates = any(type(part).rotate is not Scheme.rotate for part in _parts(scheme))
    bias_alone = not rotates and set(terms.used()) <= {"bias", "score"}
    generator = torch.Generator().manual_seed(seed)
    shape = (1 if bias_alone else draws, getattr(scheme, "n_heads", n_heads), 1, getattr(scheme, "head_dim", head_dim))
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64).to(here) for _ in range(2))
    q, k = (x.expand(-1, -1, length, -1) * (0 if bias_alone else 1) for x in (q, k))
    logits = eager.logits(prepare(q, k, k, scheme, causal=causal))
    return logits.expand(shape[0], shape[1], length, length).double().cpu()


def _parts(scheme: Scheme) -> list[Scheme]:
    schemes = getattr(scheme, "schemes", None)
    return schemes() if schemes is not None else [scheme]


# ---- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stack:
    """A stack of a model, with its positions as they are now: `table` reads live parameters."""

    name: str
    spec: str
    table: Callable[[], Tensor] | None
    project: nn.Module | None  # between the embeddings and the first layer
    attentions: list[Attention]
    modules: list[nn.Module]
    schemes: list[Scheme]  # of each attention, or none

    def head_weights(self) -> tuple[Tensor, Tensor] | None:
        """W_Q and W_K of the first layer as seen from the table; None where they are not found."""
        found = _projections(self.modules[0], self.attentions[0])
        if found is None or self.table is None:
            return None
        w_q, w_k = (w.detach().double().cpu() for w in found)
        width = self.table().shape[1]
        if self.project is not None and w_q.shape[1] != width:
            into: Any = self.project.weight
            w_q, w_k = (w @ into.detach().double().cpu() for w in (w_q, w_k))
        return (w_q, w_k) if w_q.shape[1] == width else None


def _projections(module: nn.Module, attention: Attention) -> tuple[Tensor, Tensor] | None:
    """W_Q and W_K, [heads · head_dim, width], under the names that transformers has for them."""
    inner = attention.n_heads * attention.head_dim

    def weight(name: str) -> Tensor | None:
        found = getattr(getattr(module, name, None), "weight", None)
        return found if isinstance(found, Tensor) and found.is_floating_point() and found.ndim == 2 else None

    for names in (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k")):
        q, k = map(weight, names)
        if q is not None and k is not None and q.shape[0] == inner:
            return q, k
    conv = weight("c_attn")  # GPT-2's Conv1D: [width, q then k then v]
    if conv is not None and conv.shape[1] == 3 * inner:
        return conv[:, :inner].mT, conv[:, inner : 2 * inner].mT
    joined = weight("Wqkv")  # q, then k, then v
    if joined is not None and joined.shape[0] == 3 * inner:
        return joined[:inner], joined[inner : 2 * inner]
    by_head = weight("query_key_value")  # GPT-NeoX: q, k, v of the first head, then of the second
    if by_head is not None and by_head.shape[0] == 3 * inner:
        parts = by_head.unflatten(0, (attention.n_heads, 3, attention.head_dim))
        return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)
    return None


def stacks(model: PreTrainedModel) -> list[_Stack]:
    from locant.hf.families import family_of
    from locant.hf.mechanisms import Patches, Table
    from locant.hf.plan import find_attentions, plan_of
    from locant.hf.readout import native

    read, plan, base = native(model), plan_of(model), model.base_model
    mechanism = family_of(model).mechanism
    if plan is None:
        names = find_attentions(model, family_of(model))
    else:
        names = {stack.path: stack.attentions for stack in plan.stacks}
    found = []
    for (path, attentions), positions in zip(names.items(), read.stacks, strict=True):
        stack = base.get_submodule(path)
        tables: list[Callable[[], Tensor]] = []
        kept = isinstance(mechanism, (Table, Patches)) and (plan is None or plan.keep_native)
        if kept:
            tables.append(_native_table(model, stack))
        if plan is not None and positions.embed is not None:
            tables.append(_embedding(positions.embed))
        specs = ([f"learned:length={tables[0]().shape[0]}"] if kept else []) + (
            [str(positions.embed)] if plan is not None and positions.embed is not None else []
        )
        project = next(
            (
                module
                for name in ("encoder.embedding_hidden_mapping_in", "embeddings_project", "project_in")
                if isinstance(module := _submodule(stack, name), nn.Linear)
            ),
            None,
        )
        found.append(
            _Stack(
                name=path if len(names) > 1 else "",
                spec="+".join(specs),
                table=partial(_add, tables) if tables else None,
                project=project,
                attentions=attentions,
                modules=[base.get_submodule(attention.name) for attention in attentions],
                schemes=list(positions.layers or []),
            )
        )
    return found


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _native_table(model: PreTrainedModel, stack: nn.Module) -> Callable[[], Tensor]:
    """The model's own table from the first row it uses, live, also where a swap has set it aside and kept it."""
    from locant.hf.families import family_of
    from locant.hf.mechanisms import Patches, Table
    from locant.hf.plan import plan_of

    mechanism, plan = family_of(model).mechanism, plan_of(model)
    assert isinstance(mechanism, (Table, Patches))
    first = mechanism.first(stack) if isinstance(mechanism, Table) else 0
    inside = set(stack.modules())
    for replaced in plan.replaced if plan is not None else []:
        original = replaced.original
        if replaced.parent in inside and original is not None:
            table = original if isinstance(original, nn.Parameter) else original.weight
            return lambda: table[0] if table.ndim == 3 else table[first:]
    if isinstance(mechanism, Patches):
        return lambda: mechanism.table(stack)[0]
    return lambda: mechanism.table(stack)[first:]


def _embedding(scheme: Scheme) -> Callable[[], Tensor]:
    def read() -> Tensor:
        here = next(scheme.parameters(), next(scheme.buffers(), torch.empty(0))).device
        embedded = scheme.embed(torch.arange(scheme.max_length or LENGTH, device=here))
        assert embedded is not None
        return embedded

    return read


def _add(parts: list[Callable[[], Tensor]]) -> Tensor:
    tables = [part() for part in parts]
    length = min(table.shape[0] for table in tables)
    return torch.stack([table[:length] for table in tables]).sum(0)


@torch.no_grad()
def of_model(
    model: PreTrainedModel,
    *,
    first: int = 1,
    last: int | None = None,
    length: int = LENGTH,
    samples: int = 20,
    seed: int = 0,
) -> list[Row]:
    """Every R² of a model of transformers, swapped or not.

    A table: E Eᵀ, cosines, and F̂ of each head of the first layer where its weights are found, over first … last. A
    scheme inside attention: its logits with all tokens alike, over positions 0 … length − 1, mean over random tokens
    where it acts on tokens; one set of rows for each scheme that differs. `exact` is 1 where moving all positions
    changes nothing and a pair depends on nothing but itself, so that the logits are Toeplitz by their mathematics.
    """
    rows: list[Row] = []
    for stack in stacks(model):
        before = len(rows)
        if stack.table is not None:
            rows += _table_rows(stack, first, last, samples, seed)
        done: set[object] = set()
        for layer, (module, attention, scheme) in enumerate(
            zip(stack.modules, stack.attentions, stack.schemes, strict=False), start=1
        ):
            same = id(scheme) if list(scheme.parameters()) else str(scheme)
            if type(scheme) is not Nope and same not in done:
                rows += _scheme_rows(stack, layer, module, attention, scheme, length, samples, seed)
            done.add(same)
        if len(rows) == before:
            note = "no positions: the tokens are a set, and but for a causal mask their order cannot be seen"
            rows.append(
                Row(stack.name, None, None, "nope", "logits", 0, length - 1, 1.0, 1.0, None, None, note)
            )  # all zeros, which is constant
    return rows


def _table_rows(stack: _Stack, first: int, last: int | None, samples: int, seed: int) -> list[Row]:
    assert stack.table is not None
    table = stack.table().detach()
    x = of_table(table, first=first, last=last, samples=samples, seed=seed)
    where = (stack.spec, x.first, x.last)
    note = f"norm of position 0: {x.norm_of_0:.3g} × the median"
    rows = [
        _row(stack, None, None, "E Eᵀ", *where, x.gram, None, x.gram_interval, x.gram_control, note),
        _row(
            stack,
            None,
            None,
            "E Eᵀ, i ≠ j",
            *where,
            x.off_diagonal,
            None,
            x.off_diagonal_interval,
            x.off_diagonal_control,
            "",
        ),
        _row(stack, None, None, "cosine", *where, x.cosine, None, x.cosine_interval, x.cosine_control, ""),
    ]
    weights = stack.head_weights()
    if weights is None:
        note = f"no query and key weights known in {type(stack.modules[0]).__name__}"
        return [*rows, _row(stack, 1, None, "E W_Q W_Kᵀ Eᵀ", *where, NONE, None, None, None, note)]
    heads = of_heads(table, *weights, stack.attentions[0].n_heads, first=first, last=last, samples=samples, seed=seed)
    note = "layer norm left out"
    return rows + [_row(stack, 1, x.head, "E W_Q W_Kᵀ Eᵀ", *where, x.r2, None, None, x.control, note) for x in heads]


def _row(
    stack: _Stack, layer: int | None, head: int | None, quantity: str, scheme: str, first: int, last: int, r2: float,
    exact: float | None, interval: tuple[float, float] | None, control: Control | None, note: str,
) -> Row:  # fmt: skip
    return Row(stack.name, layer, head, scheme, quantity, first, last, r2, exact, interval, control, note)


def _scheme_rows(
    stack: _Stack, layer: int, module: nn.Module, attention: Attention, scheme: Scheme, length: int, samples: int,
    seed: int,
) -> list[Row]:  # fmt: skip
    logits = scheme_logits(
        scheme, length=length, n_heads=attention.n_heads, head_dim=attention.head_dim,
        causal=bool(getattr(module, "is_causal", False)), seed=seed,
    )  # fmt: skip
    r2 = _r2(logits).mean(0)
    controls = of_logits(logits[0], samples=samples, seed=seed)
    exact = 1.0 if scheme.shift_invariant and scheme.pairwise else None
    note = "the bias itself" if logits.shape[0] == 1 else f"mean over {logits.shape[0]} random q and k"
    last = logits.shape[-1] - 1
    return [
        _row(stack, layer, x.head, "logits", str(scheme), 0, last, float(r2[x.head - 1]), exact, None, x.control, note)
        for x in controls
    ]


# ---- few dimensions -------------------------------------------------------------------------------


@torch.no_grad()
def structure(
    table: Tensor, *, first: int = 1, last: int | None = None, components: int = 10, tolerance: float = 30.0
) -> Structure:
    """Principal components of a table and what they are over position: spectrum, frequencies, sine/cosine pairs.

    The centred table is U S Vᵀ; component c is the column U_c S_c over position, c_f its Fourier coefficients. The
    dominant frequency is the f > 0 of largest |c_f|, in whole cycles per sequence. Two components are a pair when they
    share it and their phases are 90° apart, within `tolerance` degrees; each component is in one pair at most.
    """
    rows, first, last = _rows(table, first, last)
    n = rows.shape[0]
    if n < 4:
        raise ValueError(f"frequencies need at least 4 positions, got {n}")
    u, s, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    variance = s.square()
    if float(variance.sum()) <= (1e-12 * float(rows.abs().max())) ** 2 * rows.numel():
        raise ValueError("all rows of the table are the same: there is no variance to explain")
    shares = variance / variance.sum()
    reached = shares.cumsum(0)
    found = []
    for index in range(min(components, int((shares > 1e-12).sum()))):
        waves = torch.fft.rfft(u[:, index])[1:]
        power = waves.abs().square() * 2
        if n % 2 == 0:
            power[-1] /= 2  # the highest frequency has no mirror image
        best = int(power.argmax())
        phase = math.degrees(float(waves[best].angle()))
        found.append(Component(index + 1, float(shares[index]), best + 1, float(power[best] / power.sum()), phase))
    pairs: list[tuple[int, int]] = []
    free = list(found)
    while free:
        one = free.pop(0)
        for other in free:
            apart = (one.phase - other.phase) % 180  # the sign of a component is arbitrary
            if other.frequency == one.frequency and abs(apart - 90) <= tolerance:
                pairs.append((one.number, other.number))
                free.remove(other)
                break
    return Structure(
        first=first,
        last=last,
        width=rows.shape[1],
        spectrum=tuple(shares.tolist()),
        dimensions={percent: int((reached < percent / 100 - 1e-12).sum()) + 1 for percent in (90, 95, 99)},
        components=tuple(found),
        pairs=tuple(pairs),
    )


# ---- during training ------------------------------------------------------------------------------


@torch.no_grad()
def _now(stacks: list[_Stack], first: int, last: int | None) -> dict[str, float]:
    """What can change in training, without intervals and controls: names as they stand in the logs."""
    values = {}
    for stack in stacks:
        prefix = f"invariance/{stack.name}/" if stack.name else "invariance/"
        if stack.table is not None:
            rows, _, _ = _rows(stack.table(), first, last)
            values[f"{prefix}gram"] = float(_r2(rows @ rows.mT))
            values[f"{prefix}off_diagonal"] = float(_r2(_without_diagonal(rows @ rows.mT)))
            unit = F.normalize(rows, dim=-1)
            values[f"{prefix}cosine"] = float(_r2(unit @ unit.mT))
            weights = stack.head_weights()
            if weights is not None:
                heads = _r2(_head_logits(rows, *weights, stack.attentions[0].n_heads, None))
                values |= {f"{prefix}head_{head}": float(r2) for head, r2 in enumerate(heads, start=1)}
        changing = {
            id(scheme): (layer, module, attention, scheme)
            for layer, (module, attention, scheme) in enumerate(
                zip(stack.modules, stack.attentions, stack.schemes, strict=False), start=1
            )
            if list(scheme.parameters()) and not (scheme.shift_invariant and scheme.pairwise)
        }
        for layer, module, attention, scheme in changing.values():
            logits = scheme_logits(
                scheme, n_heads=attention.n_heads, head_dim=attention.head_dim,
                causal=bool(getattr(module, "is_causal", False)), draws=2,
            )  # fmt: skip
            for head, r2 in enumerate(_r2(logits).mean(0), start=1):
                values[f"{prefix}layer_{layer}/head_{head}"] = float(r2)
    return values


if TYPE_CHECKING:
    from transformers import TrainerCallback

    class InvarianceCallback(TrainerCallback):
        records: list[dict[str, float]]

        def __init__(self, *, first: int = 1, last: int | None = None) -> None: ...


def _make_callback() -> type:
    from transformers import PreTrainedModel, TrainerCallback

    class InvarianceCallback(TrainerCallback):
        """Records R² of the table and of the first layer's heads at the start and at every log step of a Trainer.

        `records` is a list of {"step": …, "invariance/gram": …, "invariance/cosine": …, "invariance/head_1": …}; the
        same numbers go into the logs and the Trainer's log_history. A Trainer calls its reporters (TensorBoard, …)
        before callbacks it was given: for them, put this one first in trainer.callback_handler.callbacks.
        """

        def __init__(self, *, first: int = 1, last: int | None = None) -> None:
            self.first, self.last = first, last
            self.records: list[dict[str, float]] = []
            self._stacks: list[_Stack] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            while not isinstance(model, PreTrainedModel):  # PEFT, DDP, compiled
                inner = next(
                    (x for x in map(model._modules.get, ("module", "base_model", "model", "_orig_mod")) if x), None
                )
                if inner is None:
                    raise TypeError(f"no model of transformers found in {type(kwargs['model']).__name__}")
                model = inner
            self._stacks = stacks(model)
            self._record(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not self._stacks or state.global_step == self.records[-1]["step"]:  # evaluation, or the last summary
                return
            values = self._record(state.global_step)
            if logs is not None:
                logs.update(values)
            if state.log_history:  # the Trainer has copied the logs there already
                state.log_history[-1].update(values)

        def _record(self, step: int) -> dict[str, float]:
            values = _now(self._stacks, self.first, self.last)
            if not values:
                raise ValueError(
                    "there is nothing to record: this model has no table of positions, and its scheme is "
                    "translation-invariant whatever its parameters are, or there is none"
                )
            self.records.append({"step": step, **values})
            return values

    InvarianceCallback.__qualname__ = "InvarianceCallback"
    return InvarianceCallback


def __getattr__(name: str) -> Any:
    """`InvarianceCallback` is made when it is asked for: importing this module does not import transformers."""
    if name == "InvarianceCallback":
        globals()[name] = _make_callback()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
