"""The cost of a scheme: attention with it against plain `scaled_dot_product_attention` on the same tensors.

Each repeat runs plain attention and every scheme once, in turn, so that other load on the machine affects all of them.
A ratio is the median, over the repeats, of a scheme's time divided by plain attention's in the same repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention import attend
from locant.schemes.base import Scheme

FORWARD, TRAINING, DECODING = "forward", "forward + backward", "one query"

TimedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> output"""


@dataclass(frozen=True)
class Cost:
    """A row of the table: the time of `spec` relative to plain attention, with the quartiles over the repeats."""

    spec: str
    what: str  # FORWARD, TRAINING or DECODING
    length: int
    batch: int
    ratio: float
    low: float
    high: float
    plain_ms: float


def costs(
    attentions: dict[str, TimedAttention],
    what: str,
    *,
    length: int,
    batch: int,
    heads: int,
    size: int,
    repeats: int,
    causal: bool = False,
) -> list[Cost]:
    """Returns the cost of each attention: forward, forward + backward, or one query against `length` keys.

    causal  whether plain attention is causal; those in `attentions` decide for themselves.
    """
    q, k, v = (torch.randn(batch, heads, n, size) for n in (1 if what == DECODING else length, length, length))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    target = torch.randn(batch, heads, q.shape[2], size)

    def run(attention: TimedAttention) -> float:
        start = time.perf_counter()
        if what == TRAINING:
            attention(leaves[0], leaves[1], leaves[2]).backward(target)
        else:
            with torch.no_grad():
                attention(q, k, v)
        return time.perf_counter() - start

    def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    runs = {"plain": plain_attention, **attentions}
    for attention in runs.values():  # warm-up
        run(attention)
    times = [{name: run(attention) for name, attention in runs.items()} for _ in range(repeats)]
    plain = 1000 * statistics.median(one["plain"] for one in times)
    rows = []
    for name in attentions:
        ratios = sorted(one[name] / one["plain"] for one in times)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        rows.append(Cost(name, what, length, batch, statistics.median(ratios), low, high, plain))
    return rows


def peak_memory(work: Callable[[], object]) -> float:
    """Returns by how many MB this process grows, at most, while `work` runs. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def with_scheme(scheme: Scheme, *, causal: bool = False) -> TimedAttention:
    """Returns `locant.attend` with a scheme, as a function of q, k and v.

    A scheme that reads hidden states gets the queries for them. A scheme for causal attention is timed there.
    """
    causal = causal or scheme.causal_only
    if scheme.reads:
        return lambda q, k, v: attend(q, k, v, scheme, causal=causal, x=q.detach().transpose(1, 2).flatten(2))
    return lambda q, k, v: attend(q, k, v, scheme, causal=causal)


def compare(
    schemes: dict[str, Scheme], lengths: list[int], *, tokens: int, heads: int, size: int, repeats: int
) -> Iterator[Cost]:
    """Yields the cost of every scheme at every length, forward and with backward.

    A batch has `tokens` tokens, and at least one sequence.
    """
    attentions = {name: with_scheme(scheme) for name, scheme in schemes.items()}
    for length in lengths:
        for what in (FORWARD, TRAINING):
            batch = max(tokens // length, 1)
            yield from costs(attentions, what, length=length, batch=batch, heads=heads, size=size, repeats=repeats)
