"""The tasks: one file each, and the explicit dict that finds them by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from locant.experiments.tasks.algo import PUZZLES, Algo
from locant.experiments.tasks.glue import KINDS, Glue
from locant.experiments.tasks.language import Causal, Masked
from locant.experiments.tasks.squad import Squad
from locant.experiments.tasks.task import Evaluation, Task

TASKS: dict[str, Callable[[str], Task]] = {
    "clm": lambda detail: Causal(),
    "mlm": lambda detail: Masked(),
    "glue": Glue,
    "squad": lambda detail: Squad(),
    "algo": Algo,
}
"""First part of a task's name -> what makes the task from the rest: `glue:CoLA`, `algo:copy`."""

DETAILED: dict[str, tuple[str, ...]] = {"glue": tuple(KINDS), "algo": tuple(PUZZLES)}
"""Tasks that need a second part, and what it can be."""


def task(name: str) -> Task:
    kind, _, detail = name.partition(":")
    if kind not in TASKS:
        near = difflib.get_close_matches(kind, TASKS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown task {name!r}{hint}; there is: {', '.join(names())}")
    if kind in DETAILED:
        known = {each.lower(): each for each in DETAILED[kind]}
        if detail.lower() not in known:
            raise ValueError(f"{kind} needs one of its tasks, as {kind}:{DETAILED[kind][0]}; got {name!r}, "
                             f"there is: {', '.join(DETAILED[kind])}")  # fmt: skip
        detail = known[detail.lower()]
    elif detail:
        raise ValueError(f"{kind} takes nothing after a colon; got {name!r}")
    return TASKS[kind](detail)


def names() -> list[str]:
    return [f"{kind}:{'|'.join(DETAILED[kind])}" if kind in DETAILED else kind for kind in TASKS]


__all__ = ["DETAILED", "TASKS", "Evaluation", "Task", "names", "task"]
