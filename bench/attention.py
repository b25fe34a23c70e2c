"""Attention with a scheme against plain `scaled_dot_product_attention` on the same tensors.

    python bench/attention.py [SPEC …] [--lengths 512 2048] [--repeats 9]

fp32, H = 12, D = 64, 2 threads, impl="auto"; B · L = 4096. Each repeat runs plain attention and every scheme once, in
turn; printed are the median of the ratios to plain and their quartiles, forward and forward + backward. Written to
bench/results/attention.csv, with the picture beside it.
"""

import argparse
import csv
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import locant

HEADS, SIZE, TOKENS = 12, 64, 4096
SPECS = ["tisa", "t5", "alibi", "huang4:clip=511", "huang4:clip=64", "shaw:clip=64", "huang1:clip=64"]
RESULTS = Path(__file__).parent / "results"


def timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(specs: list[str], length: int, repeats: int) -> list[dict]:
    batch = max(TOKENS // length, 1)
    q, k, v = (torch.randn(batch, HEADS, length, SIZE) for _ in range(3))
    target = torch.randn(batch, HEADS, length, SIZE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    schemes = {spec: locant.scheme(spec, n_heads=HEADS, head_dim=SIZE, d_model=HEADS * SIZE) for spec in specs}
    rows = []
    for what in ("forward", "forward + backward"):

        def run(attend, what=what):
            if what == "forward":
                with torch.no_grad():
                    attend(q, k, v)
            else:
                attend(*leaves).backward(target)

        runs = {"plain": lambda run=run: run(F.scaled_dot_product_attention)}
        for spec, scheme in schemes.items():
            runs[spec] = lambda scheme=scheme, run=run: run(lambda q, k, v: locant.attend(q, k, v, scheme))
        for each in runs.values():  # warm
            each()
        times = [{name: timed(each) for name, each in runs.items()} for _ in range(repeats)]
        for spec in specs:
            ratios = sorted(one[spec] / one["plain"] for one in times)
            row = {
                "scheme": spec,
                "L": length,
                "B": batch,
                "what": what,
                "ratio": statistics.median(ratios),
                "q1": ratios[len(ratios) // 4],
                "q3": ratios[3 * len(ratios) // 4],
                "plain_ms": 1000 * statistics.median(one["plain"] for one in times),
            }
            rows.append(row)
            print(f"{spec:18} L={length:5} B={batch:2} {what:20} {row['ratio']:6.2f}  "
                  f"({row['q1']:.2f} … {row['q3']:.2f}; plain {row['plain_ms']:.0f} ms)", flush=True)  # fmt: skip
    return rows


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, what in zip(axes, ("forward", "forward + backward"), strict=True):
        for spec in dict.fromkeys(row["scheme"] for row in rows):
            line = [row for row in rows if row["scheme"] == spec and row["what"] == what]
            axis.plot([row["L"] for row in line], [row["ratio"] for row in line], marker="o", label=spec)
        axis.axhline(1, color="0.7", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(what, loc="left", fontsize=10)
        axis.set_xlabel("length")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time / time of plain attention")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, locant {locant.__version__}, {torch.get_num_threads()} threads, "
          f"{platform.processor() or platform.machine()}")  # fmt: skip
    rows = [row for length in options.lengths for row in measure(options.specs, length, options.repeats)]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if len(options.lengths) > 1:
        draw(rows, RESULTS / "attention.png")
    print(f"written: {RESULTS / 'attention.csv'}")


if __name__ == "__main__":
    main()
