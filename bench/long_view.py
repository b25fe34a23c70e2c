"""How well do a model and its adapted form find long documents?

    python bench/long_view.py ORIGINAL ADAPTED COLLECTION [--stsb STS-B] [--texts NAME=FILE …] [--name long-view]
        [--lengths 512 1024 2048 4096] [--hidden 256 1024 4096 --around TEXT]

ORIGINAL is the folder of a sentence encoder, ADAPTED what `locant adapt` or `locant.fit` made of it. COLLECTION has
documents and queries (docs/longer-view.md). Every way of reading gets the same 4,096 tokens of a document. Intervals
are a bootstrap over documents. With --lengths the documents are also cut at these. --hidden generates documents of
these lengths, with pass keys in filler and needles in the prose of TEXT. TEXTs give the mean cosine of the two
models' vectors, by kind of text and length. Written to bench/results/NAME.csv, with a picture by length in NAME.png;
a row that is there is not measured again.
"""

import csv
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measuring import RESULTS, command_line, write_csv

import locant
from locant.adaptation.hidden_facts import needles, passkeys
from locant.adaptation.retrieval import (
    LENGTH,
    Averaged,
    BestPiece,
    Collection,
    LatePieces,
    Reader,
    Way,
    Whole,
    evaluate_all,
    read_collection,
)
from locant.adaptation.scores import Stsb
from locant.experiments.run import quiet
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder
from locant.runs.text_source import read

FIELDS = ["model", "measure", "value", "low", "high", "accuracy", "seconds"]
LENGTHS = (64, 256, 512)
"""Tokens of the texts whose vectors are compared."""
TEXTS = 24
"""Texts of each kind and length."""


def vectors(reader: Reader, text: str, length: int) -> torch.Tensor:
    """Returns the vectors of TEXTS pieces of a text, evenly spaced."""
    ids = reader.tokenizer(text[:400_000], add_special_tokens=False, verbose=False)["input_ids"]
    starts = [(len(ids) - length) * number // TEXTS for number in range(TEXTS)]
    return reader.vectors([reader.pieces(ids[start : start + length], length)[0] for start in starts])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("original")
    parser.add_argument("adapted")
    parser.add_argument("collection", type=Path)
    parser.add_argument("--stsb")
    parser.add_argument("--texts", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--hidden", type=int, nargs="*", default=[], help="tokens of generated needles and pass keys")
    parser.add_argument("--around", type=Path, help="the text around the needles")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="where documents are cut, besides 4,096")
    parser.add_argument("--name", default="long-view")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    path = RESULTS / f"{arguments.name}.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.original)
    pooling = pooling_of(sentence_folder(arguments.original))
    readers = {
        name: Reader(locant.load(folder).base_model.eval(), tokenizer, pooling)
        for name, folder in (("original", arguments.original), ("adapted", arguments.adapted))
    }

    def there(model: str, measure: str) -> bool:
        return any((row["model"], row["measure"]) == (model, measure) for row in rows)

    def keep(model: str, measure: str, seconds: float, **numbers: float) -> None:
        row = {"model": model, "measure": measure, **numbers, "seconds": round(seconds)}
        print(row, flush=True)
        rows.append({field: row.get(field, "") for field in FIELDS})
        write_csv(path, rows)

    def add(model: str, measure: str, found: Callable[[], float]) -> None:
        """Adds a row, unless it is there; `found` returns its number."""
        if not there(model, measure):
            start = time.perf_counter()
            value = round(found(), 4)
            keep(model, measure, time.perf_counter() - start, value=value)

    def retrieval(model: str, what: str, collection: Collection, *ways: Way, length: int = LENGTH) -> None:
        """Adds a row for each way, unless it is there. Their seconds are those of all ways together."""
        cut = "" if length == LENGTH else f" cut at {length:,}"
        left = [way for way in ways if not there(model, f"{what}{cut}: {way}")]
        start = time.perf_counter()
        found = evaluate_all(replace(readers[model], length=length), collection, left) if left else []
        seconds = time.perf_counter() - start
        for each in found:
            numbers = {"value": each.ndcg, "low": each.low, "high": each.high, "accuracy": each.accuracy}
            percent = {name: round(100 * number, 2) for name, number in numbers.items()}
            keep(model, f"{what}{cut}: {each.way}", seconds, **percent)

    if arguments.stsb:
        score = Stsb(arguments.stsb, pooling)
        for name, reader in readers.items():
            with torch.no_grad():
                add(name, "STS-B dev", lambda reader=reader: score(reader.model, tokenizer))
    for each in arguments.texts:
        kind, _, file = each.partition("=")
        text = read(Path(file))
        for length in LENGTHS:

            def cosine(text: str = text, length: int = length) -> float:
                first, second = (vectors(reader, text, length) for reader in readers.values())
                return float(F.cosine_similarity(first, second).mean())

            add("adapted", f"cosine to the original, {kind}, {length} tokens", cosine)
    collection, what = read_collection(arguments.collection), arguments.collection.stem
    limit = readers["original"].limit
    retrieval("adapted", what, collection, Whole(LENGTH))
    retrieval("original", what, collection, Averaged(256), BestPiece(256), Whole(limit))
    retrieval("adapted", what, collection, Averaged(256), LatePieces(256))
    for length in arguments.lengths:
        retrieval("adapted", what, collection, Whole(length), length=length)
        retrieval("original", what, collection, Averaged(256), length=length)
    for length in arguments.hidden:
        for kind, made in generated(tokenizer, length, arguments.around):
            retrieval("adapted", kind, made, Whole(), length=length)
            retrieval("original", kind, made, Averaged(256), Whole(limit), length=length)
    draw(rows, path.with_suffix(".png"))


def generated(tokenizer: Any, length: int, around: Path | None) -> list[tuple[str, Collection]]:
    """Returns collections of documents with hidden facts; needles only with a text around them."""
    found = [("pass keys", passkeys(tokenizer, length))]
    if around is not None:
        found.append(("needles", needles(tokenizer, read(around)[:400_000], length)))
    return found


LINES = {
    ("adapted", "first", "whole"): "one pass",
    ("original", "averaged"): "original, pieces of 256, averaged",
    ("original", "first", "whole"): "original, first 512 tokens",
}
"""Words of a way of reading -> its line in the picture."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws nDCG@10 by the tokens that are read, for the collection and for generated documents."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        found = re.fullmatch(r"(.+?)(?: cut at ([\d,]+))?: (.+)", row["measure"])
        name = found and next((line for (model, *ways), line in LINES.items()
                               if model == row["model"] and any(way in found[3] for way in ways)), None)  # fmt: skip
        if found and name and "many vectors" not in found[3] and row["low"] != "":
            length = int((found[2] or str(LENGTH)).replace(",", ""))
            numbers = tuple(float(row[field]) for field in ("value", "low", "high"))
            curves.setdefault(found[1], {}).setdefault(name, []).append((length, *numbers))
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.6), squeeze=False)
    for axis, (kind, lines) in zip(axes[0], curves.items(), strict=True):
        for name in LINES.values():
            points = sorted(lines.get(name, []))
            if len(points) == 1:
                axis.axhline(points[0][1], label=name, color="grey", linestyle="--")
            elif points:
                lengths, values, low, high = zip(*points, strict=True)
                (line,) = axis.plot(lengths, values, "o-", label=name, markersize=4)
                axis.fill_between(lengths, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set(xscale="log", xlabel="tokens of a document", ylabel="nDCG@10", ylim=(0, None), title=kind)
        ticks = sorted({length for points in lines.values() for length, *_ in points})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"written: {path}", flush=True)


if __name__ == "__main__":
    main()
