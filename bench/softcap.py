"""Attention with a softcap, with sinks and with both, against the same call without them.

    python bench/softcap.py [SPEC …] [--lengths 512 2048] [--repeats 15]

fp32, H = 12, D = 64, 2 threads, impl="fused"; B · L = 4096. Printed are the median of the ratios to the plain call in
the same repeat, and their quartiles: forward, and forward + backward. Written to bench/results/softcap.csv.
"""

from pathlib import Path

import torch
from fused_call import fused_call
from measuring import RESULTS, command_line, in_turn, print_versions, ratios, spread, timed, write_csv

import locant

HEADS, SIZE, TOKENS = 12, 64, 4096
SPECS = ["nope", "tisa", "huang4:clip=64"]
LENGTHS = [512, 2048]
PLAIN = "plain"


def variants() -> dict[str, dict[str, object]]:
    """The arguments of `attend` by name."""
    sinks = torch.randn(HEADS).requires_grad_()
    return {
        PLAIN: {},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": sinks},
        "both": {"softcap": 50.0, "sinks": sinks},
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "softcap.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_versions("torch", "locant", threads=options.threads)
    rows = []
    for spec in options.specs:
        scheme = locant.scheme(spec, n_heads=HEADS, head_dim=SIZE, d_model=HEADS * SIZE)
        for length in options.lengths:
            for what, train in (("forward", False), ("forward + backward", True)):
                shape = max(TOKENS // length, 1), HEADS, length, SIZE
                runs = {name: timed(fused_call(scheme, shape, train, **how)) for name, how in variants().items()}
                times = in_turn(runs, options.repeats)
                for name in list(runs)[1:]:
                    found = spread(ratios(times, name, PLAIN))
                    print(f"{spec:16} {length:6} {what:20} {name:8} {found}", flush=True)
                    rows.append({"spec": spec, "length": length, "what": what, "with": name, **found._asdict()})
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
