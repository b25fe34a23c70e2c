"""Peak memory of attention over long sequences: B = 1, H = 4, D = 64, fp32.

    python bench/memory.py

Each scheme has a process of its own. Printed is the peak memory of one call beyond that of its inputs. For comparison:
an [H, L, L] bias has 16 GB at 32,768 tokens, and method 4 as an [L, L, D] tensor has 64 GB at 16,384. Linux only.
Written to bench/results/memory.csv.
"""

from measuring import RESULTS, command_line, output_of, write_csv

RUNS = [
    ("tisa", 32768, "forward"),
    ("t5", 32768, "forward"),
    ("alibi", 32768, "forward"),
    ("huang4:clip=128", 16384, "forward + backward"),
    ("huang4:clip=16383", 16384, "forward + backward"),
    ("shaw:clip=64", 16384, "forward + backward"),
]

CODE = """
import torch, locant
from locant.analysis.speed import peak_memory
torch.set_num_threads(2)
train = {what!r} != "forward"
q, k, v = (torch.randn(1, 4, {length}, 64, requires_grad=train) for _ in range(3))
scheme = locant.scheme({spec!r}, n_heads=4, head_dim=64)
locant.attend(*(x[:, :, :64] for x in (q, k, v)), scheme)
torch.set_grad_enabled(train)
def run():
    out = locant.attend(q, k, v, scheme)
    if train:
        out.sum().backward()
print(peak_memory(run))
"""


def main() -> None:
    command_line(__doc__).parse_args()
    rows = []
    for spec, length, what in RUNS:
        megabytes = float(output_of(CODE.format(spec=spec, length=length, what=what)))
        rows.append({"spec": spec, "length": length, "what": what, "MB": round(megabytes)})
        print(f"{spec:20} L={length:6} {what:20} {megabytes:6.0f} MB", flush=True)
    write_csv(RESULTS / "memory.csv", rows)


if __name__ == "__main__":
    main()
