"""One query against a cache of keys: attention with a scheme against plain `scaled_dot_product_attention`.

    python bench/decoding.py [SPEC …] [--keys 8192] [--batch 1] [--threads 2] [--seconds 50]

fp32, H = 12, D = 64, impl="auto", gradients disabled. Every measurement of a scheme has one of plain attention beside
it, before or after it at random, and the schemes are in a new order in every round. Printed are the median of the
ratios, their 10th and 90th percentile, and the median time outside the kernel, torch's or ours. Plain attention passes
all keys and values through the caches, so this is the time of Python and of small operators with cold caches.

On a busy machine a thread may wait for a core, and the ratios mean nothing. The time outside the kernel, with
`--threads 1`, then still compares two versions of locant.

`mask` is torch's kernel with a mask that is there already: with that kernel no scheme with a bias can be faster.
`inkling` and `fox` get what they read from hidden states, as q, k and v are given. Written to
bench/results/decoding.csv.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import RESULTS, command_line, print_versions, write_csv
from torch import Tensor

import locant
from locant.attention import fused_direct
from locant.attention.build import build
from locant.attention.sides import Remembered

HEADS, SIZE = 12, 64
BIASES = ["tisa", "tisa2", "t5", "toeplitz", "alibi", "kerple", "sandwich"]
NAMES = ["mask", *BIASES, "inkling", "fox"]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(name: str, batch: int, keys: int) -> Run:
    """`mask` or a scheme, as a function of q, k and v."""
    if name == "mask":
        mask = torch.randn(batch, HEADS, 1, keys)
        return lambda q, k, v: kernel(q, k, v, attn_mask=mask)
    scheme = locant.scheme(name, n_heads=HEADS, head_dim=SIZE, d_model=HEADS * SIZE)
    read = scheme.read(torch.randn(batch, keys, HEADS * SIZE)) if scheme.reads else None
    x = None if read is None else Remembered(read[:, :, -1:], read if scheme.reads_keys else None)
    return lambda q, k, v: locant.attend(q, k, v, scheme, causal=True, x=x)


class Clock:
    """A kernel, with the time it took in its last call."""

    seconds = 0.0  # shared: of the last call of any kernel

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, *args: object, **how: object) -> Any:
        start = time.perf_counter()
        out = self.function(*args, **how)
        Clock.seconds = time.perf_counter() - start
        return out


kernel = Clock(F.scaled_dot_product_attention)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "decoding.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print_versions("torch", "locant", threads=torch.get_num_threads())
    F.scaled_dot_product_attention = kernel  # type: ignore[assignment]
    if build().library is not None:
        ours = Clock(fused_direct._kernel())
        fused_direct._kernel = lambda: ours  # type: ignore[assignment]
    q, k, v = (torch.randn(options.batch, HEADS, n, SIZE) for n in (1, options.keys, options.keys))
    runs = {name: attention(name, options.batch, options.keys) for name in options.names}

    def timed(run: Run) -> float:
        start = time.perf_counter()
        run(q, k, v)
        return time.perf_counter() - start

    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    outside: dict[str, list[float]] = {name: [] for name in runs}
    for run in (kernel, *runs.values()):
        timed(run)
    order, end = list(runs), time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        random.shuffle(order)
        for name in order:
            first = random.random() < 0.5
            before = timed(kernel) if first else 0.0
            seconds = timed(runs[name])
            outside[name].append(seconds - Clock.seconds)
            plain.append(before if first else timed(kernel))
            ratios[name].append(seconds / plain[-1])
    milliseconds = 1000 * statistics.median(plain)
    print(f"{options.keys} keys, batch {options.batch}, plain {milliseconds:.2f} ms, {len(ratios[order[0]])} rounds")
    rows = []
    for name, values in ratios.items():
        tenths = statistics.quantiles(values, n=10)
        row = {
            "spec": name, "keys": options.keys, "batch": options.batch, "threads": options.threads,
            "ratio": statistics.median(values), "low": tenths[0], "high": tenths[-1],
            "outside_us": 1e6 * statistics.median(outside[name]), "plain_ms": milliseconds,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:16} {row['ratio']:6.3f}  (10–90 %: {row['low']:.3f} … {row['high']:.3f})"
            f"  outside the kernel {row['outside_us']:5.0f} µs"
        )
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
