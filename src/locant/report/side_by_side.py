"""Two reports on one page: the same sections, with the figures of both models in each."""

from __future__ import annotations

from dataclasses import replace

from locant.report.data import line
from locant.report.figures import Figure, Lines, Series, SideBySide
from locant.report.page import Report, Section

Names = tuple[str, str]


def side_by_side(left: Report, right: Report) -> Report:
    """Returns one report on two models: figures of one title are put together, lines over the same axes overlaid."""
    names = (left.title, right.title) if left.title != right.title else (f"{left.title} (1)", f"{right.title} (2)")
    titles = dict.fromkeys(section.title for report in (left, right) for section in report.sections)
    sections = []
    for title in titles:
        ours, theirs = (_section(report, title) for report in (left, right))
        figures = tuple(_meet(mine, other, names) for mine, other in _matched(ours.figures, theirs.figures))
        sections.append(Section(title, _both(ours.intro, theirs.intro, names), figures))
    facts = {}
    for key in dict.fromkeys([*left.facts, *right.facts]):
        ours_is, theirs_is = left.facts.get(key, "–"), right.facts.get(key, "–")
        facts[key] = ours_is if ours_is == theirs_is else f"{ours_is} | {theirs_is}"
    return Report(
        title=" and ".join(names),
        subtitle=left.subtitle if left.subtitle == right.subtitle else f"{left.subtitle} | {right.subtitle}",
        verdict=_of_each(left.verdict, right.verdict, names),
        facts=facts,
        sections=tuple(sections),
        notices=_of_each(left.notices, right.notices, names),
    )


def _section(report: Report, title: str) -> Section:
    same = [section for section in report.sections if section.title == title]
    if len(same) > 1:
        raise ValueError(
            f"report {report.title!r} has {len(same)} sections {title!r}: titles must differ to be matched"
        )
    return same[0] if same else Section(title, "", ())


def _matched(ours: tuple[Figure, ...], theirs: tuple[Figure, ...]) -> list[tuple[Figure | None, Figure | None]]:
    """Matches figures of the same kind and title, in the order of `ours`; figures that only `theirs` has come last."""
    rest = list(theirs)
    matched: list[tuple[Figure | None, Figure | None]] = []
    for figure in ours:
        other = next((f for f in rest if type(f) is type(figure) and f.title == figure.title), None)
        if other is not None:
            rest = [f for f in rest if f is not other]
        matched.append((figure, other))
    return matched + [(None, figure) for figure in rest]


def _meet(left: Figure | None, right: Figure | None, names: Names) -> Figure:
    if isinstance(left, SideBySide) or isinstance(right, SideBySide):
        raise ValueError("a report that compares two models cannot be compared with a third: give two single reports")
    if isinstance(left, Lines) and isinstance(right, Lines) and _axes(left) == _axes(right):
        return replace(left, note=_both(left.note, right.note, names), series=_overlaid(left, right, names))
    some = left or right
    assert some is not None
    note = _both(left.note if left else "", right.note if right else "", names)
    return SideBySide(some.title, note, names[0], names[1], left, right)


def _axes(lines: Lines) -> tuple[str, str, bool, bool]:
    return lines.x_label, lines.y_label, lines.log_x, lines.log_y


def _overlaid(left: Lines, right: Lines, names: Names) -> tuple[Series, ...]:
    """The lines of both models. A line that is equal in both, such as a reference, appears once, without a model."""
    ours, theirs = ([line(series) for series in lines.series] for lines in (left, right))
    return (
        *(s if data in theirs else replace(s, group=names[0]) for s, data in zip(left.series, ours, strict=True)),
        *(replace(s, group=names[1]) for s, data in zip(right.series, theirs, strict=True) if data not in ours),
    )


def _both(ours: str, theirs: str, names: Names) -> str:
    if ours == theirs or not theirs:
        return ours
    return f"{names[0]}: {ours} {names[1]}: {theirs}" if ours else theirs


def _of_each(ours: tuple[str, ...], theirs: tuple[str, ...], names: Names) -> tuple[str, ...]:
    return tuple(f"{name}: {line}" for name, lines in zip(names, (ours, theirs), strict=True) for line in lines)
