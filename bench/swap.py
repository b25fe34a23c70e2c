"""What swap costs: loading, and running a model whose scheme does nothing.

    python bench/swap.py [MODEL]

1. A model swapped to `nope` against the same model on plain SDPA with its position table set to zero: forward and
   forward + backward, alternating in one run, median of the ratios and their spread. Target: ≤ 1.03.
2. `locant.load` of a saved swapped model against `from_pretrained` of the original, alternating: the ratio of times.
   Target beyond the scheme's own parameters: ≤ 1.01. `alibi` has none; `tisa` has three tensors in each layer.

Without MODEL a BERT of MiniLM's shape (6 layers, width 384, 12 heads) with random weights is used.
"""

import copy
import csv
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, BertConfig, BertModel

import locant
import locant.hf

REPEATS = 40


def timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(name: str, ours, theirs, repeats: int, rows: list) -> None:
    for run in (ours, theirs):  # warm
        run()
        run()
    pairs = []
    for repeat in range(repeats):  # which one goes first alternates, so that drift hits both
        first, second = (ours, theirs) if repeat % 2 else (theirs, ours)
        a, b = timed(first), timed(second)
        pairs.append((a, b) if repeat % 2 else (b, a))
    ratios = sorted(a / b for a, b in pairs)
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[3 * len(ratios) // 4]
    best = min(a for a, _ in pairs) / min(b for _, b in pairs)
    milliseconds = 1000 * statistics.median(b for _, b in pairs)
    print(
        f"{name:44} {middle:6.3f}  (quartiles {low:.3f} … {high:.3f}, of the minima {best:.3f}; {milliseconds:.1f} ms)"
    )
    rows.append({"what": name, "ratio": middle, "q1": low, "q3": high, "minima": best, "baseline_ms": milliseconds})


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, locant {locant.__version__}, "
          f"{torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")  # fmt: skip
    if len(sys.argv) > 1:
        model = AutoModel.from_pretrained(sys.argv[1])
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
    path = Path(__file__).parent / "results" / "swap.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
