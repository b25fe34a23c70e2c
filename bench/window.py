"""Attention with a sliding window, by length: the work is linear in length · window.

    python bench/window.py [SPEC …] [--lengths 2048 4096 8192] [--window 256] [--repeats 5]

fp32, B = 1, H = 4, D = 64, causal, impl="fused". Printed are the median time per token, and the same call without the
window: forward, and forward + backward. Written to bench/results/window.csv.
"""

from pathlib import Path

import torch
from fused_call import fused_call
from measuring import RESULTS, command_line, in_turn, print_versions, spread, timed, write_csv

import locant

HEADS, SIZE = 4, 64
SPECS = ["nope", "tisa"]
LENGTHS = [2048, 4096, 8192]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "window.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_versions("torch", "locant", threads=options.threads)
    rows = []
    for spec in options.specs:
        scheme = locant.scheme(spec, n_heads=HEADS, head_dim=SIZE)
        for length in options.lengths:
            for what, train in (("forward", False), ("forward + backward", True)):
                shape, windows = (1, HEADS, length, SIZE), {"window": options.window, "all": None}
                runs = {
                    name: timed(fused_call(scheme, shape, train, causal=True, window=window))
                    for name, window in windows.items()
                }
                for name, seconds in in_turn(runs, options.repeats).items():
                    found = spread([1e6 * each / length for each in seconds])
                    print(f"{spec:16} {length:6} {what:20} {name:8} {found} µs per token", flush=True)
                    rows.append({"spec": spec, "length": length, "what": what, "keys": name, **found._asdict()})
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
