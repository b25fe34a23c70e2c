"""Attention with a scheme against plain `scaled_dot_product_attention` on the same tensors.

    python bench/attention.py [SPEC …] [--lengths 512 2048] [--repeats 9] [--only sides]

fp32, H = 12, D = 64, 2 threads, impl="auto"; B · L = 4096. Printed are the median of the ratios to plain attention in
the same repeat, and their quartiles: forward, forward + backward, and one query against a long cache. `peer` is method
4 of Huang et al. as transformers 4 computed it: a vector for every pair, [L, L, D], and two einsums. Written to
bench/results/attention.csv, with the picture beside it. `locant bench SPEC …` measures your own schemes.

The rows of `side_terms.py` have terms of each token: side vectors, levels, temperatures. They are given, as q and k
are: projections of a layer are not part of attention. Those marked causal are compared with causal plain attention.
`--only sides` measures them alone.
"""

from pathlib import Path

import torch
from measuring import RESULTS, command_line, print_versions
from side_terms import decoded_sides, timed_sides

import locant
from locant.analysis import speed
from locant.attention.build import build
from locant.report.speed import cost_line, draw_costs, write_costs

HEADS, SIZE, TOKENS = 12, 64, 4096
EVERYTHING = 8191  # a clip that clips nothing at the lengths of this benchmark
SPECS = ["tisa", "t5", "alibi", f"huang4:clip={EVERYTHING}", "huang4:clip=64", "shaw:clip=64", "huang1:clip=64",
         "huang2:clip=64", "huang3:clip=64", f"huang3:clip={EVERYTHING}"]  # fmt: skip
LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
PEER = "peer: huang4 by pairs"


def by_pairs(scheme: locant.Scheme) -> speed.TimedAttention:
    def attention(q, k, v):
        length = q.shape[2]
        r = torch.arange(length) - torch.arange(length)[:, None]
        vectors = scheme.table[0][r.clamp(-scheme.clip, scheme.clip) + scheme.clip]  # [L, L, D]
        logits = q @ k.mT
        logits = logits + torch.einsum("bhid,ijd->bhij", q, vectors) + torch.einsum("bhjd,ijd->bhij", k, vectors)
        return (logits / q.shape[3] ** 0.5).softmax(-1) @ v

    return attention


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=["sides"])
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print_versions("torch", "locant", threads=torch.get_num_threads())
    print(f"{build().why} ({build().command})")
    schemes = {spec: locant.scheme(spec, n_heads=HEADS, head_dim=SIZE, d_model=HEADS * SIZE) for spec in options.specs}
    attentions = {spec: speed.with_scheme(scheme) for spec, scheme in schemes.items()}
    rows = []

    def measure(attentions, what, length, batch, repeats, causal=False):
        for cost in speed.costs(
            attentions, what, length=length, batch=batch, heads=HEADS, size=SIZE, repeats=max(3, repeats), causal=causal
        ):
            print(cost_line(cost), flush=True)
            rows.append(cost)

    full = locant.scheme(f"huang4:clip={EVERYTHING}", n_heads=HEADS, head_dim=SIZE)
    for length in options.lengths:
        batch, repeats = max(TOKENS // length, 1), min(options.repeats, options.repeats * 2048 // length)
        chosen = attentions
        if length > 4096:  # minutes each: a few schemes show the growth
            chosen = {name: each for name, each in attentions.items() if name.startswith(("tisa", "huang4", "shaw"))}
        for what in (speed.FORWARD, speed.TRAINING):
            if length in (512, 2048):
                for causal in (False, True):
                    measure(timed_sides(batch, HEADS, length, SIZE, causal), what, length, batch, repeats, causal)
            if options.only:
                continue
            measure(chosen or attentions, what, length, batch, repeats)
            if length in (512, 2048):  # an [L, L, D] tensor of more tokens does not fit into memory
                measure({PEER: by_pairs(full)}, what, length, batch, 3)
    biases = {
        spec: speed.with_scheme(schemes[spec], causal=True) for spec in ("tisa", "t5", "alibi") if spec in schemes
    }
    for length, batch in ((2048, 1), (8192, 1), (8192, 8), (32768, 1)):
        measure({**biases, **decoded_sides(batch, HEADS, length, SIZE)}, speed.DECODING, length, batch, 60)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_costs(rows, options.out)
    if len(options.lengths) > 1:
        draw_costs([row for row in rows if row.what != speed.DECODING], options.out.with_suffix(".png"))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
