"""Runs the claims of a paper in a folder: the steps that are not done, then the verdicts.

The folder records the preset, the version, the sizes and the rules before the first step. With other ones it is
refused, so a rule cannot change between a run and its verdict.

A claim with a stored finding is not run again, and of a step that is done the numbers are enough. So reproduction.json,
findings/ and steps/ are all that is needed to continue elsewhere. Models and texts of a finished step are made again
only if a step that is not done reads them.

Processes share the work through the folder: a step that one is doing is locked.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.experiments.statistics import Estimate
from locant.experiments.workers import cores
from locant.papers.claim import Claim, Measured, Paper, Part, Table
from locant.papers.cost import GPU, machine_speed
from locant.papers.place import FINDINGS, STEPS, Place
from locant.papers.sources import check_sources, check_texts, name_of_source
from locant.papers.steps import Step, unique
from locant.runs import files, machine_memory, run_folder
from locant.runs.budget import spell_time
from locant.runs.float32_products import fast_products
from locant.runs.new_folder import undone_on_failure
from locant.runs.untrusted import shortened
from locant.version import __version__

FILE = "reproduction.json"
FOLDERS = ("runs", "models", "texts", STEPS, FINDINGS)
LOCKS = ".locks"
"""Has a lock for every step that a process is doing."""
PAUSE = 1.0
"""Seconds before a process that waits for others looks again."""
NOT_RUN = "not run"
LONGEST = 48 * 3600.0
"""Seconds of estimated work beyond which a reproduction does not start unless it is told to."""


@dataclass(frozen=True)
class Finding:
    """What came out of one claim."""

    id: str
    verdict: str  # one of rules.VERDICTS, or NOT_RUN
    found: Measured | None = None
    seconds: float = 0.0  # of its steps; a step that several claims share counts for each
    problem: str = ""  # why it was not run


@dataclass(frozen=True)
class Planned:
    """The steps that a reproduction needs, and how long they take by the formula."""

    steps: tuple[Step, ...]
    left: tuple[Step, ...]  # those that will run
    seconds: float  # of those that are left, on this machine
    gpu_hours: float  # of all steps, on one A100


def begin(paper: Paper, preset: str, out: Path, data: Path | None, work: Path | None = None) -> Place:
    """Returns the place of a reproduction; ValueError if the folder belongs to another paper, preset or version.

    `work` is the folder of the steps if several papers share it.
    """
    if preset not in paper.sizes:
        raise ValueError(f"unknown preset {preset!r}; choose one of: {', '.join(paper.sizes)}")
    size = paper.sizes[preset]
    wanted: dict[str, Any] = {
        "paper": paper.name,
        "preset": preset,
        "version": __version__,
        "sizes": dataclasses.asdict(size),
        "rules": {claim.id: [criterion.words for criterion in claim.criteria] for claim in paper.claims},
    }
    run_folder.check(out, FILE, *FOLDERS)
    if (out / FILE).exists():
        there = files.read_json(out / FILE)
        wanted = json.loads(json.dumps(wanted))  # lists in place of tuples, as in the file
        differing = [
            f"{name}: {shortened(there.get(name))} there, {shortened(value)} now"
            for name, value in wanted.items()
            if there.get(name) != value
        ]
        if differing:
            raise ValueError(f"{out} holds another reproduction ({'; '.join(differing)}); name a new folder")
    else:
        with undone_on_failure(out):
            files.write_json(out / FILE, wanted)
    return Place(out, work or out, data, size)


def check_data(claims: Sequence[Claim], size: Any, data: Path | None) -> None:
    """Raises FileNotFoundError for data that is missing, with every file and where to get it, and ValueError for text
    that cannot be read."""
    names = [name_of_source(name, size) for claim in claims for name in claim.sources]
    check_sources(names, data)
    check_texts(names, data)


def plan(claims: Sequence[Claim], at: Place) -> Planned:
    """Returns the steps of the claims, and the time that the remaining ones take."""
    steps = unique(step for claim in claims for step in claim.steps(at))
    left = _left(claims, at)
    speed, slots = machine_speed(), cores()
    # A step in this process uses all cores, but small models gain little from more than one.
    seconds = sum(step.operations(at) / speed / (slots if step.parallel else 1.3) for step in left)
    return Planned(tuple(steps), tuple(left), seconds, sum(step.operations(at) for step in steps) / GPU / 3600)


def remaining(steps: Sequence[Step], at: Place) -> list[Step]:
    """Returns the steps that must run: those that are not done, and those whose models or texts these read and that
    have been deleted. A step comes after those that it reads."""
    wanted: set[str] = set()
    found = []
    for step in reversed(steps):
        if not is_done(step, at) or (step.name in wanted and not step.is_there(at)):
            found.append(step)
            wanted |= step.reads
    return found[::-1]


def hours_on_a_gpu(claim: Claim, at: Place) -> float:
    """Returns the hours of one A100 that the steps of a claim take, by the formula."""
    return sum(step.operations(at) for step in unique(iter(claim.steps(at)))) / GPU / 3600


def check_machine(planned: Planned, at: Place, *, long: bool) -> None:
    """Raises ValueError if the machine is too small, with the estimate."""
    free = machine_memory.available()
    for step in planned.left:
        needed = step.memory(at) * (cores() if step.parallel else 1)
        if free is not None and needed > free:
            raise ValueError(
                f"{step.name} needs about {machine_memory.spell(needed)} of memory and {machine_memory.spell(free)} is "
                f"free; choose a smaller preset or a larger machine"
            )
    if planned.seconds > LONGEST and not long:
        raise ValueError(
            f"this would take about {spell_time(planned.seconds)} on this machine ({planned.gpu_hours:.3g} hours of "
            f"one A100, by a formula); choose a smaller preset, or allow it with --long"
        )


OnStep = Callable[[Step, int, int], Callable[[float], None]]
OnWait = Callable[[list[Step]], None]


def _silent(step: Step, number: int, total: int) -> Callable[[float], None]:
    return lambda share: None


def run(
    claims: Sequence[Claim], at: Place, *, on_step: OnStep = _silent, on_wait: OnWait = lambda steps: None
) -> Iterator[Finding]:
    """Executes the steps and yields the finding of each claim as soon as its steps are done.

    Steps go claim by claim. Several processes can share a folder: each takes the next step that no other one is doing.
    `on_step` gets a step that begins, its number and the number of all steps, and returns a function that receives the
    share that is done. `on_wait` gets the steps that others are doing, when no other step is left. A claim whose step
    fails is not run; the others continue. A stored finding is yielded as it is.
    """
    waiting, failed = list(claims), dict[str, str]()
    total = len(_left(waiting, at))
    while waiting:
        for claim in list(waiting):
            finding = _decided(claim, at, failed)
            if finding is not None:
                waiting.remove(claim)
                yield finding
        left = _left(waiting, at)
        if left and not _do_next(left, at, failed, lambda step: on_step(step, total - len(left) + 1, total)):  # noqa: B023
            on_wait(left)
            time.sleep(PAUSE)


def _left(claims: Sequence[Claim], at: Place) -> list[Step]:
    return remaining(unique(step for claim in claims if not has_finding(claim, at) for step in claim.steps(at)), at)


def _decided(claim: Claim, at: Place, failed: Mapping[str, str]) -> Finding | None:
    """Returns the finding of a claim whose steps are all done, or of which one failed; None for the others."""
    if has_finding(claim, at):
        return _read(_finding(claim, at))
    left = remaining(unique(iter(claim.steps(at))), at)
    problem = next((step.name for step in left if step.name in failed), None)
    if problem is not None:
        return Finding(claim.id, NOT_RUN, problem=f"{problem} is not done: {failed[problem]}")
    return None if left else _store(at, _judge(claim, at))


def _do_next(
    left: Sequence[Step], at: Place, failed: dict[str, str], begin: Callable[[Step], Callable[[float], None]]
) -> bool:
    """Does the first step that can begin and that no other process is doing; False if there is none."""
    missing = {step.name for step in left}
    for step in left:
        if step.reads & missing:
            continue
        try:
            with run_folder.held(at.work / LOCKS / step.name):
                if is_done(step, at) and step.is_there(at):  # another process has just done it
                    return True
                try:
                    _do(step, at, begin(step))
                except (ValueError, RuntimeError, OSError, NotImplementedError) as problem:
                    failed[step.name] = str(problem)
                return True
        except run_folder.Busy:
            continue
    return False


def _judge(claim: Claim, at: Place) -> Finding:
    seconds = sum(float(files.read_json(at.mark(step.name))["seconds"]) for step in claim.steps(at))
    found = claim.measure(at)
    return Finding(claim.id, claim.verdict(found), found, seconds)


def _store(at: Place, finding: Finding) -> Finding:
    # In one line: the table of a heat map has 40,000 rows.
    found = json.dumps(dataclasses.asdict(finding), ensure_ascii=False)
    files.write(at.folder / FINDINGS / f"{finding.id}.json", found + "\n")
    return finding


def findings(paper: Paper, at: Place) -> dict[str, Finding]:
    """Returns the stored finding of every claim; NOT_RUN for those without."""
    return {
        claim.id: _read(_finding(claim, at)) if has_finding(claim, at) else Finding(claim.id, NOT_RUN)
        for claim in paper.claims
    }


def has_finding(claim: Claim, at: Place) -> bool:
    """Whether a claim has been tested in this folder."""
    return _finding(claim, at).exists()


def _finding(claim: Claim, at: Place) -> Path:
    return at.folder / FINDINGS / f"{claim.id}.json"


def _read(path: Path) -> Finding:
    data = files.read_json(path)
    try:
        inner = data["found"]
        parts = [Part(part["asks"], part["name"], Estimate(**part["effect"])) for part in inner["parts"]]
        tables = {name: Table(table["header"], table["rows"]) for name, table in inner["tables"].items()}
        return Finding(data["id"], data["verdict"], Measured(parts, tables, inner["sentences"]), data["seconds"])
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path} is damaged ({problem!r}); delete it and give the command again") from None


def is_done(step: Step, at: Place) -> bool:
    """Whether a step has been completed; ValueError if it was completed with other settings."""
    mark = at.mark(step.name)
    found = files.read_json(mark) if mark.exists() else {}
    if not found.get("done"):
        return False
    if found.get("digest", step.digest) != step.digest:  # marks of before have none
        raise ValueError(f"{mark} was made with other settings than those of today; delete it, or name a new folder")
    return True


def _do(step: Step, at: Place, progress: Callable[[float], None]) -> None:
    """Runs a step and writes its mark: whether it is done, the seconds of all attempts, and its numbers.

    A step that is done and runs again, because its models were deleted, keeps its numbers: claims may have read them.
    """
    mark, start = at.mark(step.name), time.monotonic()
    before = files.read_json(mark) if mark.exists() else {"done": False, "seconds": 0.0}
    numbers = None
    try:
        with fast_products():
            numbers = step.run(at, progress)
    finally:
        if not before["done"]:
            seconds = float(before["seconds"]) + time.monotonic() - start
            after: dict[str, Any] = {"done": numbers is not None, "digest": step.digest, "seconds": seconds,
                                     "numbers": numbers}  # fmt: skip
            files.write(mark, json.dumps(after, ensure_ascii=False) + "\n")
