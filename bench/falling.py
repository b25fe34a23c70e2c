"""Attention whose logits fall with the distance, by length: the kernel leaves out tiles whose weights are 0 in float32.

    python bench/falling.py [SPEC …] [--lengths 2048 4096 8192] [--repeats 5]

fp32, B = 1, H = 8, D = 64, bidirectional, impl="fused". Printed is the median time as a ratio to the same call with
`nope`, which computes every tile, all in turn: forward, and forward + backward. Written to bench/results/falling.csv.
"""

from pathlib import Path

import torch
from fused_call import fused_call
from measuring import RESULTS, command_line, in_turn, print_versions, ratios, spread, timed, write_csv

import locant

HEADS, SIZE = 8, 64
PLAIN = "nope"
SPECS = ["tisa", "tisa+local:window=255", "alibi", "kerple"]
LENGTHS = [2048, 4096, 8192]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "falling.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_versions("torch", "locant", threads=options.threads)
    schemes = {spec: locant.scheme(spec, n_heads=HEADS, head_dim=SIZE) for spec in (PLAIN, *options.specs)}
    rows = []
    for length in options.lengths:
        for what, train in (("forward", False), ("forward + backward", True)):
            shape = (1, HEADS, length, SIZE)
            runs = {spec: timed(fused_call(scheme, shape, train)) for spec, scheme in schemes.items()}
            times = in_turn(runs, options.repeats)
            for spec in options.specs:
                found = spread(ratios(times, spec, PLAIN))
                print(f"{spec:24} {length:6} {what:20} {found}", flush=True)
                rows.append({"spec": spec, "length": length, "what": what, **found._asdict()})
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
