"""A pretrained causal model adapted to other schemes: its loss at the length of the adaptation and at 4 × that length.

    python bench/causal.py FOLDER wiki.train.raw wiki.valid.raw --name smollm2 [--budget 10min] [--length 512]

FOLDER is a model of transformers with its tokenizer; the first text is learned from, the second is the test. `own` in a
scheme stands for the model's own: own/own/own/nope takes the positions out of every fourth layer. Written to
docs/results/causal/NAME.csv, a row for each state of each scheme: the loss of the next token in pieces of `length` and
of 4 · `length` tokens, the same tokens for both, each after the begin token. A model that exists in --keep is not made
again.
"""

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from measuring import command_line, print_versions, write_csv
from next_token import loss, pieces
from transformers import AutoModelForCausalLM, AutoTokenizer

import locant
from locant.adaptation.sample import pieces as lines_of
from locant.experiments.run import quiet

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "causal"
TIMES = 4
"""The longer test, in lengths of the adaptation."""


def own_scheme(model: Any) -> str:
    """Returns the model's own scheme; where its layers differ, a pattern over all of them."""
    return "/".join(str(scheme) for stack in locant.native(model).stacks for scheme in stack.layers)


def with_own(spec: str, own: str) -> str:
    """Puts the model's own scheme of each layer in place of `own`."""
    layers, pattern = own.split("/"), spec.split("/")
    if "own" not in pattern:
        return spec
    chosen = (pattern[at % len(pattern)] for at in range(len(layers)))
    return "/".join(mine if each == "own" else each for mine, each in zip(layers, chosen, strict=True))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--specs", nargs="*", default=["tisa", "own/own/own/nope"])
    parser.add_argument("--budget", default="10min")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8, help="test sequences of the longer length")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, default=Path("adapted-causal"), help="a folder for the adapted models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print_versions("torch", "transformers", threads=arguments.threads)
    quiet()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    lengths = (arguments.length, TIMES * arguments.length)
    ids = tokenizer(arguments.test.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    ids = torch.tensor(ids[: arguments.sequences * (max(lengths) - 1)])
    rows = {length: pieces(ids, length, lengths, tokenizer.bos_token_id) for length in lengths}
    lines = lines_of(arguments.text)
    scores = {f"loss at {length}": lambda model, _, part=part: loss(model, part) for length, part in rows.items()}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    own = own_scheme(model)
    table: list[dict[str, Any]] = []
    for spec in arguments.specs:
        where = arguments.keep / f"{arguments.name}-{spec}-{arguments.budget}".replace("/", "-").replace(":", "-")
        if not (where / "DONE").exists():
            locant.adapt(
                copy.deepcopy(model), with_own(spec, own), lines, budget=arguments.budget, tokenizer=tokenizer,
                length=arguments.length, out=where, scores=scores,
                on_stage=lambda stage: print(f"{time.strftime('%X')} {stage}", flush=True),
                on_evaluation=lambda found, steps: print(f"  {found.step}/{steps} {found.agreement:.4f}", flush=True),
            )  # fmt: skip
        done = json.loads((where / "adapt.json").read_text(encoding="utf-8"))
        for row in done["table"]:
            steps = done["steps"] if row["state"] == "adapted" else 0
            losses = {name: round(value, 4) for name, value in row["scores"].items()}
            agreement = round(row["agreement"], 4)
            table.append({"scheme": spec, "state": row["state"], "steps": steps, "agreement": agreement, **losses})
            print(table[-1], flush=True)
        write_csv(arguments.results / f"{arguments.name}.csv", table)


if __name__ == "__main__":
    main()
