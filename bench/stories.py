"""A language model with rotary positions, trained at 256 tokens, adapted to another scheme: stories15M.

    python bench/stories.py stories15M.bin tokenizer.bin [TEXT …] [--more BOOK …] [--budget 400steps]

The model (llama2.c, Llama shape, 15 million weights) writes the text it is adapted on: we sample stories from it and
keep them in --stories, one in twenty for the test. On these the original has the lowest loss that is possible. TEXTs,
such as stories for children written by people, are the other test. BOOKs, which must be other texts, are learned from
together with its own stories, so that the model keeps its quality on other prose. The loss is that of the next token in
pieces of --lengths tokens, each after the begin token. Written to bench/results/stories.csv and stories.md (a
story by each model), or under another --name. A model that exists is not made again.
"""

import copy
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, command_line, write_csv
from next_token import loss, pieces

import locant
from locant.adaptation.adapting import CAUSAL_LENGTH, held_out, trained_on
from locant.experiments.run import quiet
from locant.hf import llama2c
from locant.runs.text_source import read

LETTERS = 750
"""Characters of a piece of a book: about as many as a story has."""
WORDS = 256
"""Most likely tokens that the next one is drawn from (top-k) when the model writes its training text."""
BEGIN = "Once upon a time, there was a little"


def sample(model: Any, tokenizer: Any, path: Path, count: int) -> list[str]:
    """Returns stories by the model, one per line of a file; stories that the file has are kept."""
    there = path.read_text().splitlines() if path.exists() else []
    torch.manual_seed(len(there))
    while len(there) < count:
        begin = torch.full((64, 1), tokenizer.bos_token_id)
        with torch.no_grad():
            rows = model.generate(begin, max_new_tokens=255, do_sample=True, top_k=WORDS,
                                  pad_token_id=tokenizer.eos_token_id)  # fmt: skip
        for row in rows[:, 1:].tolist():
            ends = [row.index(end) for end in (tokenizer.bos_token_id, tokenizer.eos_token_id) if end in row]
            there.append(" ".join(tokenizer.decode(row[: min(ends, default=len(row))]).split()))
        path.write_text("\n".join(there) + "\n")
        print(f"{len(there)} stories", flush=True)
    return there[:count]


def tale(model: Any, tokenizer: Any, tokens: int = 220) -> str:
    torch.manual_seed(0)
    ids = tokenizer(BEGIN, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=tokens, do_sample=True, top_k=40, temperature=0.8, pad_token_id=2)
    return " ".join(tokenizer.decode(made[0], skip_special_tokens=True).split())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--more", type=Path, nargs="*", default=[])
    parser.add_argument("--specs", nargs="*", default=["tisa", "alibi", "nope"])
    parser.add_argument("--budget", default="400steps")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024], help="tokens of a test piece")
    parser.add_argument("--pieces", type=int, default=16, help="test pieces of the longest length, at most")
    parser.add_argument("--stories", type=Path, default=Path("stories.txt"))
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--name", default="stories", help="name of the files with the results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, default=Path("adapted-stories"), help="a folder for the adapted models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    original, tokenizer = llama2c.load(arguments.model, arguments.tokenizer)
    begin = tokenizer.bos_token_id
    stories = sample(original, tokenizer, arguments.stories, arguments.count)
    lines = [f"{tokenizer.bos_token}{story}" for story in stories]  # as the stories that the model was trained on
    for path in arguments.more:
        lines += textwrap.wrap(" ".join(read(path).split()), LETTERS)
    apart = [line for line in held_out(lines) if line.startswith(tokenizer.bos_token)]
    own = [token for line in apart for token in tokenizer(line, add_special_tokens=False)["input_ids"]]
    streams = {"own stories": own} | {
        path.stem: tokenizer(" ".join(read(path).split()), add_special_tokens=False, verbose=False)["input_ids"]
        for path in arguments.texts
    }
    lengths = tuple(arguments.lengths)
    tokens = arguments.pieces * (max(lengths) - 1)
    rows = {
        (name, length): pieces(torch.tensor(stream[-tokens:]), length, lengths, begin)
        for name, stream in streams.items()
        for length in lengths
    }
    table: list[dict[str, Any]] = []
    tales: list[str] = []

    def add(name: str, steps: int, state: str, model: Any) -> None:
        model.eval()
        losses = {f"{text}, {length}": round(loss(model, part), 4) for (text, length), part in rows.items()}
        table.append({"model": name, "steps": steps, "state": state, **losses})
        print(table[-1], flush=True)
        write_csv(arguments.results / f"{arguments.name}.csv", table)
        if state != "fitted":
            tales.append(f"**{name}** {tale(model, tokenizer)}")
            (arguments.results / f"{arguments.name}.md").write_text("\n\n".join(tales) + "\n", encoding="utf-8")

    add("rope", 0, "original", original)
    for spec in arguments.specs:
        model, where = copy.deepcopy(original), arguments.keep / re.sub("[:/]", "-", f"{spec}-{arguments.budget}")
        fitted = copy.deepcopy(original)
        locant.fit(fitted, spec, trained_on(lines), tokenizer=tokenizer, length=CAUSAL_LENGTH, queries=True)
        add(spec, 0, "fitted", fitted)
        if not (where / "DONE").exists():
            done = locant.adapt(
                model, spec, lines, budget=arguments.budget, tokenizer=tokenizer, length=arguments.length, out=where,
                on_evaluation=lambda found, steps: print(f"  {found.step}/{steps} {found.agreement:.4f}", flush=True),
            )  # fmt: skip
            print(done, flush=True)
        add(spec, json.loads((where / "adapt.json").read_text())["steps"], "adapted", locant.load(where))


if __name__ == "__main__":
    main()
