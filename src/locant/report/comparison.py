"""The page of `locant compare`, and its table in the terminal: from the files of a comparison alone, at any moment."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from locant.analysis.curve import WHAT, Curve, curves
from locant.experiments import results
from locant.experiments.comparison import Comparison, open_folder, where
from locant.experiments.results import RunResult, SchemeResult
from locant.experiments.run import quiet
from locant.experiments.statistics import estimate
from locant.experiments.tasks import Task, find_task
from locant.report import page
from locant.report.figures import Cell, Figure, Grid, Interval, Intervals, Lines, Number, Series, Small
from locant.report.page import Report, Section
from locant.runs import files, run_folder

PAGE, TABLES = "report.html", "csv"
REACH = 64
"""Offsets of the learned curves: what is farther away than that changes little from one to the next."""
UNREADABLE = (OSError, ValueError, RuntimeError, NotImplementedError, KeyError, IndexError, TypeError, AttributeError)
"""What opening a model can raise: the page goes on without its curves."""


def write(out: Path) -> Path:
    """The page of a comparison as it is now, out/report.html, and the numbers of its figures, out/csv/."""
    return page.write(report(out), out / PAGE, csv_folder=out / TABLES)


def report(out: Path) -> Report:
    comparison = open_folder(out)
    found = results.outcomes(out, comparison)
    rows = results.table(comparison, found)
    task = find_task(comparison.work.task)
    learned, notices = _learned(out, comparison, found)
    sections = (
        _ranking(comparison, task, rows),
        _training(comparison, found),
        _lengths(comparison, task, found, rows),
        learned,
        _invariance(comparison, found),
        _failures(out, found),
        _what_was_run(out, comparison, task, found),
    )
    return Report(
        f"{len(comparison.schemes)} position schemes compared: {_task_name(task)}",
        f"{_model_name(comparison)}. {comparison.about[:1].upper()}{comparison.about[1:]}.",
        tuple(results.sentences(comparison, rows)),
        _facts(comparison, task, found),
        tuple(section for section in sections if section.figures),
        tuple(notices),
    )


# ---- head -----------------------------------------------------------------------------------------


def _task_name(task: Task) -> str:
    known = {"clm": "causal language modelling", "mlm": "masked language modelling"}
    return known.get(task.name, task.name)


def _model_name(comparison: Comparison) -> str:
    work = comparison.work
    if work.preset.width:
        sizes = f"{work.preset.layers} layers, {work.preset.heads} heads, width {work.preset.width}"
        return f"A model of the shape of {work.model}, from scratch: {sizes}"
    return f"Training starts from {Path(work.model).name}"


def _facts(comparison: Comparison, task: Task, found: list[RunResult]) -> dict[str, str]:
    work, count = comparison.work, {state: sum(each.state == state for each in found) for state in STATES}
    runs = ", ".join(f"{number} {STATES[state]}" for state, number in count.items() if number)
    return {
        "ranked by": f"{task.metric}, {_direction(task)}",
        "trained at": f"{work.preset.length:,} tokens",
        "training of each": f"{work.steps:,} steps of {work.preset.batch} sequences",
        "baseline": comparison.schemes[0],
        "seeds": str(len(comparison.seeds)),
        "runs": runs,
    }


STATES = {"done": "finished", "failed": "failed", "begun": "under way", "new": "to come"}


def _direction(task: Task) -> str:
    return "higher is better" if task.higher_is_better else "lower is better"


# ---- the table ------------------------------------------------------------------------------------


def _ranking(comparison: Comparison, task: Task, rows: list[SchemeResult]) -> Section:
    figures: list[Figure] = [_ranked_table(comparison, task, rows)]
    compared = tuple(
        Interval(
            row.scheme,
            row.against.estimate.mean,
            row.against.estimate.low,
            row.against.estimate.high,
            points=_gaps(row, next(each for each in rows if each.baseline)),
            word=row.against.verdict,
            colour=comparison.schemes.index(row.scheme),
        )
        for row in rows
        if row.against is not None and row.against.estimate.count
    )
    if compared:
        baseline, intervals = comparison.schemes[0], any(row.low is not None for row in compared)
        figures.append(
            Intervals(
                f"Difference to {baseline}",
                f"{task.metric.capitalize()} minus that of {baseline} with the same seed, which has the same data in the "
                f"same order and the same first weights: {_direction(task)}, so {'right' if task.higher_is_better else 'left'} "
                "of 0 is good. A tick is one seed, the dot their mean"
                + (
                    ", the bar the 95 % interval of the mean (Student's t). A bar that reaches 0 shows no difference; with "
                    "two or three seeds bars are long. Each bar stands for itself: of twenty schemes that are all alike, one "
                    "would be expected to miss 0."
                    if intervals
                    else ". With one seed there is no interval: another seed may well turn the order round."
                ),
                f"difference in {task.metric}",
                compared,
            )
        )
    intro = (
        f"Best first, by the mean {task.metric} at the length of training over the seeds that have finished. The first scheme "
        f"of the command, {comparison.schemes[0]}, is what the others are compared with."
    )
    return Section("Which is best", intro, tuple(figures))


def _gaps(row: SchemeResult, baseline: SchemeResult) -> list[float]:
    return [row.scores[seed] - baseline.scores[seed] for seed in sorted(row.scores.keys() & baseline.scores.keys())]


def _ranked_table(comparison: Comparison, task: Task, rows: list[SchemeResult]) -> Grid:
    header = [
        "scheme",
        task.metric,
        "95 % interval",
        f"minus {comparison.schemes[0]}",
        "its interval",
        "in words",
        "parameters",
        "s/step",
        "MB",
        "runs",
    ]
    cells: list[list[Cell]] = [
        [
            row.scheme,
            row.score.mean,
            _between(row.score.low, row.score.high),
            None if row.against is None else row.against.estimate.mean,
            "" if row.against is None else _between(row.against.estimate.low, row.against.estimate.high, plus=True),
            _in_words(row),
            row.parameters,
            row.seconds_per_step,
            None if row.memory_mb is None else round(row.memory_mb),
            _runs(row),
        ]
        for row in rows
    ]
    note = (
        f"Mean {task.metric} over seeds, {_direction(task)}, with its 95 % interval, and the difference to the baseline seed "
        "by seed. Parameters are those of the scheme: what the model has more than it would have without positions. "
        "Seconds per step and peak memory are of training and test on the machine that ran them, and mean something only "
        "where nothing else ran there; a few per cent between schemes are normal."
    )
    return Grid("Ranked", note, header, cells)


def _tested_lengths(rows: Sequence[SchemeResult], but: int) -> list[int]:
    return sorted({length for row in rows for length in (*row.by_length, *row.refused)} - {but})


def _in_words(row: SchemeResult) -> str:
    if row.baseline:
        return "baseline"
    if row.against is None or not row.finished:
        return "failed" if row.failed and len(row.failed) == row.wanted else "not finished"
    return row.against.verdict


def _at(row: SchemeResult, length: int) -> Cell:
    if length in row.refused:
        return f"cannot: {row.refused[length]}"
    return row.by_length[length].mean if length in row.by_length else None


def _runs(row: SchemeResult) -> str:
    failed = f", {len(row.failed)} failed" if row.failed else ""
    return f"{row.finished} of {row.wanted}{failed}"


def _rounded(value: float | None, digits: int = 5) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _between(low: float | None, high: float | None, *, plus: bool = False) -> str:
    if low is None or high is None:
        return ""
    sign = "+" if plus else ""
    digits = 3 if plus else 4
    return f"{low:{sign}.{digits}g} … {high:{sign}.{digits}g}".replace("-", "−")


# ---- curves over steps, lengths and positions -----------------------------------------------------


def _of(comparison: Comparison, found: list[RunResult], scheme: str) -> list[RunResult]:
    """The runs whose curves are drawn: those that are done, and where none is, those that have begun."""
    own = [each for each in found if each.run.scheme == scheme]
    return [each for each in own if each.state == "done"] or [each for each in own if each.steps]


def _over_runs(name: str, colour: int, runs: list[dict[float, float]], *, interval: bool = False) -> Series | None:
    """One line, x -> the mean over runs that have it; around it the lowest and the highest run, or the 95 % interval."""
    places = sorted({x for run in runs for x in run})
    if not places:
        return None
    at = [[run[x] for run in runs if x in run] for x in places]
    means, low, high = [], [], []
    for values in at:
        whole = all(map(math.isfinite, values))
        mean = estimate(values)
        means.append(_rounded(mean.mean))
        low.append(_rounded(mean.low) if interval else _rounded(min(values)) if whole else None)
        high.append(_rounded(mean.high) if interval else _rounded(max(values)) if whole else None)
    several = any(len(values) > 1 for values in at)
    return Series(name, places, means, low if several else None, high if several else None, colour=colour)


def _logged(run: RunResult, key: str) -> dict[float, float]:
    return {row["step"]: float(row[key]) for row in run.steps if key in row}


def _band(comparison: Comparison, found: list[RunResult]) -> str:
    counts = {len(_of(comparison, found, scheme)) for scheme in comparison.schemes}
    return ", mean over seeds; the band goes from the lowest seed to the highest" if max(counts) > 1 else ", one seed"


def _training(comparison: Comparison, found: list[RunResult]) -> Section:
    drawn = [(at, scheme, _of(comparison, found, scheme)) for at, scheme in enumerate(comparison.schemes)]
    loss = _lines(_over_runs(scheme, at, [_logged(run, "loss") for run in runs]) for at, scheme, runs in drawn)
    if not loss:
        return Section("Training", "", ())
    figures: list[Figure] = [
        Lines(
            "Training loss",
            f"Loss on the batches of training{_band(comparison, found)}. It falls fast, then slowly; a line that stays above "
            "all others learns more slowly or can express less, one that jumps up or ends early has diverged. Lines that "
            "cannot be told apart are normal among good schemes.",
            "step",
            "training loss",
            loss,
        )
    ]
    baseline = {run.run.seed: _logged(run, "loss") for run in drawn[0][2]}
    gaps = _lines(
        _over_runs(
            scheme,
            at,
            [
                {step: loss - baseline[run.run.seed][step] for step, loss in _logged(run, "loss").items()
                 if step in baseline[run.run.seed]}
                for run in runs
                if run.run.seed in baseline
            ],
        )
        for at, scheme, runs in drawn[1:]
    )  # fmt: skip
    if gaps:
        figures.append(
            Lines(
                f"Training loss minus that of {comparison.schemes[0]}",
                "The same, batch by batch: at every step all schemes see the same sequences, so that what makes one batch "
                "harder than another drops out. Below 0 a scheme is ahead. An early lead that melts away is a scheme that "
                "only learns faster; a gap that stays or grows is one that a longer training would keep.",
                "step",
                "difference in training loss",
                gaps,
            )
        )
    return Section("Training", "Every scheme has the same data in the same order.", tuple(figures))


def _lines(series: Iterable[Series | None]) -> tuple[Series, ...]:
    return tuple(line for line in series if line is not None)


def _lengths(comparison: Comparison, task: Task, found: list[RunResult], rows: list[SchemeResult]) -> Section:
    trained = comparison.work.preset.length
    done = {scheme: [each for each in found if each.run.scheme == scheme and each.state == "done"]
            for scheme in comparison.schemes}  # fmt: skip
    mark = ((float(trained), "trained length"),)
    figures: list[Figure] = []
    longer = _tested_lengths(rows, but=trained)
    if longer and any(done.values()):
        scores = {scheme: [_by_length(run, task.metric) for run in runs] for scheme, runs in done.items()}
        several = "bars are 95 % intervals over seeds" if max(map(len, done.values())) > 1 else "one seed, no interval"
        changes = {
            scheme: [{x: value - run[trained] for x, value in run.items()} for run in runs if trained in run]
            for scheme, runs in scores.items()
        }
        for title, label, values, note in (
            (
                f"{task.metric.capitalize()} by length",
                f"{task.metric} ({_direction(task)})",
                scores,
                f"Mean {task.metric} on test inputs of each length; {several}. Every length is made of the same test text. A "
                "scheme that carries over stays level or gets better with more context; one that does not gets worse right "
                "of the mark. A single dot is a scheme that has no positions beyond it.",
            ),
            (
                f"{task.metric.capitalize()} by length, minus that at {trained:,}",
                f"change in {task.metric} ({_direction(task)})",
                changes,
                f"The same models against themselves at the length of training; {several}. What seeds differ in drops out, so "
                f"the bars are shorter than above. {'Above' if task.higher_is_better else 'Below'} 0, longer inputs help. A scheme "
                "that carries over stays near 0 or on the good side of it; one that does not has left it after a doubling or two.",
            ),
        ):
            lines = _lines(
                _over_runs(scheme, at, values[scheme], interval=True) for at, scheme in enumerate(comparison.schemes)
            )
            if lines:
                axis = "length in tokens"
                figures.append(Lines(title, note, axis, label, lines, log_x=True, marks=mark, whiskers=True))
        figures.append(_length_table(task, rows))
    lines = _lines(
        _over_runs(scheme, at, [_by_position(run, min(read), trained) for run in runs])
        for at, (scheme, runs) in enumerate(done.items())
        if (read := [length for run in runs if (length := _longest_read(run))])
    )
    if lines:
        figures.append(
            Lines(
                f"{task.metric.capitalize()} by position",
                f"{task.metric.capitalize()} at each place within the longest inputs that a scheme can read"
                f"{_band(comparison, found)}. Right of the mark the parts get longer, eight to a doubling. The first tokens have little to go by and are the hardest; then it should "
                "get better and stay so. A turn for the worse at the mark is a scheme that is lost where it was never "
                "trained. Wiggles that all schemes share are the test text.",
                "position in the input (middle of each part)",
                f"{task.metric} ({_direction(task)})",
                lines,
                log_x=True,
                marks=mark,
            )
        )
    if not longer:
        return Section("By position", "Where in the input the score is made.", tuple(figures))
    intro = f"Trained at {trained:,} tokens: what happens on longer inputs, which no scheme has seen."
    return Section("Longer inputs", intro, tuple(figures))


def _longest_read(run: RunResult) -> int | None:
    return max((row["length"] for row in run.tests if row["by_position"]), default=None)


def _by_length(run: RunResult, metric: str) -> dict[float, float]:
    return {row["length"]: row["values"][metric] for row in run.tests if metric in row["values"]}


def _length_table(task: Task, rows: list[SchemeResult]) -> Grid:
    lengths = _tested_lengths(rows, but=0)
    cells: list[list[Cell]] = [[row.scheme, *(_at(row, length) for length in lengths)] for row in rows if row.finished]
    return Grid(
        f"Mean {task.metric} at each length",
        "In the order of the ranking, which goes by the length of training. Where an order changes from left to right, "
        "it depends on your lengths which scheme to use.",
        ("scheme", *(f"{length:,}" for length in lengths)),
        cells,
    )


def _by_position(run: RunResult, length: int, trained: int) -> dict[float, float]:
    """Score by the middle of each part, so that the first has a place on a logarithmic axis too.

    Past the trained length as many parts go together as make eight of every doubling: single ones would show the text.
    """
    parts: list[tuple[int, float]] = next((row["by_position"] for row in run.tests if row["length"] == length), [])
    ends = [*(start for start, _ in parts[1:]), length]
    together: dict[int, list[tuple[int, int, float]]] = {}
    for (start, value), end in zip(parts, ends, strict=True):
        doublings = max(0, math.floor(math.log2(max(start, 1) / trained)))
        width = max(end - start, (trained << doublings) // 8)
        together.setdefault(start - start % width, []).append((start, end, value))
    return {
        (its[0][0] + its[-1][1] + 1) / 2: math.fsum(value for *_, value in its) / len(its) for its in together.values()
    }


# ---- what was learned -----------------------------------------------------------------------------


def _learned(out: Path, comparison: Comparison, found: list[RunResult]) -> tuple[Section, list[str]]:
    reach = min(REACH, comparison.work.preset.length - 1)
    causal = "Causal" in find_task(comparison.work.task).auto
    figures: list[Figure] = []
    nothing, notices = [], []
    for scheme in comparison.schemes:
        run = next((each for each in found if each.run.scheme == scheme and each.state == "done"), None)
        if run is None:
            continue
        here = where(out, run.run)
        try:
            layers, fixed = _curves(here, (here / run_folder.DONE).stat().st_mtime_ns, reach)
        except UNREADABLE as problem:
            notices.append(f"What {scheme} learned is not shown: {str(problem).splitlines()[0]}")
            continue
        if not layers:
            nothing.append(scheme)
        seed = "" if run.run.seed == 0 else f", seed {run.run.seed}"
        for what in dict.fromkeys(line.what for _, line in layers):
            panels = tuple(_panel(place, line, causal) for place, line in layers if line.what == what)
            title, note = f"{scheme}{seed}: {what}", _on_curves(what, fixed)
            one = replace(panels[0], title=f"{title}, {panels[0].title}", note=note)
            figures.append(one if len(panels) == 1 else Small(title, note, panels, columns=min(4, len(panels))))
    intro = (
        "What the scheme does with the offset between key and query, read off the parameters of the trained model of the "
        "first seed that has finished: one line per head"
        + (", and keys before their query, which is where a causal model looks" if causal else "")
        + ". Smooth curves that differ from head to head are normal."
        + (f" Nothing to draw for {', '.join(nothing)}: nothing is added for position there." if nothing else "")
    )
    return Section("What each scheme learned", intro, tuple(figures)), notices


def _on_curves(what: str, fixed: bool) -> str:
    if fixed:
        return (
            "This scheme has nothing to learn: the curve is that of its definition, the same before and after training. It "
            "is here to hold the learned ones against."
        )
    if what == WHAT["embed"]:
        return (
            "How alike the vectors of two positions are that stand this far apart, one of them in the middle of the table. A "
            "fresh table is 1 at offset 0 and noise around 0 elsewhere; one that has learned what is near falls off smoothly."
        )
    return (
        "Normal are smooth curves, with some heads that single out the nearest offsets and some that look far; a flat line "
        "is a head that has not used the scheme, and ragged ones have been trained too little to tell."
    )


def _panel(title: str, line: Curve, causal: bool) -> Lines:
    kept = [at for at, r in enumerate(line.r) if not causal or r <= 0]
    heads = len(line.values)
    return Lines(
        title,
        "",
        "offset (key − query)",
        line.what,
        tuple(
            Series(
                f"head {head}" if heads > 1 else "all heads",
                [line.r[at] for at in kept],
                [_rounded(values[at], 4) for at in kept],
            )
            for head, values in enumerate(line.values, 1)
        ),
    )


@lru_cache(maxsize=256)
def _curves(here: Path, written: int, reach: int) -> tuple[tuple[tuple[str, Curve], ...], bool]:
    """(where, curve) of a trained model, and whether nothing of it is learned. Kept by when the run was done: a page
    that is written after every run opens each model once."""
    import locant

    quiet()
    model = locant.load(str(here))
    read: Any = locant.native(model)
    parameters = 0
    made: dict[str, list[tuple[int, Curve]]] = {}
    for stack in read.stacks:
        embed = [] if stack.embed is None else [(0, stack.embed)]
        for number, scheme in (*embed, *enumerate(stack.layers or [], 1)):
            parameters += sum(parameter.numel() for parameter in scheme.parameters())
            for line in curves(scheme, reach):
                made.setdefault(line.what, []).append((number, line))
    lines: list[tuple[str, Curve]] = []
    for its in made.values():
        same = len(its) > 1 and all(line.values == its[0][1].values for _, line in its)
        lines += [
            ("all layers" if same else "token embedding" if number == 0 else f"layer {number}", line)
            for number, line in (its[:1] if same else its)
        ]
    return tuple(lines), not parameters


# ---- translation invariance -----------------------------------------------------------------------

QUANTITIES = {"gram": "E Eᵀ", "off_diagonal": "E Eᵀ, i ≠ j", "cosine": "cosine"}


def _quantity(key: str) -> str:
    """`invariance/encoder/head_3` as `encoder, head 3`."""
    *place, last = key.split("/")[1:]
    return ", ".join([part.replace("_", " ") for part in place] + [QUANTITIES.get(last, last.replace("_", " "))])


def _invariance(comparison: Comparison, found: list[RunResult]) -> Section:
    figures: list[Figure] = []
    cells: list[list[Cell]] = []
    for scheme in comparison.schemes:
        runs = _of(comparison, found, scheme)
        keys = dict.fromkeys(key for run in runs for row in run.steps for key in row if key.startswith("invariance/"))
        lines = _lines(
            _over_runs(_quantity(key), at, [_logged(run, key) for run in runs]) for at, key in enumerate(keys)
        )
        if not lines:
            continue
        figures.append(
            Lines(
                f"Translation invariance of {scheme} during training",
                f"R² of the best fit by a function of the offset alone (Toeplitz){_band(comparison, found)}. 1 is "
                "translation-invariant. A fresh table is noise: its vectors are nearly orthogonal, so that the diagonal "
                "alone gives E Eᵀ and the cosine a good R², and without the diagonal (i ≠ j) it is near 0. Normal is a "
                "slow rise of the latter, as the model finds out that distances matter more than places; in a short "
                "training it stays low. Heads are those of the first layer.",
                "step",
                "R²",
                lines,
            )
        )
        for line in lines:
            known: list[Number] = [value for value in line.y if value is not None]
            if known:
                cells.append([scheme, line.name, line.x[0], known[0], line.x[-1], known[-1]])
    if cells:
        header = ("scheme", "what", "first step", "R² there", "last step", "R² at the end")
        note = (
            "The ends of the lines above. R² of the same table of another seed is as good a scale as any: a change that is "
            "smaller than the band is none."
        )
        figures.append(Grid("Translation invariance at both ends", note, header, cells))
    intro = (
        "Of schemes that have a table of absolute positions: whether they come to use it as if it were relative. Schemes "
        "that go by the offset alone are translation-invariant by construction, and have no line here."
    )
    return Section("Translation invariance", intro, tuple(figures))


# ---- what went wrong, and what was run ------------------------------------------------------------


def _failures(out: Path, found: list[RunResult]) -> Section:
    failed = [each for each in found if each.state == "failed"]
    if not failed:
        return Section("Failed runs", "", ())
    cells: list[list[Cell]] = [
        [each.run.scheme, each.run.seed, each.reason, each.step, f"runs/{each.run.name}/log.txt"] for each in failed
    ]
    note = (
        "None is normal. A run that diverged would do so again and is left as it is; runs that failed for other reasons are "
        "tried again when the command is given again."
    )
    grid = Grid("Runs that failed", note, ("scheme", "seed", "reason", "last step logged", "more in"), cells)
    return Section("Failed runs", "They count in no score above.", (grid,))


def _what_was_run(out: Path, comparison: Comparison, task: Task, found: list[RunResult]) -> Section:
    work = comparison.work
    settings: list[list[Cell]] = [
        ["command", command(comparison, out.resolve().name)],
        ["task", task.name],
        ["model", _from_here(work.model)],
        ["data", work.data or "the default text"],
        ["what it is", comparison.about],
        ["schemes", ", ".join(comparison.schemes)],
        ["seeds", ", ".join(map(str, comparison.seeds))],
        ["steps", f"{work.steps:,}"],
    ]
    for name, value in asdict(work.preset).items():
        if name != "steps":
            settings.append([name, f"{value:,}" if isinstance(value, int) else f"{value:g}"])
    for name, values in _described(out, found).items():
        settings.append([name, ", ".join(values)])
    lengths = sorted({row["length"] for each in found for row in each.tests})
    header = ["scheme", "seed", "state", "step", *(f"{task.metric} at {length:,}" for length in lengths), "s/step",
              "MB", "parameters", "of the scheme", "s before", "s training", "s test"]  # fmt: skip
    cells: list[list[Cell]] = []
    for each in found:
        seconds = each.cost.get("seconds", {})
        cells.append(
            [
                each.run.scheme,
                each.run.seed,
                STATES[each.state],
                each.step,
                *(each.score(task.metric, length) for length in lengths),
                each.cost.get("seconds_per_step"),
                each.cost.get("memory_mb"),
                each.cost.get("parameters"),
                each.cost.get("scheme_parameters"),
                *(seconds.get(part) for part in ("before", "training", "test")),
            ]
        )
    figures = (
        Grid(
            "Every run",
            "All numbers that the means above are made of. Runs of one seed should have the same number of steps, and times "
            "that differ by little.",
            header,
            cells,
        ),
        Grid("Settings", "The command makes this comparison again, or goes on with it where it was stopped.",
             ("what", "is"), settings),
    )  # fmt: skip
    return Section("What was run", "", figures)


def _described(out: Path, found: list[RunResult]) -> dict[str, list[str]]:
    """Versions, threads and when, from run.json of all runs; where runs differ, all of what they say."""
    said: dict[str, dict[str, None]] = {}
    began: list[str] = []
    for each in found:
        try:
            about = files.read_json(where(out, each.run) / "run.json")
        except FileNotFoundError:
            continue
        for name, version in about.get("versions", {}).items():
            said.setdefault(name, {})[str(version)] = None
        if about.get("processes", 1) != 1:
            said.setdefault("processes of a run", {})[str(about["processes"])] = None
        began.append(str(about.get("began", "")))
    times = {"first run began": [min(began)], "last run began": [max(began)]} if any(began) else {}
    return {**{name: list(values) for name, values in said.items()}, **times}


def command(comparison: Comparison, name: str) -> str:
    """The command that makes this comparison; the preset is the named one that needs the fewest changes."""
    work, task = comparison.work, find_task(comparison.work.task)

    def changes(preset: str) -> dict[str, Any]:
        theirs = asdict(task.presets[preset])
        return {key: value for key, value in asdict(work.preset).items() if theirs[key] != value}

    nearest = min(task.presets, key=lambda preset: len(changes(preset)))
    changed = ",".join(f"{key}={value}" for key, value in changes(nearest).items())
    words = ["locant", "compare", work.task, "--schemes", ",".join(comparison.schemes)]
    words += ["--data", work.data] if work.data else []
    words += ["--model", _from_here(work.model)] if work.model != task.shape else []
    words += ["--seeds", str(max(comparison.seeds) + 1), "--budget", f"{work.steps}steps"]
    words += ["--preset", f"{nearest}:{changed}" if changed else nearest]
    return " ".join(map(shlex.quote, [*words, "-o", name]))


def _from_here(path: str) -> str:
    """A path as it would be written in this folder, if it leads down from it."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


