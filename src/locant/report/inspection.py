"""The page of `locant inspect`: the tables of an `Inspection` as figures, each with a sentence on how to read it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from locant.analysis import variance
from locant.analysis.inspection import Inspection, verdict
from locant.analysis.probe import Probed
from locant.report.figures import Figure, Grid, Heat, Lines, Series, Small
from locant.report.page import Report, Section

MOST = 128  # rows or columns of a heat map


def report(found: Inspection) -> Report:
    sections = [
        section
        for section in (_invariance(found), _distance(found), _curves(found), _variance(found), _probes(found), _behaviour(found))
        if section.figures
    ]  # fmt: skip
    return Report(
        found.name,
        "How does this model know where its tokens are?",
        tuple(verdict(found)),
        found.facts,
        tuple(sections),
        tuple(found.notices),
    )


def _numbers(x: Tensor) -> list[Any]:
    """Lists of numbers, shortened to what a reader can use."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in x.flatten().tolist()]


def _matrix(x: Tensor) -> list[list[Any]]:
    return [_numbers(row) for row in x]


def _thinned(n: int) -> list[int]:
    step = max(1, math.ceil(n / MOST))
    return list(range(0, n, step))


def _invariance(found: Inspection) -> Section:
    figures: list[Figure] = []
    if found.table is not None:
        places = _thinned(found.table.shape[0])
        gram = found.table[places] @ found.table[places].mT
        figures.append(
            Heat(
                "Position table, E Eᵀ",
                "Inner products of the vectors of any two positions. Stripes along the diagonal mean that only the offset "
                "matters; blocks and edges mean that absolute places do. Trained tables mostly show stripes that fade, "
                "and a first position apart from all others.",
                "position",
                "position",
                places,
                places,
                _matrix(gram),
                diverging=True,
            )
        )
    rows, stacks = found.invariances, any(row.stack for row in found.invariances)
    if rows:
        figures.append(
            Grid(
                "Translation invariance",
                "R² of the best Toeplitz fit: 1 means that the matrix is a function of the offset alone. The control of a "
                "table has vectors of the same norms in random directions (the diagonal alone earns it that much), the control "
                "of logits the same numbers in random order.",
                (
                    *(["stack"] if stacks else []),
                    "what",
                    "layer",
                    "head",
                    "positions",
                    "R²",
                    "interval",
                    "control",
                    "exactly",
                ),
                [
                    (
                        *([row.stack] if stacks else []),
                        row.quantity,
                        row.layer,
                        row.head,
                        f"{row.first}–{row.last}",
                        round(row.r2, 4),
                        "" if row.interval is None else f"{row.interval[0]:.3f} … {row.interval[1]:.3f}",
                        "" if row.control is None else f"{row.control.mean:.3f}",
                        row.exact,
                    )
                    for row in rows
                ],
            )
        )
    s = found.structure
    if s is not None:
        n = min(len(s.spectrum), 40)
        total, running = 0.0, []
        for share in s.spectrum[:n]:
            total += share
            running.append(total)
        figures.append(
            Lines(
                "Dimensions of the position table",
                f"Share of the table's variance held by its first principal components: 90 % in {s.dimensions[90]}, 95 % in "
                f"{s.dimensions[95]}, 99 % in {s.dimensions[99]} of {s.width}. Tables of trained models use a small part of "
                "their dimensions; a random table needs most of them.",
                "components",
                "cumulative share",
                (Series("table", list(range(1, n + 1)), [round(x, 5) for x in running]),),
            )
        )
        pairs = {number: f"with {other}" for pair in s.pairs for number, other in (pair, pair[::-1])}
        figures.append(
            Grid(
                "Principal components",
                "The wave that each leading component is closest to, along the positions. Components of one frequency a "
                "quarter turn apart are a sine and a cosine: two numbers that together make a place on a circle.",
                ("component", "share", "cycles", "of it a wave", "phase", "pair"),
                [
                    (
                        c.number,
                        round(c.share, 4),
                        c.frequency,
                        round(c.power, 3),
                        round(c.phase),
                        pairs.get(c.number, ""),
                    )
                    for c in s.components
                ],
            )
        )
    return Section(
        "Translation invariance", "Is what the model adds for position a function of the offset alone?", tuple(figures)
    )


