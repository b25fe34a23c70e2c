"""DeBERTa with its own positions, by locant against transformers.

    python bench/deberta.py [--repeats 10]

A DeBERTa-v2 of base shape (width 768, 12 heads, 256 buckets) with 2 layers and random weights, in fp32 with 2 threads.
One copy is swapped to its own scheme, `swap(model, native(model))`. The outputs of both are equal to 1e-5 of the
largest.

1. Forward, and forward + backward, of 512 tokens, in turn: transformers' time over ours, median and quartiles. Target:
   2 or more.
2. Peak memory of a forward pass over 512, 1024 and 2048 tokens beyond that of the model, each in a process of its own.
   Ours grows linearly. Linux only.

Written to bench/results/deberta.csv.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from measuring import RESULTS, command_line, in_turn, output_of, print_versions, ratios, spread, timed, write_csv
from transformers import DebertaV2Config, DebertaV2Model

import locant
import locant.hf

LENGTHS = (512, 1024, 2048)
TRANSFORMERS, LOCANT = "transformers", "locant"

CODE = """
import torch
from deberta import models
from locant.analysis.speed import peak_memory
torch.set_num_threads(2)
model, ids = models()[{which!r}], torch.randint(1000, 20_000, (1, {length}))
with torch.no_grad():
    model(input_ids=ids[:, :64])
    print(peak_memory(lambda: model(input_ids=ids)))
"""


def models() -> dict[str, DebertaV2Model]:
    """Returns transformers' model, and a copy with its positions as schemes."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=768, num_hidden_layers=2, num_attention_heads=12, intermediate_size=3072, vocab_size=32_000,
        max_position_embeddings=2048, relative_attention=True, position_buckets=256, max_relative_positions=512,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
    )  # fmt: skip
    theirs = DebertaV2Model(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)  # transformers' own initialization is too small to see positions
    ours = copy.deepcopy(theirs)
    return {TRANSFORMERS: theirs, LOCANT: locant.swap(ours, locant.native(ours))}


def check(found: dict[str, DebertaV2Model], ids: torch.Tensor) -> float:
    """Returns the largest difference of the outputs, over the largest output."""
    with torch.no_grad():
        a, b = (found[name](input_ids=ids).last_hidden_state for name in (LOCANT, TRANSFORMERS))
    return float((a - b).abs().max() / b.abs().max())


def faster(what: str, run: Callable[[Any], object], found: dict[str, DebertaV2Model], repeats: int) -> dict[str, Any]:
    """Prints and returns how many times faster ours is."""
    times = in_turn({name: timed(lambda model=model: run(model)) for name, model in found.items()}, repeats)
    ratio = spread(ratios(times, TRANSFORMERS, LOCANT))
    milliseconds = 1000 * spread(times[TRANSFORMERS]).median
    print(f"{what:20} times faster: {ratio}; transformers {milliseconds:.0f} ms", flush=True)
    return {"what": what, "length": 512, "value": round(ratio.median, 3), "q1": round(ratio.q1, 3),
            "q3": round(ratio.q3, 3), "unit": "times faster"}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    print_versions("torch", "transformers", "locant", threads=torch.get_num_threads())
    found, ids = models(), torch.randint(1000, 20_000, (1, 512))
    far = check(found, ids)
    print(f"largest difference of outputs: {far:.1e}", flush=True)
    if not far <= 1e-5:
        raise SystemExit("the outputs differ by more than 1e-5 of the largest")

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(input_ids=ids)

    def both(model: Any) -> None:
        model.zero_grad()
        model(input_ids=ids).last_hidden_state.square().mean().backward()

    rows = [faster("forward", forward, found, repeats), faster("forward + backward", both, found, repeats)]
    for length in LENGTHS:
        for which in (TRANSFORMERS, LOCANT):
            megabytes = float(output_of(CODE.format(which=which, length=length)))
            print(f"{which:14} L={length:5} {megabytes:7.0f} MB", flush=True)
            rows.append({"what": f"memory, {which}", "length": length, "value": round(megabytes), "q1": "", "q3": "",
                         "unit": "MB"})  # fmt: skip
    write_csv(RESULTS / "deberta.csv", rows)


if __name__ == "__main__":
    main()