# ---- in the terminal ------------------------------------------------------------------------------


def terminal(comparison: Comparison, rows: list[SchemeResult], sentences: list[str], width: int) -> Group:
    """The ranked table and what may be said of it; where it is narrow, the columns that matter least are left out."""
    task = find_task(comparison.work.task)
    longer = _tested_lengths(rows, but=comparison.work.preset.length)
    minus = f"− {comparison.schemes[0]}"
    columns: dict[str, list[str]] = {
        "scheme": [row.scheme for row in rows],
        task.metric: [_short(row.score.mean) for row in rows],
        "95 % interval": [_between(row.score.low, row.score.high) for row in rows],
        minus: ["" if row.against is None else _short(row.against.estimate.mean, "+.3g") for row in rows],
        "its interval": [
            "" if row.against is None else _between(row.against.estimate.low, row.against.estimate.high, plus=True)
            for row in rows
        ],
        "in words": [_in_words(row) for row in rows],
        **{f"at {length:,}": [_short_at(row, length) for row in rows] for length in longer},
        "runs": [_runs(row) for row in rows],
        "s/step": [_short(row.seconds_per_step, ".3g") for row in rows],
        "MB": [_short(row.memory_mb, ".0f") for row in rows],
        "parameters": ["–" if row.parameters is None else f"{row.parameters:,}" for row in rows],
    }
    lengths = [f"at {length:,}" for length in longer]
    by_weight = ["in words", minus, *lengths[-1:], "95 % interval", "s/step", "runs", *lengths[:-1], "its interval",
                 "parameters", "MB"]  # fmt: skip
    chosen = ["scheme", task.metric]
    for name in by_weight:
        if any(columns[name]) and _width(_rich({key: columns[key] for key in [*chosen, name]})) <= width:
            chosen.append(name)
    table = _rich({name: cells for name, cells in columns.items() if name in chosen})
    return Group(table, *(Padding(Text(sentence), (0, 0, 0, 1)) for sentence in sentences))


def _rich(columns: dict[str, list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        words = name in ("scheme", "in words", "runs")
        table.add_column(Text(name), justify="left" if words else "right", overflow="fold", no_wrap=name != "scheme")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _short(value: float | None, shape: str = ".4g") -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{shape}}".replace("-", "−")


def _short_at(row: SchemeResult, length: int) -> str:
    return (
        "cannot" if length in row.refused else _short(row.by_length[length].mean if length in row.by_length else None)
    )