def _distance(found: Inspection) -> Section:
    if not found.layers:
        return Section("Attention by distance", "", ())
    reach = 24
    weights: list[Lines | Heat] = []
    logits: list[Lines | Heat] = []
    for number, layer in enumerate(found.layers, 1):
        near = (layer.offsets.abs() <= reach).nonzero().flatten()
        r = layer.offsets[near].tolist()
        for h in range(layer.weight.shape[0]):
            title = f"{number}.{h + 1} {_short(layer.heads[h].label)}"
            for panels, name, values in ((weights, "weight", layer.weight), (logits, "logit", layer.logit)):
                panels.append(Lines(title, "", "offset", name, (Series(name, r, _numbers(values[h, near])),)))
    heads = [head for layer in found.layers for head in layer.heads]
    share = [[round(head.positional, 4) for head in layer.heads] for layer in found.layers]
    first = found.layers[0].weights.mean(0)
    places = _thinned(first.shape[0])
    figures: tuple[Figure, ...] = (
        Small(
            "What each head does with distance",
            "Mean attention weight by offset (key − query), one panel per head, layer.head with its label (the table of heads "
            "below has it in full). A spike at −1 is a previous-token head; a hump is local; sink, most goes to the first token; a flat line goes by content or nowhere. Two or three layers with sharp "
            "positional heads, mostly early, are normal.",
            tuple(weights),
            columns=min(12, len(found.layers[0].heads)),
        ),
        Small(
            "The positional part of the logit",
            "Mean logit by offset, centred over the keys each query sees, in the same order: what the head prefers before the "
            "softmax, whatever the words are. A straight slope is a decay like ALiBi's, a bump a preferred place.",
            tuple(logits),
            columns=min(12, len(found.layers[0].heads)),
        ),
        Heat(
            "How much of the logit is position",
            "Share of the variance of the attention logits that remains when tokens are averaged out. 1: the head looks at "
            "places; 0: it looks at words. Early layers are usually the positional ones.",
            "head",
            "layer",
            list(range(1, len(share) + 1)),
            list(range(1, len(share[0]) + 1)),
            share,
        ),
        Heat(
            "First layer, mean over heads",
            "Attention weights of the first layer, averaged over its heads and over texts (rows are queries).",
            "key",
            "query",
            places,
            places,
            _matrix(first[places][:, places]),
        ),
        Grid(
            "Heads",
            "The numbers behind the labels: weight on the previous token, itself, the next, the first; the distance within "
            "which half of the rest lies; entropy as a part of that of equal weights; share of position in the logit.",
            ("layer", "head", "label", "previous", "itself", "next", "first", "width", "entropy", "position"),
            [
                (
                    h.layer,
                    h.head,
                    h.label,
                    round(h.previous, 3),
                    round(h.itself, 3),
                    round(h.next, 3),
                    round(h.first, 3),
                    h.width,
                    round(h.entropy, 3),
                    round(h.positional, 3),
                )
                for h in heads
            ],
        ),
    )
    return Section(
        "Attention by distance", "Where each head looks, on a text, and what of that is due to position.", figures
    )


def _short(label: str) -> str:
    """A label that has room above one of twelve panels in a row; the table of heads has it in full."""
    for long, short in (("local of width", "local"), ("first-token sink", "sink"), (" token", "")):
        label = label.replace(long, short)
    return label


def _curves(found: Inspection) -> Section:
    panels: list[Lines | Heat] = []
    for where, line in found.curves:
        names = [f"head {h}" for h in range(1, len(line.values) + 1)] if len(line.values) > 1 else ["every head"]
        panels.append(
            Lines(
                where,
                "",
                "offset",
                line.what,
                tuple(
                    Series(name, line.r, [float(f"{x:.5g}") for x in values])
                    for name, values in zip(names, line.values, strict=True)
                ),
            )
        )
    if not panels:
        return Section("The scheme itself", "", ())
    note = (
        "What the scheme adds to, or does with, the logit at each offset, per layer and head. Smooth curves that single out "
        "near offsets are what trained schemes look like; flat ones have not been used."
    )
    figures: list[Figure] = [Small("Curves", note, tuple(panels), 3), *_kernels(found)]
    figures += [
        Heat(
            f"Vectors of {where}",
            "The table that queries meet, a row for each offset from −50 to 50 (first head). Offsets that matter have vectors "
            "of their own near 0; far rows that look alike could as well be clipped.",
            "coordinate",
            "offset",
            list(range(-50, 51)),
            list(range(vectors.shape[1])),
            _matrix(vectors),
            diverging=True,
        )
        for where, vectors in found.vectors[:1]
    ]
    return Section("The scheme itself", "The learned curves, read off the parameters.", tuple(figures))


