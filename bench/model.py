"""A BERT-base of two layers, swapped to another scheme, against itself with plain absolute positions.

    python bench/model.py [SPEC …] [--repeats 9]

Forward and backward of `BertModel` (width 768, 12 heads, 2 threads, fp32, B · L = 4096), in turn with the original
model; printed are the median ratio of the times in one repeat and its quartiles. Memory is the growth of a fresh
process at its peak during one step. Dropout is 0, as in the targets, or 0.1, as in BERT's own training: with dropout
PyTorch's attention leaves its fast kernel, and ours does not. Written to bench/results/model.csv.
"""

from functools import partial

import torch
from measuring import RESULTS, command_line, in_turn, output_of, print_versions, ratios, spread, timed, write_csv
from transformers import BertConfig, BertModel

import locant

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
    """Returns the peak growth in MB of a fresh process in one step."""
    code = (
        "import model as bench, torch; torch.set_num_threads(2)\n"
        "from locant.analysis.speed import peak_memory\n"
        f"built = bench.model({spec!r}, {length}, 0.0); ids = bench.tokens({length})\n"
        "bench.step(built, ids[:1, :64])\n"  # what the first step builds once
        "print(peak_memory(lambda: bench.step(built, ids)))"
    )
    return float(output_of(code).split()[-1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--dropouts", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print_versions("torch", "transformers", "locant", threads=torch.get_num_threads())
    rows = []
    for length in options.lengths:
        ids = tokens(length)
        base = memory(None, length)
        for dropout in options.dropouts:
            models = {"plain": model(None, length, dropout)}
            models |= {spec: model(spec, length, dropout) for spec in options.specs}
            steps = {name: timed(partial(step, each, ids)) for name, each in models.items()}
            times = in_turn(steps, options.repeats)
            for spec in options.specs:
                found = spread(ratios(times, spec, "plain"))
                row = {
                    "spec": spec, "length": length, "batch": ids.shape[0], "dropout": dropout,
                    "ratio": found.median, "low": found.q1, "high": found.q3,
                    "plain_ms": 1000 * spread(times["plain"]).median,
                    "memory": memory(spec, length) / base if not dropout else float("nan"),
                }  # fmt: skip
                rows.append(row)
                print(f"{spec:18} L={length:5} dropout {dropout:3} {row['ratio']:5.2f} "
                      f"({row['low']:.2f} … {row['high']:.2f}; plain {row['plain_ms']:.0f} ms)  "
                      f"memory {row['memory']:.2f} × {base:.0f} MB", flush=True)  # fmt: skip
    write_csv(RESULTS / "model.csv", rows)


if __name__ == "__main__":
    main()
