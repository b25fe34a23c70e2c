"""Does `locant.sharpen` find long documents better, and on which texts?

    python bench/sharpen.py MODEL COLLECTION --books GUTENBERG --squad SQUAD --stsb STS-B [--one-pass FOLDER …]

MODEL is a sentence encoder, and every FOLDER a changed one that reads 4,096 tokens at once. COLLECTION has documents
and queries (docs/longer-view.md). Two more collections are made: parts of the books in the corpus gutenberg of NLTK,
which spans removed from them must find, and the articles of SQuAD dev, which 1,000 of its questions must find. The map
is made of the documents themselves, of the other half of them, of some of them (the queries of the others are
measured), or of the other collections. Gains are over the same vectors without the map; intervals are a bootstrap over
documents. Written to bench/results/sharpen.csv, with a picture by number of documents in sharpen.png. A model
whose rows are all there is not measured again.
"""

import csv
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import RESULTS, command_line, write_csv
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from torch import Tensor

import locant  # noqa: F401  (opens swapped folders)
from locant.adaptation.retrieval import (
    LENGTH,
    Averaged,
    BestPiece,
    LatePieces,
    Reader,
    Reading,
    Vectors,
    Way,
    Whole,
    interval,
    read_all,
    read_collection,
)
from locant.adaptation.running_text import RunningText
from locant.adaptation.sharpening import PIECE, SHRINK, reader_of, sharpening
from locant.experiments.run import quiet
from locant.runs.glue_files import read_dev
from locant.runs.text_source import read

FIELDS = ["collection", "model", "way", "map", "documents", "shrink", "ndcg", "low", "high", "gain", "gain_low",
          "gain_high", "stsb"]  # fmt: skip
SHRINKS = (0.1, 0.3, 0.7, 0.9)
"""Reported beside SHRINK, which was chosen before."""
COUNTS = (2, 5, 10, 20, 50, 100)
"""Documents that the map is made of."""
DRAWS = 5
"""Draws of that many documents."""
PARTS, QUESTIONS = 121, 1000
PIECES = Averaged(PIECE).reads
ROWS = 27 + 4 + len(COUNTS) * DRAWS
"""Rows of an encoder as it is."""
Map = Callable[[Tensor], Tensor]
Add = Callable[..., None]
Similarity = Callable[[Tensor | None], float]