def _kernels(found: Inspection) -> list[Figure]:
    """TISA taken apart: a panel per head, and the numbers of its kernels."""
    panels: list[Lines | Heat] = []
    rows: list[tuple[Any, ...]] = []
    for where, each in found.kernels:
        for head, (total, alone) in enumerate(zip(each.total, each.kernels, strict=True), 1):
            parts = [
                Series(f"kernel {s}", each.r, [float(f"{x:.5g}") for x in values], thin=True)
                for s, values in enumerate(alone, 1)
            ]
            whole = Series("sum", each.r, [float(f"{x:.5g}") for x in total])
            panels.append(Lines(f"{where}, head {head}", "", "offset", each.what, (whole, *parts)))
            numbers = zip(each.amplitude[head - 1], each.sharpness[head - 1], each.offset[head - 1], strict=True)
            rows += [
                (where, head, each.spec, s, round(a, 5), round(b, 5), round(c, 4))
                for s, (a, b, c) in enumerate(numbers, 1)
            ]
    if not panels:
        return []
    inside = any(each.what == "inside the logarithm" for _, each in found.kernels)
    note = (
        "The kernels whose sum each head's f(r) is, thin, beside their sum; a panel per head. "
        + (
            "The steps of the later version of TISA stand inside a logarithm, and so does their sum here. "
            if inside
            else ""
        )
        + "Kernels that lie on top of each other do one kernel's work; one without height is not used; a narrow one near 0 "
        "singles out neighbours, a wide one sets a range."
    )
    return [
        Small("Kernels", note, tuple(panels), 6),
        Grid(
            "Parameters of the kernels",
            "Height a, sharpness |b| and place c of every kernel a·exp(−|b|(r − c)²)"
            + (", or of a step |a|·sigmoid(±(r − c)/b), which falls where a is negative. " if inside else ". ")
            + "A bump falls to half its height 0.83/√|b| tokens from c.",
            ("where", "head", "scheme", "kernel", "a", "|b|", "c"),
            rows,
        ),
    ]


def _variance(found: Inspection) -> Section:
    if found.variances is None:
        return Section("Variance", "", ())
    figures: list[Figure] = []
    rows = [row for row in found.variances.rows if row.source == variance.MEASURED]
    for step in (variance.ATTENTION, variance.OUTPUT):
        series = tuple(
            Series(f"layer {row.layer}", list(range(1, len(row.values) + 1)), [float(f"{x:.5g}") for x in row.values])
            for row in rows
            if row.step == step
        ) + tuple(
            Series(
                f"layer {row.layer}, theory",
                list(range(1, len(row.values) + 1)),
                [float(f"{x:.5g}") for x in row.values],
                dashed=True,
            )
            for row in found.variances.rows
            if row.step == step and row.source == variance.CORRECTED
        )
        if series:
            figures.append(
                Lines(
                    f"Variance of the {step}",
                    "Variance over texts and coordinates, by position. In a causal model without positions the attention "
                    "output falls as 1/m, because token m averages m values: a straight line of slope −1 that later layers "
                    "keep in weaker form. A bidirectional model is flat.",
                    "position m",
                    "variance",
                    series,
                    log_x=True,
                    log_y=True,
                )
            )
    slopes = [
        (row.layer, row.step, round(variance.slope(row), 4))
        for row in rows
        if row.step in (variance.ATTENTION, variance.OUTPUT)
    ]
    if slopes:
        figures.append(
            Grid(
                "Slopes",
                "Of log variance against log position. −1 is the plain theory of the first layer of a random causal model "
                "without positions; 0 is no trace of position in the variance.",
                ("layer", "step", "slope"),
                slopes,
            )
        )
    return Section("Variance", "Position hidden in the size of the hidden states (Chi et al. 2023).", tuple(figures))


