"""Memory of attention over long sequences: B = 1, H = 4, D = 64, fp32.

    python bench/memory.py

Each line is a process of its own, and by how much it grows, at most, over its inputs. An [H, L, L] bias would
be 16 GB at 32,768 tokens; method 4 as an [L, L, D] tensor, 64 GB at 16,384. Linux only; written to
bench/results/memory.csv.
"""

import csv
import subprocess
import sys
from pathlib import Path

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
    rows = []
    for spec, length, what in RUNS:
        code = CODE.format(spec=spec, length=length, what=what)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        megabytes = float(done.stdout)
        rows.append({"spec": spec, "length": length, "what": what, "MB": round(megabytes)})
        print(f"{spec:20} L={length:6} {what:20} {megabytes:6.0f} MB", flush=True)
    out = Path(__file__).parent / "results" / "memory.csv"
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