def of_books(reader: Reader, folder: Path) -> Vectors:
    """Returns parts of books, evenly spaced over all of them, and the spans that were removed from each."""
    lines = [" ".join(part.split()) for path in sorted(folder.glob("*.txt"))
             for part in re.split(r"\n\s*\n", path.read_text("latin-1")) if part.strip()]  # fmt: skip
    found = RunningText(reader.tokenizer, lines, LENGTH).partition(random.Random(0))
    parts = [found[at * len(found) // PARTS] for at in range(PARTS)]
    documents = tuple({PIECES: reader.vectors(reader.pieces(part.tokens[1:-1], PIECE))} for part in parts)
    wanted = tuple(number for number, part in enumerate(parts) for _ in part.queries)
    return Vectors(reader.vectors([query for part in parts for query in part.queries]), documents, wanted)


def of_squad(reader: Reader, folder: Path) -> Vectors:
    """Returns the articles of SQuAD dev and some of the questions on each."""
    articles = json.loads(read(next(folder.glob("dev-v1.1.json*"))))["data"]
    texts = ["\n".join(paragraph["context"] for paragraph in article["paragraphs"]) for article in articles]
    asked = [(question["question"], number) for number, article in enumerate(articles)
             for paragraph in article["paragraphs"] for question in paragraph["qas"]]  # fmt: skip
    asked = [asked[at * len(asked) // QUESTIONS] for at in range(QUESTIONS)]
    documents = tuple({PIECES: reader.vectors(reader.pieces(reader.tokens(text), PIECE))} for text in texts)
    queries = reader.vectors([reader.pieces(reader.tokens(text), reader.limit)[0] for text, _ in asked])
    return Vectors(queries, documents, tuple(number for _, number in asked))


def mapped(matrix: Tensor) -> Map:
    """Returns the map of a matrix."""
    return lambda vectors: F.normalize(vectors @ matrix.to(vectors), dim=-1)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("collection", type=Path)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--stsb", required=True)
    parser.add_argument("--one-pass", nargs="*", default=[])
    parser.add_argument("--name", default="sharpen")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    path, name = RESULTS / f"{arguments.name}.csv", arguments.collection.stem.removesuffix(".jsonl")
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    counts = Counter(row["model"] for row in rows)
    rows = [row for row in rows if counts[row["model"]] == (ROWS if row["model"] == Path(arguments.model).name else 4)]
    there = {row["model"] for row in rows}
    encoder = SentenceTransformer(arguments.model, device="cpu").eval()
    reader, similarity = reader_of(encoder), stsb_of(reader_of(encoder), arguments.stsb)

    def add(found: Reading, before: Reading, owners: Tensor, **words: Any) -> None:
        gain = torch.tensor(found.each, dtype=torch.float64) - torch.tensor(before.each, dtype=torch.float64)
        low, high = interval(gain, owners)
        numbers = {"ndcg": found.ndcg, "low": found.low, "high": found.high, "gain": float(gain.mean()),
                   "gain_low": low, "gain_high": high}  # fmt: skip
        row = {**words, **{key: round(100 * number, 2) for key, number in numbers.items()}}
        rows.append({field: row.get(field, "") for field in FIELDS})
        print(rows[-1], flush=True)
        write_csv(path, rows)

    def compare(vectors: Vectors, way: Way, matrix: Tensor | None, **words: Any) -> None:
        """Adds a row: a way of reading with a map, or without one if there is no matrix."""
        before = vectors.score(way)
        found = before if matrix is None else vectors.score(way, mapped(matrix))
        add(found, before, torch.tensor(vectors.wanted), way=str(way), **words)

    base, collection = Path(arguments.model).name, read_collection(arguments.collection)
    if base in there:
        read_again = read_all(reader, collection, [Averaged(PIECE)])
        matrix = sharpening([document[PIECES] for document in read_again.documents])
    else:
        ways: list[Way] = [Averaged(PIECE), BestPiece(PIECE), Whole(reader.limit)]
        collections = {
            name: read_all(reader, collection, ways),
            "books": of_books(reader, arguments.books),
            "SQuAD": of_squad(reader, arguments.squad),
        }
        matrix = of_encoder(collections, ways, base, add, compare, similarity)
    for folder in arguments.one_pass:
        if Path(folder).name in there:
            continue
        long = reader_of(SentenceTransformer(folder, device="cpu").eval())
        vectors = read_all(long, collection, [Whole(), LatePieces(PIECE)])
        for way in (Whole(), LatePieces(PIECE)):
            words = {"collection": name, "model": Path(folder).name}
            compare(vectors, way, None, **words, map="none", documents="", shrink=1)
            compare(vectors, way, matrix, **words, map="its documents", documents=len(collection.documents),
                    shrink=SHRINK)  # fmt: skip
    draw(rows, name, path.with_suffix(".png"))


def of_encoder(
    collections: dict[str, Vectors], ways: list[Way], base: str, add: Add, compare: Add, similarity: Similarity
) -> Tensor:
    """Adds all rows of an encoder as it is; returns the map of the first collection."""
    pieces = {each: [document[PIECES] for document in vectors.documents] for each, vectors in collections.items()}
    matrices = {each: sharpening(parts) for each, parts in pieces.items()}
    for each, vectors in collections.items():
        words = {"collection": each, "model": base}
        compare(vectors, ways[0], None, **words, map="none", documents="", shrink=1, stsb=round(similarity(None), 4))
        for other, matrix in matrices.items():
            source = "its documents" if other == each else other
            compare(vectors, ways[0], matrix, **words, map=source, documents=len(pieces[other]), shrink=SHRINK,
                    stsb=round(similarity(matrix), 4))  # fmt: skip
        halves = [sharpening(pieces[each][1::2]), sharpening(pieces[each][::2])]
        before, owners = vectors.score(ways[0]), torch.tensor(vectors.wanted)
        crossed = [vectors.score(ways[0], mapped(half)) for half in halves]
        scores = tuple(crossed[number % 2].each[at] for at, number in enumerate(vectors.wanted))
        mean = torch.tensor(scores, dtype=torch.float64)
        low, high = interval(mean, owners)
        add(Reading("", float(mean.mean()), low, high, 0.0, scores), before, owners, **words, way=str(ways[0]),
            map="the other half", documents=len(pieces[each]) // 2, shrink=SHRINK)  # fmt: skip
        for shrink in SHRINKS:
            matrix = sharpening(pieces[each], shrink)
            compare(vectors, ways[0], matrix, **words, map="its documents", documents=len(pieces[each]), shrink=shrink,
                    stsb=round(similarity(matrix), 4))  # fmt: skip
    name = next(iter(collections))
    for way in ways[1:]:
        for map in (None, matrices[name]):
            compare(collections[name], way, map, collection=name, model=base, map="none" if map is None else
                    "its documents", documents=len(pieces[name]), shrink=1 if map is None else SHRINK)  # fmt: skip
    of_some(collections[name], pieces[name], ways[0], partial(add, collection=name, model=base), similarity)
    return matrices[name]


def of_some(vectors: Vectors, pieces: list[Tensor], way: Way, add: Add, similarity: Similarity) -> None:
    """Adds rows for maps of some documents; the queries of all other documents are measured."""
    owners, rng, before = torch.tensor(vectors.wanted), random.Random(0), vectors.score(way)
    for count in COUNTS:
        for _ in range(DRAWS):
            chosen = rng.sample(range(len(pieces)), count)
            matrix = sharpening([pieces[number] for number in chosen])
            left = ~torch.isin(owners, torch.tensor(chosen))
            found = vectors.score(way, mapped(matrix))
            add(some(found, left, owners), some(before, left, owners), owners[left], way=str(way),
                map="other documents", documents=count, shrink=SHRINK, stsb=round(similarity(matrix), 4))  # fmt: skip


def some(found: Reading, left: Tensor, owners: Tensor) -> Reading:
    """Returns a reading of some of the queries."""
    each = torch.tensor(found.each, dtype=torch.float64)[left]
    low, high = interval(each, owners[left])
    return Reading(found.way, float(each.mean()), low, high, 0.0, tuple(each.tolist()))


def stsb_of(reader: Reader, folder: str) -> Similarity:
    """Returns a function from a map to the Spearman correlation on STS-B dev. Its sentences are read once."""
    part = read_dev("STS-B", folder)
    first, second = (reader.vectors([reader.pieces(reader.tokens(text), reader.limit)[0] for text in column])
                     for column in part.texts)  # fmt: skip

    def score(matrix: Tensor | None) -> float:
        map = mapped(torch.eye(first.shape[1]) if matrix is None else matrix)
        return float(spearmanr((map(first) * map(second)).sum(-1), part.labels).statistic)

    return score


def draw(rows: list[dict[str, Any]], name: str, path: Path) -> None:
    """Draws the gain and STS-B by the number of documents that the map is made of."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if row["map"] == "other documents"]
    plain = next(row for row in rows if row["map"] == "none")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, key, words, line in ((axes[0], "gain", "gain of nDCG@10 × 100", 0.0),
                                   (axes[1], "stsb", "STS-B dev", float(plain["stsb"]))):  # fmt: skip
        counts = sorted({int(row["documents"]) for row in chosen})
        means = [sum(float(row[key]) for row in chosen if int(row["documents"]) == count) / DRAWS for count in counts]
        axis.plot(
            [int(row["documents"]) for row in chosen], [float(row[key]) for row in chosen], "o", color="C0", alpha=0.35
        )
        axis.plot(counts, means, "-", color="C0", label="mean of five draws")
        axis.axhline(line, color="grey", linestyle="--", label="without the map")
        axis.set(xscale="log", xlabel="documents that the map is made of", ylabel=words)
        axis.set_xticks(counts, [str(count) for count in counts], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(frameon=False, fontsize=8)
    axes[0].set_title(f"{name}: queries of the other documents", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"written: {path}", flush=True)


if __name__ == "__main__":
    main()
