"""Variance against position in random models without position embeddings: measured, and predicted by theory.

    python bench/variance.py [--models 4] [--sequences 24]

GPT-2's shape (d = 768, 12 heads, 12 layers, length 512), all weights and embeddings N(0, 0.02²), no positions. The
measurement is the mean over models, each on its own random sequences. Printed is the error of the theory, layer by
layer. Written to bench/results/variance.csv (every layer and step at 18 positions) and variance.png (the attention
output).
"""

import time
from pathlib import Path

import torch
from measuring import RESULTS, command_line, print_versions, write_csv
from transformers import GPT2Config, GPT2Model

from locant.analysis import variance

WIDTH, HEADS, LAYERS, LENGTH, SIGMA = 768, 12, 12, 512, 0.02
SHOWN = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def model(seed: int, layers: int = LAYERS, *, causal: bool = True) -> GPT2Model:
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=layers, n_positions=LENGTH)
    built = GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=SIGMA)
        built.wpe.weight.zero_()
    for block in built.h:
        block.attn.is_causal = causal
    return built


def mean(tables: list[variance.Variances]) -> variance.Variances:
    rows = []
    for same in zip(*(table.rows for table in tables), strict=True):
        values = torch.tensor([row.values for row in same]).mean(0)
        rows.append(variance.VarianceRow(same[0].layer, same[0].step, same[0].source, tuple(values.tolist())))
    return variance.Variances(tuple(rows))


def error(measured: variance.Variances, predicted: variance.Variances, layer: int, step: str, source: str):
    """Returns predicted / measured − 1 at every position."""
    theory = torch.tensor(predicted.row(layer, step, source).values)
    return theory / torch.tensor(measured.row(layer, step, variance.MEASURED).values) - 1