def _probes(found: Inspection) -> Section:
    rows = found.probes
    if not rows:
        return Section("Probes", "", ())
    twins = {row.place: row for row in found.twin}
    kinds = _by_kind(rows)
    series = [
        Series(
            kind,
            list(at),
            [round(row.error, 3) for row in at.values()],
            [round(row.low, 3) for row in at.values()],
            [round(row.high, 3) for row in at.values()],
        )
        for kind, at in kinds.items()
    ]
    after = kinds[AFTER]
    series.append(Series("constant guess", list(after), [row.constant for row in after.values()], dashed=True))
    series.append(
        Series("shuffled positions", list(after), [round(row.shuffled, 3) for row in after.values()], dashed=True)
    )
    series += [
        Series(f"twin: {kind}", list(at), [round(row.error, 3) for row in at.values()], dashed=True)
        for kind, at in _by_kind(found.twin).items()
    ]
    return Section(
        "Probes",
        "How well a small network reads a token's position off its hidden state.",
        (
            Lines(
                "Error of the probe, layer by layer",
                "Mean absolute error in tokens, with the range over seeds: of the hidden states after each layer (0: the "
                "embeddings), and of what attention and feed-forward give before it is added to them. Near 0, position is "
                "written plainly; at the dashed lines of the constant guess and of probes trained on shuffled positions it is "
                "gone. Models that compute a meaning of the whole text often forget position at the end."
                + (
                    " The twin is the same model with a mask that hides nothing, so that it cannot count what it sees."
                    if twins
                    else ""
                ),
                "layer",
                "error in tokens",
                tuple(series),
            ),
            Heat(
                "Error by position",
                "The same, by the position of the token. Where position is lost a probe guesses the middle, and errs most at the edges.",
                "position",
                "place",
                [row.place for row in rows],
                list(range(rows[0].by_position.shape[0])),
                [_numbers(row.by_position) for row in rows],
            ),
            Grid(
                "Errors of the probes",
                "The numbers: mean over seeds, the least and the greatest, and what they are to be held against.",
                ("place", "error", "least", "greatest", "constant guess", "shuffled positions", "twin"),
                [
                    (
                        row.place,
                        round(row.error, 3),
                        round(row.low, 3),
                        round(row.high, 3),
                        row.constant,
                        round(row.shuffled, 3),
                        round(twins[row.place].error, 3) if row.place in twins else None,
                    )
                    for row in rows
                ],
            ),
        ),
    )


AFTER = "after the layer"


def _by_kind(rows: list[Probed]) -> dict[str, dict[int, Probed]]:
    """The rows of hidden states, of attention and of feed-forward, each by its layer."""
    kinds: dict[str, dict[int, Probed]] = {}
    for row in rows:
        words = row.place.split(maxsplit=2)  # "embeddings", "layer 2", "layer 2 attention"
        kinds.setdefault(words[2] if len(words) == 3 else AFTER, {})[int(words[1]) if len(words) > 1 else 0] = row
    return kinds


def _behaviour(found: Inspection) -> Section:
    figures: list[Figure] = []
    if found.shifts:
        figures.append(
            Lines(
                "Moving every position",
                "How much the last hidden states change when all positions move by the same amount. 0 is translation-invariant; "
                "tables of absolute positions are not.",
                "moved by",
                "relative change",
                (Series("change", [s.by for s in found.shifts], [round(s.relative, 6) for s in found.shifts]),),
                log_x=True,
            )
        )
    if found.shares:
        x = [s.layer for s in found.shares]
        figures.append(
            Lines(
                "Share of position in the hidden states",
                "Which part of the variance of the hidden states is due to position alone, layer by layer; dashed, with the "
                "tokens of every text in random order: what remains there is position, what vanishes was word order.",
                "layer",
                "share",
                (
                    Series(
                        "position",
                        x,
                        [round(s.position, 5) for s in found.shares],
                        [round(s.position - 2 * s.error, 5) for s in found.shares],
                        [round(s.position + 2 * s.error, 5) for s in found.shares],
                    ),
                    Series("shuffled tokens", x, [round(s.shuffled, 5) for s in found.shares], dashed=True),
                ),
            )
        )
    if found.lengths:
        kind = found.lengths[0].kind
        figures.append(
            Lines(
                "Longer inputs",
                "Loss by length: it should fall, and not rise past the trained length."
                if kind == "loss"
                else "Cosine between the embedding of the shortest input and of longer ones that contain it; dashed, another text.",
                "length",
                kind,
                (
                    Series("this text", [n.length for n in found.lengths], [round(n.value, 5) for n in found.lengths]),
                    Series(
                        "scale",
                        [n.length for n in found.lengths],
                        [round(n.scale, 5) for n in found.lengths],
                        dashed=True,
                    ),
                ),
                log_x=True,
            )
        )
    if found.shuffle is not None:
        s = found.shuffle
        figures.append(
            Grid(
                "Shuffled words",
                "What word order is worth: the change when words are shuffled, against the scale of a different text or a "
                "uniform guess. Near 0, the model is a bag of words.",
                ("what", "in order", "shuffled", "change", "± error", "scale"),
                [
                    (
                        s.kind,
                        round(s.plain, 4),
                        round(s.shuffled, 4),
                        round(s.change, 4),
                        round(s.error, 4),
                        round(s.scale, 4),
                    )
                ],
            )
        )
    return Section("Behaviour", "What happens when positions or words are moved.", tuple(figures))
