"""A language model with rotary positions, trained at 256 tokens, under another scheme: stories15M.

    python bench/stories.py stories15M.bin tokenizer.bin [--specs tisa alibi nope] [--budget 300steps] [--length 1024]

The model (llama2.c, Llama shape, 15 million weights) writes its own text: stories are sampled from it and kept in
--stories; one in twenty is kept to test on. Loss is that of the next token over windows of stories, each with its begin
token, at 256, 512 and 1,024 tokens; every length sees the same tokens. Written to bench/results/stories.csv and
stories.md (what each model writes).
"""

import argparse
import copy
import csv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import locant
from locant.adaptation.adapting import held_out
from locant.experiments.run import quiet
from locant.hf import llama2c

RESULTS = Path(__file__).parent / "results"
LENGTHS = (256, 512, 1024)
BEGIN = "Once upon a time, there was a little"


def sample(model: Any, tokenizer: Any, path: Path, count: int) -> list[str]:
    """Stories of the model itself, one per line; those that are there are not written again."""
    there = path.read_text().splitlines() if path.exists() else []
    torch.manual_seed(len(there))
    while len(there) < count:
        begin = torch.full((64, 1), tokenizer.bos_token_id)
        with torch.no_grad():
            rows = model.generate(begin, max_new_tokens=255, do_sample=True, pad_token_id=tokenizer.eos_token_id)
        for row in rows[:, 1:].tolist():
            ends = [row.index(end) for end in (tokenizer.bos_token_id, tokenizer.eos_token_id) if end in row]
            there.append(" ".join(tokenizer.decode(row[: min(ends, default=len(row))]).split()))
        path.write_text("\n".join(there) + "\n")
        print(f"{len(there)} stories", flush=True)
    return there


def windows(tokenizer: Any, stories: list[str]) -> torch.Tensor:
    """[n, 1024] stories one after the other, each with its begin token."""
    stream = [token for story in stories for token in tokenizer(story)["input_ids"]]
    longest = max(LENGTHS)
    return torch.tensor(stream[: len(stream) // longest * longest]).view(-1, longest)


@torch.no_grad()
def loss(model: Any, rows: torch.Tensor, length: int) -> float:
    total, count = 0.0, 0
    for row in rows.view(-1, length).split(4096 // length):
        logits = model(input_ids=row).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
        count += row[:, 1:].numel()
    return total / count


def tale(model: Any, tokenizer: Any, tokens: int = 220) -> str:
    torch.manual_seed(0)
    ids = tokenizer(BEGIN, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=tokens, do_sample=True, top_k=40, temperature=0.8, pad_token_id=2)
    return " ".join(tokenizer.decode(made[0], skip_special_tokens=True).split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--specs", nargs="*", default=["tisa", "alibi", "nope"])
    parser.add_argument("--budget", default="300steps")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--stories", type=Path, default=Path("stories.txt"))
    parser.add_argument("--count", type=int, default=768)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    original, tokenizer = llama2c.load(arguments.model, arguments.tokenizer)
    stories = sample(original, tokenizer, arguments.stories, arguments.count)
    rows = windows(tokenizer, held_out(stories))
    table = [{"model": "original", "steps": 0, **{f"loss at {n}": round(loss(original, rows, n), 4) for n in LENGTHS}}]
    tales = [f"**original (rope)** {tale(original, tokenizer)}"]
    print(table[0], flush=True)
    for spec in arguments.specs:
        model = copy.deepcopy(original)
        done = locant.adapt(
            model, spec, stories, budget=arguments.budget, tokenizer=tokenizer, length=arguments.length,
            look=lambda found, steps: print(f"  {found.step}/{steps} {found.agreement:.4f}", flush=True),
        )  # fmt: skip
        losses = {f"loss at {n}": round(loss(model, rows, n), 4) for n in LENGTHS}
        table.append({"model": spec, "steps": done.looks[-1].step if done.looks else 0, **losses})
        print(done, table[-1], sep="\n", flush=True)
        tales.append(f"**{spec}** {tale(model, tokenizer)}")
        with (arguments.results / "stories.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        (arguments.results / "stories.md").write_text("\n\n".join(tales) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
