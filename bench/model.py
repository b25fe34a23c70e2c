"""A BERT-base of two layers, swapped to another scheme, against itself with plain absolute positions.

    python bench/model.py [SPEC …] [--repeats 9]

Forward and backward of `BertModel` (width 768, 12 heads, 2 threads, fp32, B · L = 4096), in turn with the model as it
was; printed are the median ratio of the times in one repeat and its quartiles. Memory is by how much a fresh process
grows, at most, in one step. Dropout is 0, as in the targets, or 0.1, as in BERT's own training: with dropout
PyTorch's attention leaves its fast kernel, ours does not. Written to bench/results/model.csv.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, BertModel

import locant

RESULTS = Path(__file__).parent / "results"
SPECS = ["huang4:clip=2047", "huang4:clip=64", "shaw:clip=64", "huang1:clip=64", "tisa"]
TOKENS = 4096


def model(spec: str | None, length: int, dropout: float) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, max_position_embeddings=length, attn_implementation="sdpa",
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    built = BertModel(config, add_pooling_layer=False).train()
    return built if spec is None else locant.swap(built, spec)


def step(built: BertModel, ids: torch.Tensor) -> None:
    built(input_ids=ids).last_hidden_state.square().mean().backward()
    built.zero_grad(set_to_none=True)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 30000, (max(1, TOKENS // length), length))


def memory(spec: str | None, length: int) -> float:
    """MB of one step in a process of its own."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); import model as bench, torch; torch.set_num_threads(2)\n"
        "from locant.analysis.speed import peak_memory\n"
        f"built = bench.model({spec!r}, {length}, 0.0); ids = bench.tokens({length})\n"
        "bench.step(built, ids[:1, :64])\n"  # what the first step builds once
        "print(peak_memory(lambda: bench.step(built, ids)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[1])  # fmt: skip
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--dropouts", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, locant {locant.__version__}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    rows = []
    for length in options.lengths:
        ids = tokens(length)
        base = memory(None, length)
        for dropout in options.dropouts:
            plain = model(None, length, dropout)
            models = {spec: model(spec, length, dropout) for spec in options.specs}
            everything = {"plain": plain, **models}
            for each in everything.values():
                step(each, ids)
            times = []
            for _ in range(options.repeats):
                one = {}
                for name, each in everything.items():
                    start = time.perf_counter()
                    step(each, ids)
                    one[name] = time.perf_counter() - start
                times.append(one)
            for spec in options.specs:
                ratios = sorted(one[spec] / one["plain"] for one in times)
                row = {
                    "spec": spec, "length": length, "batch": ids.shape[0], "dropout": dropout,
                    "ratio": statistics.median(ratios), "low": ratios[len(ratios) // 4],
                    "high": ratios[3 * len(ratios) // 4],
                    "plain_ms": 1000 * statistics.median(one["plain"] for one in times),
                    "memory": memory(spec, length) / base if not dropout else float("nan"),
                }  # fmt: skip
                rows.append(row)
                print(f"{spec:18} L={length:5} dropout {dropout:3} {row['ratio']:5.2f} "
                      f"({row['low']:.2f} … {row['high']:.2f}; plain {row['plain_ms']:.0f} ms)  "
                      f"memory {row['memory']:.2f} × {base:.0f} MB", flush=True)  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "model.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {RESULTS / 'model.csv'}")


if __name__ == "__main__":
    main()
