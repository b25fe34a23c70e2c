"""Which scheme adapts best: a table and a picture of the results of bench/adapt.py.

    python bench/adapt_table.py [bench/results/adapt.csv] [-o docs/results/adapt] [--budgets 30steps 380steps]

Takes the rows in which all weights were trained for one of the budgets. Writes adapt.csv, adapt.md and adapt.png.
"""

import statistics
from pathlib import Path

from measuring import RESULTS, command_line, read_csv, write_csv

OUT = Path(__file__).parent.parent / "docs" / "results" / "adapt"
LEAST = 2e-4
"""A smaller loss, or a gain, is drawn here: the axis is logarithmic."""
COLOURS = ["#d55e00", "#56b4e9", "#0072b2", "#009e73"]


def scores(rows: list[dict[str, str]], spec: str, budget: str, state: str, what: str = "stsb") -> float:
    """Returns the mean score over seeds."""
    found = [float(row[what]) for row in rows if (row["spec"], row["budget"], row["state"]) == (spec, budget, state)]
    return statistics.fmean(found) if found else float("nan")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "adapt.csv")
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    parser.add_argument("--budgets", nargs="*", default=["30steps", "380steps"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    budgets = arguments.budgets
    rows = [row for row in read_csv(arguments.results) if row["train"] == "all" and row["budget"] in budgets]
    specs = list(dict.fromkeys(row["spec"] for row in rows if row["budget"] == budgets[-1]))
    specs.sort(key=lambda spec: -scores(rows, spec, budgets[-1], "adapted"))
    parameters = {row["spec"]: int(row["parameters"]) for row in rows if row["state"] == "adapted"}
    explained = {row["spec"]: float(row["explained"]) for row in rows if row["budget"] == budgets[-1]}
    original, silenced = (scores(rows, specs[0], budgets[-1], state) for state in ("original", "silenced"))

    lines = [
        f"| | parameters | explained | fitted | {' | '.join(budgets)} | agreement |",
        "|---|" + "---:|" * (4 + len(budgets)),
    ]
    for spec in specs:
        adapted = " | ".join(f"{scores(rows, spec, budget, 'adapted'):.4f}" for budget in budgets)
        near = scores(rows, spec, budgets[-1], "adapted", "agreement")
        fitted = scores(rows, spec, budgets[-1], "fitted")
        lines.append(
            f"| `{spec}` | {parameters[spec]:,} | {explained[spec]:.0%} | {fitted:.4f} | {adapted} | {near:.4f} |"
        )
    lines.append(f"\nOriginal {original:.4f}, silenced {silenced:.4f}.")
    (arguments.out / "adapt.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_csv(arguments.out / "adapt.csv", rows)
    draw(arguments.out / "adapt.png", rows, specs, budgets, original, silenced)
    print("\n".join(lines))


def draw(path: Path, rows: list[dict], specs: list[str], budgets: list[str], original: float, silenced: float) -> None:
    """Draws the loss of each scheme on a logarithmic axis: most lose less than 0.01, and one loses a sixth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def lost(score: float) -> float:
        return max(original - score, LEAST)

    figure, axis = plt.subplots(figsize=(7.2, 0.32 * len(specs) + 1.3), layout="constrained")
    places = range(len(specs))[::-1]
    states = [("fitted", budgets[-1], "fitted")]
    states += [("adapted", budget, f"adapted, {budget.replace('steps', ' steps')}") for budget in budgets]
    for colour, (state, budget, label) in zip(COLOURS, states, strict=False):
        found = [lost(scores(rows, spec, budget, state)) for spec in specs]
        axis.scatter(found, places, color=colour, s=26, label=label, zorder=3)
    for place, spec in zip(places, specs, strict=True):
        ends = [lost(scores(rows, spec, budget, state)) for state, budget, _ in states]
        axis.plot([min(ends), max(ends)], [place, place], color="0.8", linewidth=1.2, zorder=1)
    axis.axvline(lost(silenced), color="0.65", linewidth=1.2, label="silenced", zorder=2)
    axis.set_xscale("log")
    ticks = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_yticks(places, specs, fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(
        f"lost on STS-B dev: {original:.4f}, the original's Spearman correlation, minus the model's", fontsize=9
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
