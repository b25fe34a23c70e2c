"""The tasks: one file each, and the dict that finds them by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from locant import imports
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
"""First part of a task's name -> constructor, called with the rest of the name: `glue:CoLA`, `algo:copy`."""

DETAILED: dict[str, tuple[str, ...]] = {"glue": tuple(KINDS), "algo": tuple(PUZZLES)}
"""Tasks whose name needs a second part -> its values."""


def find_task(name: str) -> Task:
    """Returns the task of a name such as `clm` or `glue:CoLA`, or one of imported code, by its `name`.

    Upper and lower case of the second part are the same.
    """
    own = {cls.name: cls for cls in imports.defined(Task)}
    if name in own and name not in TASKS:
        found: Task = own[name]()
        return found
    kind, _, detail = name.partition(":")
    if kind not in TASKS:
        near = difflib.get_close_matches(kind, TASKS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown task {name!r}{hint}; choose one of: {', '.join(task_names())}; a task of your "
                         "own needs its file: imports='FILE.py'")  # fmt: skip
    if kind in DETAILED:
        known = {each.lower(): each for each in DETAILED[kind]}
        if detail.lower() not in known:
            raise ValueError(f"{kind} needs one of its tasks, as {kind}:{DETAILED[kind][0]}; got {name!r}; "
                             f"choose one of: {', '.join(DETAILED[kind])}")  # fmt: skip
        detail = known[detail.lower()]
    elif detail:
        raise ValueError(f"{kind} takes nothing after a colon; got {name!r}")
    return TASKS[kind](detail)


def task_names() -> list[str]:
    """Returns the names of all tasks: `clm`, …, `algo:copy|reverse|…`."""
    return [f"{kind}:{'|'.join(DETAILED[kind])}" if kind in DETAILED else kind for kind in TASKS]


__all__ = ["DETAILED", "TASKS", "Evaluation", "Task", "find_task", "task_names"]
