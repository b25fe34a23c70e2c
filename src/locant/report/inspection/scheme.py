"""The scheme itself: its curves, its vectors, and the kernels of TISA."""

from __future__ import annotations

from locant.analysis.curve import Bank, Kernels
from locant.analysis.inspection import Inspection
from locant.report.figures import Cell, Figure, Grid, Heat, Lines, Series, Small, shortened
from locant.report.inspection.tensors import matrix
from locant.report.page import Section

TITLE = "The scheme itself"


def scheme_section(found: Inspection) -> Section:
    """Returns the section on the parameters of the scheme, as functions of the offset."""
    if not found.curves:
        return Section(TITLE, "", ())
    figures: list[Figure] = [_curves(found)]
    if found.kernels:
        figures += [_kernels(found.kernels), _parameters(found.kernels)]
    if found.banks:
        figures.append(_banks(found.banks))
    figures += [
        Heat(
            f"Vectors of {where}",
            "The vectors that queries are multiplied with: one row for each offset from −50 to 50 (first head). Rows "
            "near 0 differ from each other where training has used the offset. Far rows that are alike could as well "
            "be clipped.",
            "coordinate",
            "offset",
            list(range(-50, 51)),
            list(range(vectors.shape[1])),
            matrix(vectors),
            diverging=True,
        )
        for where, vectors in found.vectors[:1]
    ]
    return Section(TITLE, "The learned curves, computed from the parameters.", tuple(figures))


def _curves(found: Inspection) -> Small:
    panels: list[Lines | Heat] = []
    for where, curve in found.curves:
        heads = len(curve.values)
        names = [f"head {head}" for head in range(1, heads + 1)] if heads > 1 else ["every head"]
        series = (Series(name, curve.r, _short(line)) for name, line in zip(names, curve.values, strict=True))
        x = "offset" if curve.axis == "offset" else f"{curve.axis} of the query"
        panels.append(Lines(where, "", x, curve.what, tuple(series)))
    note = (
        "The effect of the scheme on the logit at each offset, per layer and head. Trained schemes have smooth curves "
        "that single out near offsets; a flat curve means that training has not used the scheme."
    )
    fields = {curve.field for _, curve in found.curves}
    if "levels" in fields:
        note += (
            " Levels depend on the tokens; the curves show tokens that are all the same, with hidden states of 0. "
            "Levels of a text add to that what its tokens differ in."
        )
    if "temperature" in fields:
        note += (
            " A temperature multiplies the whole logit of a query, by its position. It has a panel of its own, over "
            "positions, and is not in the other curves."
        )
    if "query_side" in fields or "key_side" in fields:
        note += (
            " Vectors that meet what is read of a token are shown by their norm; how a token mixes them is not in the "
            "curves."
        )
    return Small("Curves", note, tuple(panels), 3)


def _short(values: list[float]) -> list[float | None]:
    return [shortened(value) for value in values]


def _inside_a_logarithm(kernels: list[tuple[str, Kernels]]) -> bool:
    """Whether there is a TISA of the later version, whose steps are summed inside a logarithm."""
    return any(each.what == "inside the logarithm" for _, each in kernels)


def _kernels(kernels: list[tuple[str, Kernels]]) -> Small:
    panels: list[Lines | Heat] = []
    for where, each in kernels:
        for head, (total, alone) in enumerate(zip(each.total, each.kernels, strict=True), 1):
            parts = [Series(f"kernel {s}", each.r, _short(line), thin=True) for s, line in enumerate(alone, 1)]
            series = (Series("sum", each.r, _short(total)), *parts)
            panels.append(Lines(f"{where}, head {head}", "", "offset", each.what, series))
    note = "The kernels of each head, thin, and their sum f(r); one panel per head. "
    if _inside_a_logarithm(kernels):
        note += "The later version of TISA sums steps inside a logarithm; the sum shown here is the one inside. "
    note += (
        "Kernels with the same centre and width act as one; a kernel without height is not used. A narrow kernel near "
        "0 singles out neighbours, a wide one sets a range."
    )
    return Small("Kernels", note, tuple(panels), 6)


def _banks(banks: list[tuple[str, Bank]]) -> Small:
    panels: list[Lines | Heat] = []
    for where, bank in banks:
        series = (Series(f"curve {number}", bank.r, _short(line)) for number, line in enumerate(bank.curves, 1))
        panels.append(Lines(where, "", "offset", "added to the logit, per unit of the mixture", tuple(series)))
    note = (
        "The curves that every token mixes, by numbers read from its hidden state, to a bias over the offset of its "
        "own. Heads share the curves and differ in the mixture. Curves that look alike could be fewer; one that is "
        "flat carries no position."
    )
    return Small("Bank of curves", note, tuple(panels), 3)


def _parameters(kernels: list[tuple[str, Kernels]]) -> Grid:
    rows: list[list[Cell]] = []
    for where, each in kernels:
        for head, its in enumerate(zip(each.amplitude, each.sharpness, each.offset, strict=True), 1):
            rows += [
                [where, head, each.spec, s, round(a, 5), round(b, 5), round(c, 4)]
                for s, (a, b, c) in enumerate(zip(*its, strict=True), 1)
            ]
    step = ", or of a step |a|·sigmoid(±(r − c)/b), which falls where a is negative"
    return Grid(
        "Parameters of the kernels",
        f"Height a, sharpness |b| and centre c of every kernel a·exp(−|b|(r − c)²)"
        f"{step if _inside_a_logarithm(kernels) else ''}. A bump falls to half its height 0.83/√|b| tokens from c.",
        ("where", "head", "scheme", "kernel", "a", "|b|", "c"),
        rows,
    )
