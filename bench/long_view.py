"""How well do a model and its adapted form find long documents?

    python bench/long_view.py ORIGINAL ADAPTED COLLECTION [--stsb STS-B] [--texts NAME=FILE …] [--name long-view]

ORIGINAL is the folder of a sentence encoder, ADAPTED what `locant adapt` or `locant.fit` made of it. COLLECTION has
documents and queries (docs/adapt.md). Every way of reading gets the same 4,096 tokens of a document; intervals are a
bootstrap over documents. TEXTs give the mean cosine of the two models' vectors, by kind of text and length. Written to
bench/results/NAME.csv; a row that is there is not measured again.
"""

import csv
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measuring import RESULTS, command_line, write_csv

import locant
from locant.adaptation.hidden_facts import needles, passkeys
from locant.adaptation.retrieval import Averaged, BestPiece, LatePieces, Reader, Way, Whole, evaluate, read_collection
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
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096], help="tokens that are read at once")
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

    def add(model: str, measure: str, found: Any) -> None:
        """Adds a row, unless it is there; `found` returns its numbers."""
        if any((row["model"], row["measure"]) == (model, measure) for row in rows):
            return
        start = time.perf_counter()
        row = {"model": model, "measure": measure, **found(), "seconds": round(time.perf_counter() - start)}
        print(row, flush=True)
        rows.append({field: row.get(field, "") for field in FIELDS})
        write_csv(path, rows)

    def retrieval(model: str, what: str, collection: Any, way: Way) -> None:
        def found() -> dict[str, Any]:
            reading = evaluate(readers[model], collection, way)
            names = ("value", "low", "high", "accuracy")
            numbers = (reading.ndcg, reading.low, reading.high, reading.accuracy)
            return {name: round(100 * number, 2) for name, number in zip(names, numbers, strict=True)}

        add(model, f"{what}: {way}", found)

    if arguments.stsb:
        score = Stsb(arguments.stsb, pooling)
        for name, reader in readers.items():
            with torch.no_grad():
                add(name, "STS-B dev", lambda reader=reader: {"value": round(score(reader.model, tokenizer), 4)})
    for each in arguments.texts:
        kind, _, file = each.partition("=")
        text = read(Path(file))
        for length in LENGTHS:

            def cosine(text: str = text, length: int = length) -> dict[str, Any]:
                first, second = (vectors(reader, text, length) for reader in readers.values())
                return {"value": round(float(F.cosine_similarity(first, second).mean()), 4)}

            add("adapted", f"cosine to the original, {kind}, {length} tokens", cosine)
    collection, what = read_collection(arguments.collection), arguments.collection.stem
    for length in arguments.lengths:
        retrieval("adapted", what, collection, Whole(length))
    retrieval("adapted", what, collection, Averaged(256))
    retrieval("original", what, collection, Averaged(256))
    retrieval("original", what, collection, Whole(readers["original"].limit))
    retrieval("original", what, collection, BestPiece(256))
    retrieval("adapted", what, collection, LatePieces(256))
    for length in arguments.hidden:
        for make in (passkeys, needles):
            made, name = make(tokenizer, length), f"{make.__name__} in {length} tokens"
            for model in readers:
                readers[model] = Reader(readers[model].model, tokenizer, pooling, length)
            retrieval("adapted", name, made, Whole())
            retrieval("original", name, made, Whole())


if __name__ == "__main__":
    main()
