"""How far the intervals of one training agree with the differences between seeds.

    locant compare clm --schemes tisa:kernels=5 --data TEXT --seeds 5 --budget 300steps -o FOLDER
    python bench/certainty_seeds.py FOLDER TEXT [--out FILE]

FOLDER is a comparison with several seeds, and TEXT a file that it was not trained on. For each layer, the standard
deviation over seeds of the mean curve over heads stands beside the posterior one of each seed, by the likelihood
"tokens", both as root mean squares over the offsets, weighted by pairs of tokens. The posterior is scaled to the tokens
of training. Heads are not compared one by one: they have no common order.
"""

import math
from pathlib import Path

import torch
from measuring import RESULTS, command_line, write_csv
from transformers import AutoTokenizer

import locant
from locant.analysis.certainty import Band, certainty
from locant.experiments.comparison import open_folder
from locant.experiments.results import outcomes, where
from locant.experiments.run import quiet
from locant.runs import text_source


def root_mean_square(values: list[float], weight: tuple[float, ...]) -> float:
    return math.sqrt(sum(w * x * x for w, x in zip(weight, values, strict=True)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "certainty-seeds.csv")
    arguments = parser.parse_args()
    quiet()
    comparison = open_folder(arguments.folder)
    text, preset = text_source.read(arguments.text), comparison.work.preset
    learned_from = comparison.work.steps * preset.batch * preset.length
    rows = []
    for scheme in comparison.schemes:
        averages: dict[str, list[Band]] = {}
        noise: dict[str, list[float]] = {}
        for run in outcomes(arguments.folder, comparison):
            if run.run.scheme != scheme or run.state != "done":
                continue
            here = where(arguments.folder, run.run)
            model, tokenizer = locant.load(str(here)), AutoTokenizer.from_pretrained(here)
            found = certainty(model, text, tokenizer=tokenizer, length=min(64, preset.length),
                              learned_from=learned_from)  # fmt: skip
            print(found, flush=True)
            for band in found.averages:
                averages.setdefault(band.place, []).append(band)
            for place in found.places:
                noise.setdefault(place.place, []).append(place.noise or math.nan)
        for place, bands in averages.items():
            curves = torch.tensor([band.value for band in bands])
            seeds = root_mean_square(curves.std(0).tolist(), bands[0].weight)
            laplace = [root_mean_square(list(band.sd), band.weight) for band in bands]
            size = root_mean_square(curves.mean(0).tolist(), bands[0].weight)
            rows.append(
                {"scheme": scheme, "place": place, "seeds": len(bands), "curve": f"{size:.4g}",
                 "sd_over_seeds": f"{seeds:.4g}", "posterior_sd": f"{sum(laplace) / len(laplace):.4g}",
                 "ratio": f"{seeds / (sum(laplace) / len(laplace)):.3g}",
                 "noise": f"{sum(noise[place]) / len(noise[place]):.3g}", "learned_from": learned_from}
            )  # fmt: skip
            print(rows[-1], flush=True)
    write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