def draw(measured: variance.Variances, predicted: variance.Variances, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=[1, 1.15])
    m = range(1, LENGTH + 1)

    def values(table, layer, source):
        return table.row(layer, variance.ATTENTION, source).values

    axes[0].plot(m, values(measured, 1, variance.MEASURED), color="0.75", linewidth=5, label="measured")
    axes[0].plot(m, values(predicted, 1, variance.PLAIN), ":", color="tab:red", label="plain, d²σ⁴/m")
    axes[0].plot(m, values(predicted, 1, variance.CORRECTED), color="tab:blue", linewidth=1.2, label="corrected")
    floor = variance.floor_position(WIDTH, SIGMA)
    axes[0].axhline(SIGMA**2, color="0.5", linewidth=0.8)
    axes[0].annotate("σ² of the tokens", (1, SIGMA**2), (0, 3), textcoords="offset points", fontsize=8, color="0.35")
    axes[0].axvline(floor, color="0.5", linewidth=0.8, linestyle="--")
    axes[0].annotate(
        f"d²σ² = {floor:.0f}", (floor, 0.05), (-4, 0), textcoords="offset points", fontsize=8, color="0.35", ha="right"
    )
    axes[0].set_title("layer 1", loc="left", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    for layer in (2, 3, 4, 6, 12):
        colour = plt.get_cmap("viridis")(0.9 * (layer - 2) / (LAYERS - 2))
        line = values(measured, layer, variance.MEASURED)
        axes[1].plot(m, line, color=colour, linewidth=4, alpha=0.35)
        axes[1].plot(m, values(predicted, layer, variance.CORRECTED), color=colour, linewidth=1.2)
        axes[1].annotate(f"{layer}", (LENGTH, line[-1]), (5, 0), textcoords="offset points", fontsize=8,
                         color=colour, va="center")  # fmt: skip
    axes[1].set_title("layers 2 … 12: measured (wide) and corrected (thin)", loc="left", fontsize=10)
    axes[1].set_yticks([0.03, 0.04, 0.06, 0.08, 0.1], ["0.03", "0.04", "0.06", "0.08", "0.1"])
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([2**k for k in range(10)], [str(2**k) for k in range(10)])
        axis.set_xlabel("position m", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yticks([0.03, 0.04, 0.06, 0.08, 0.1], ["0.03", "0.04", "0.06", "0.08", "0.1"])
    axes[1].minorticks_off()
    axes[0].set_ylabel("variance of the attention output", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=24, help="for each model")
    options = parser.parse_args()
    torch.set_num_threads(2)
    print_versions("torch", "transformers", "locant")

    shape = variance.settings(model(0))
    start = time.perf_counter()
    predicted = variance.predict(**shape, length=LENGTH)
    print(f"predicted in {time.perf_counter() - start:.1f} s", flush=True)
    start, tables = time.perf_counter(), []
    for seed in range(options.models):
        tables.append(variance.measure(model(seed), sequences=options.sequences, length=LENGTH, seed=seed))
        print(f"model {seed + 1} of {options.models}: {time.perf_counter() - start:.0f} s", flush=True)
    measured = mean(tables)

    print("\nattention output: measured, and in % how far corrected theory is above it; the slope of log variance")
    some = [1, 4, 16, 64, 256, 512]
    print("± is the standard deviation, in %, from one model to the next at m = 512")
    print("layer  " + "".join(f"{f'm = {m}':>16}" for m in some) + "   worst of all m   ±    slope measured, predicted")
    for layer in range(1, LAYERS + 1):
        row = measured.row(layer, variance.ATTENTION, variance.MEASURED)
        off = 100 * error(measured, predicted, layer, variance.ATTENTION, variance.CORRECTED)
        slopes = variance.slope(row), variance.slope(predicted.row(layer, variance.ATTENTION, variance.CORRECTED))
        cells = "".join(f"{row.values[m - 1]:9.5f} ({off[m - 1]:+4.1f})" for m in some)
        ends = torch.tensor([table.row(layer, variance.ATTENTION, variance.MEASURED).values[-1] for table in tables])
        print(f"{layer:5}  {cells}  {off[off.abs().argmax()]:+13.1f} {100 * ends.std() / ends.mean():6.1f} "
              f"{slopes[0]:12.3f} {slopes[1]:10.3f}")  # fmt: skip
    plain = 100 * error(measured, predicted, 1, variance.ATTENTION, variance.PLAIN)
    print(f"plain theory, layer 1: {plain.min():+.1f} … {plain.max():+.1f}")
    print("worst of all layers and positions, in %:")
    for step in variance.STEPS:
        every = [error(measured, predicted, layer, step, variance.CORRECTED) for layer in range(1, LAYERS + 1)]
        print(f"  {step:20} {100 * float(torch.stack(every).abs().max()):.1f}")
    print(f"signal meets floor: measured {variance.meets_floor(measured, 1, variance.MEASURED)}, "
          f"plain {variance.meets_floor(predicted, 1, variance.PLAIN)}, "
          f"corrected {variance.meets_floor(predicted, 1, variance.CORRECTED)}")  # fmt: skip

    both = variance.measure(model(0, 2, causal=False), sequences=options.sequences, length=LENGTH)
    theory = variance.predict(**variance.settings(model(0, 2)), length=LENGTH, causal=False)
    for layer in (1, 2):
        row = both.row(layer, variance.ATTENTION, variance.MEASURED)
        print(f"bidirectional, layer {layer}: slope {variance.slope(row):+.4f}, mean {sum(row.values) / LENGTH:.3e}, "
              f"corrected {theory.row(layer, variance.ATTENTION, variance.CORRECTED).values[0]:.3e}")  # fmt: skip

    rows = []
    for layer in range(1, LAYERS + 1):
        for step in variance.STEPS:
            lines = {variance.MEASURED: measured.row(layer, step, variance.MEASURED).values}
            for source in (variance.PLAIN, variance.CORRECTED):
                lines[source] = predicted.row(layer, step, source).values
            rows += [
                {"layer": layer, "step": step, "m": m, **{name: f"{line[m - 1]:.6g}" for name, line in lines.items()}}
                for m in SHOWN
            ]
    write_csv(RESULTS / "variance.csv", rows)
    draw(measured, predicted, RESULTS / "variance.png")
    print(f"written: {RESULTS / 'variance.png'}")


if __name__ == "__main__":
    main()
