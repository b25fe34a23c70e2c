"""How far does position carry relevance? stories15M at 256 tokens and past it, original and fitted to TISA.

    python bench/attribution_reach.py stories15M.bin tokenizer.bin TEXT [--pieces 12]

The model (llama2.c, rotary positions) was trained at 256 tokens. TEXT is a book. Its pieces of 128, 256, 512 and 1,024
tokens end at the same places; the logit of the true next token is explained. For each state of the model and length:

    share       of position, mean over pieces with its standard error
    median, 90  half and nine tenths of the relevance through position in attention, Σ |P_ij|, lie within this many
                tokens of the query
    within 16 … the share of the relevance of tokens, Σ |R_t|, in the last 16, 64 and 256 tokens of the text
    loss        of the explained tokens

Written to docs/results/attribution/reach.csv, and relevance by offset to reach-by-offset.csv.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from measuring import command_line, write_csv

import locant
from locant.analysis.attribution import Attribution, attribute
from locant.hf import llama2c
from locant.hf.swapping import native_as_schemes
from locant.runs.text_source import read

OUT = Path(__file__).parent.parent / "docs" / "results" / "attribution"
LENGTHS = (128, 256, 512, 1024)
LAST = (16, 64, 256)
OFFSETS = 64
"""Offsets of which reach-by-offset.csv has a row each."""


def distance_of(found: Attribution, share: float) -> int:
    """The distance within which a share of the relevance through position in attention lies."""
    offsets, _, position = found.by_offset()
    by_distance = torch.zeros(int(offsets.abs().max()) + 1, dtype=torch.float64)
    by_distance.index_add_(0, offsets.abs(), position)
    return int((by_distance.cumsum(0) < share * by_distance.sum()).sum())


def row_of(state: str, length: int, found: list[Attribution], losses: list[float]) -> dict[str, Any]:
    shares = torch.tensor([each.share for each in found])
    row: dict[str, Any] = {"model": state, "tokens": length, "pieces": len(found)}
    row |= {"share": float(shares.mean()), "error": float(shares.std() / len(shares) ** 0.5)}
    for name, share in (("median", 0.5), ("90", 0.9)):
        row[name] = float(torch.tensor([float(distance_of(each, share)) for each in found]).mean())
    for last in LAST:
        parts = [float(each.relevance[-last:].abs().sum() / each.relevance.abs().sum()) for each in found]
        row[f"within {last}"] = sum(parts) / len(parts)
    row["loss"] = sum(losses) / len(losses)
    return {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("--spec", default="tisa:kernels=5")
    parser.add_argument("--results", type=Path, default=OUT)
    arguments = parser.parse_args()
    original, tokenizer = llama2c.load(arguments.model, arguments.tokenizer)
    text = read(arguments.text)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    half = len(ids) // 2  # fitted on the first half, explained on the second
    ends = torch.linspace(half + max(LENGTHS), len(ids) - 2, arguments.pieces).long().tolist()
    rows, by_offset = [], []
    for state in ("original", f"fitted to {arguments.spec}"):
        model = original
        if state != "original":
            model = copy.deepcopy(original)
            locant.fit(model, arguments.spec, tokenizer.decode(ids[:half]), tokenizer=tokenizer)
        with native_as_schemes(model):
            for length in LENGTHS:
                found, losses = [], []
                for end in ends:
                    piece = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids[end - length + 1 : end]])[None]
                    following = int(ids[end])
                    with torch.no_grad():
                        losses.append(float(-model(piece).logits[0, -1].log_softmax(-1)[following]))
                    found.append(attribute(model, piece, output=following))
                rows.append(row_of(state, length, found, losses))
                print(rows[-1], flush=True)
                for r in range(OFFSETS):
                    parts = []
                    for each in found:
                        offsets, gross, position = each.by_offset()
                        at = offsets == -r
                        parts.append((float(gross[at].sum() / gross.sum()), float(position[at].sum() / position.sum())))
                    mean = [sum(x) / len(x) for x in zip(*parts, strict=True)]
                    by_offset.append({"model": state, "tokens": length, "offset": -r, "relevance": round(mean[0], 5),
                                      "through position": round(mean[1], 5)})  # fmt: skip
                write_csv(arguments.results / "reach.csv", rows)
                write_csv(arguments.results / "reach-by-offset.csv", by_offset)


if __name__ == "__main__":
    main()
