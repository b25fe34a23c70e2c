"""Training with float32 products of oneDNN against those of MKL, which PyTorch takes by itself.

    python bench/products.py [--repeats 15] [--threads 1]

Only on processors where locant takes oneDNN (runs/float32_products.py). A GPT-2 of 4 layers of 192 with 16 × 128 tokens
and all-MiniLM-L6-v2 with 16 × 128 tokens: forward, and forward + backward + AdamW. Printed are the median of the ratios
in the same repeat and their quartiles, and the largest difference of the outputs by their size. Written to
bench/results/products.csv.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from measuring import RESULTS, command_line, in_turn, minilm, print_versions, ratios, spread, timed, write_csv

from locant.experiments.run import quiet
from locant.runs.float32_products import fast_products, takes_onednn

BATCH, LENGTH = 16, 128


def models() -> dict[str, Any]:
    """The models by name."""
    small = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=192, n_positions=LENGTH, vocab_size=2048,
                                    bos_token_id=0, eos_token_id=0)  # fmt: skip
    return {"GPT-2, 4 × 192": transformers.GPT2LMHeadModel(small),
            "MiniLM, 6 × 384": transformers.AutoModel.from_pretrained(minilm())}  # fmt: skip


def work(model: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, by name."""
    tokens = torch.randint(0, 2000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = model.eval()(input_ids=tokens)[0]
        return output

    def step() -> torch.Tensor:
        output: torch.Tensor = model.train()(input_ids=tokens)[0]
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return output

    return {"forward": forward, "training step": step}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if not takes_onednn():
        raise SystemExit("locant takes MKL on this machine, as PyTorch does: there is nothing to compare")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    quiet()
    print_versions("torch", "transformers", "locant", threads=options.threads)
    rows = []
    for name, model in models().items():
        for what, run in work(model).items():
            times = in_turn({"MKL": timed(run), "oneDNN": timed(fast_products()(run))}, options.repeats)
            found = spread(ratios(times, "oneDNN", "MKL"))
            print(f"{name:16} {what:14} {found}", flush=True)
            rows.append({"model": name, "what": what, **found._asdict(), "difference": difference(model)})
    write_csv(RESULTS / "products.csv", rows)


def difference(model: Any) -> float:
    """The largest difference of the two outputs over the largest number in them."""
    forward = work(model)["forward"]
    one, two = forward(), fast_products()(forward)()
    return float((one - two).abs().max() / one.abs().max())


if __name__ == "__main__":
    main()
