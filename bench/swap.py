"""The cost of swap: loading, and running a model whose scheme does nothing.

    python bench/swap.py [MODEL]

1. A model swapped to `nope` against the same model on plain SDPA with its position table set to zero: forward and
   forward + backward, in turn; median of the ratios and quartiles. Target: ≤ 1.03.
2. `locant.load` of a saved swapped model against `from_pretrained` of the original, in turn: the ratio of times.
   Target beyond the scheme's own parameters: ≤ 1.01. `alibi` has none; `tisa` has three tensors in each layer.

Without MODEL the benchmark makes a BERT of MiniLM's shape (6 layers, width 384, 12 heads) with random weights. Written
to bench/results/swap.csv.
"""

import copy
import tempfile
from collections.abc import Callable

import torch
import transformers
from measuring import RESULTS, command_line, in_turn, print_versions, ratios, spread, timed, write_csv
from transformers import AutoModel, BertConfig, BertModel

import locant
import locant.hf

REPEATS = 40


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], repeats: int, rows: list[dict]
) -> None:
    """Measures the ratio of two times, prints it and adds its row of the csv file."""
    times = in_turn({"ours": timed(ours), "theirs": timed(theirs)}, repeats, warm_up=2)
    found = spread(ratios(times, "ours", "theirs"))
    best, milliseconds = min(times["ours"]) / min(times["theirs"]), 1000 * spread(times["theirs"]).median
    print(f"{name:44} {found}, of the minima {best:.3f}; {milliseconds:.1f} ms", flush=True)
    rows.append(
        {"what": name, "ratio": found.median, "q1": found.q1, "q3": found.q3, "minima": best,
         "baseline_ms": milliseconds}
    )  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", nargs="?")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    print_versions("torch", "transformers", "locant", threads=torch.get_num_threads())
    if arguments.model is not None:
        model = AutoModel.from_pretrained(arguments.model)
    else:
        model = BertModel(
            BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        )
    model.eval()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        plain.embeddings.position_embeddings.weight.zero_()
    swapped = locant.swap(copy.deepcopy(model), "nope")
    rows: list[dict] = []
    for batch, length in ((8, 128), (2, 512)):
        ids = torch.randint(1000, 20_000, (batch, length))
        for padded in (False, True):
            mask = torch.ones_like(ids)
            if padded:
                mask[0, length // 2 :] = 0
            with torch.no_grad():
                a, b = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (swapped, plain))
            torch.testing.assert_close(a[mask.bool()], b[mask.bool()])

            def forward(m, ids=ids, mask=mask):
                with torch.no_grad():
                    m(input_ids=ids, attention_mask=mask)

            name = f"nope, B={batch} L={length}{' padded' if padded else ''}"
            compare(f"{name}, forward", lambda: forward(swapped), lambda: forward(plain), REPEATS, rows)

        def both(m, ids=ids):
            m(input_ids=ids).last_hidden_state.sum().backward()
            m.zero_grad()

        compare(f"nope, B={batch} L={length}, forward + backward", lambda: both(swapped), lambda: both(plain), 16, rows)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/plain")
        for spec in ("alibi", "tisa:kernels=5"):
            locant.swap(model, spec).save_pretrained(f"{folder}/{spec}")
            compare(
                f"load, {spec}",
                lambda spec=spec: locant.load(f"{folder}/{spec}"),
                lambda: AutoModel.from_pretrained(f"{folder}/plain"),
                3 * REPEATS,
                rows,
            )
    write_csv(RESULTS / "swap.csv", rows)


if __name__ == "__main__":
    main()
