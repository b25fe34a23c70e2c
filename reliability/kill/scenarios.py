"""What can happen to a command besides a kill: another one in its folder, a full or read-only disk, a wrong clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from reliability.kill import clock, places
from reliability.kill.campaign import Reference
from reliability.kill.moments import file_appears
from reliability.kill.outcome import LEFT_OUT, Case
from reliability.kill.processes import Command, Wrong, finish

NO_MOUNT = f"{LEFT_OUT}: it needs the right to mount"
NO_COMPILER = f"{LEFT_OUT}: it needs a C compiler"
ROOM = (0.02, 0.3)
"""Free space at the start, as a share of what an undisturbed command leaves in its folder."""
CHECKPOINT, MODEL = "whole checkpoint", "model"
"""Moments that both commands have."""

Story = Callable[[Reference, Path], str]
"""Does something to a folder and the commands in it; returns what had been reached then."""


def all_cases(references: Sequence[Reference], folder: Path) -> Iterator[Case]:
    """Yields all cases, one after the other."""
    for reference in references:
        here = folder / reference.subject.name
        for scenario in (two_at_once, full_disk, read_only_folder, clock_set_back):
            yield from scenario(reference, here)


def case(scenario: str, reference: Reference, detail: str, moment: str, out: Path, story: Story) -> Case:
    """Lets a story happen to a folder, gives the command until it is done, and compares the results."""
    reached, starts = "", 0
    try:
        reached = story(reference, out)
        starts = finish(reference.subject, out)
        outcome = reference.outcome(out)
    except Wrong as problem:
        outcome = str(problem)
    return Case(scenario, reference.subject.name, detail, moment, reached, starts, outcome)


def disturbed(reference: Reference, out: Path, name: str, environment: dict[str, str] | None = None) -> Command:
    """Starts a command and returns it when a file appears."""
    command = Command(reference.subject, out, environment)
    file_appears(reference.subject, name).wait(command)
    return command


# ---- two commands at once ----


def two_at_once(reference: Reference, folder: Path) -> Iterator[Case]:
    """Two commands of the same folder start together; then again, and one of them is killed."""
    yield case("two at once", reference, "both go on", "start", folder / "two", _both)
    yield case("two at once", reference, "one is killed", MODEL, folder / "two, one killed", _one_is_killed)


def _both(reference: Reference, out: Path) -> str:
    commands = [Command(reference.subject, out) for _ in range(2)]
    for command in commands:
        code, said = command.wait(), command.said()
        # Comparers share the work. The second of two adaptations is refused.
        if code and "another process is working in" not in said:
            raise Wrong(f"exit code {code}: {said[-300:]}")
    return reference.subject.reached(out)


def _one_is_killed(reference: Reference, out: Path) -> str:
    first, second = Command(reference.subject, out), disturbed(reference, out, MODEL)
    reached = reference.subject.reached(out)
    first.process.kill()
    first.wait()
    second.wait()
    return reached


# ---- full disk ----


def full_disk(reference: Reference, folder: Path) -> Iterator[Case]:
    """A disk that is full after a share of what the command writes, and one that something else fills meanwhile."""
    if not places.can_mount(folder / "disk"):
        yield Case("full disk", reference.subject.name, "", "", "", 0, NO_MOUNT)
        return
    size = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    stories = [("full at the start", f"{share:.0%} free", partial(_too_small, int(share * size))) for share in ROOM]
    stories += [("filled meanwhile", name, partial(_filled, name)) for name in (CHECKPOINT, MODEL)]
    for detail, moment, story in stories:
        with places.small_disk(folder / "disk") as disk:
            yield case("full disk", reference, detail, moment, disk.folder / "out", partial(story, disk))


def _too_small(free: int, disk: places.Disk, reference: Reference, out: Path) -> str:
    disk.fill(free)
    return _fails_in_words(Command(reference.subject, out), disk)


def _filled(name: str, disk: places.Disk, reference: Reference, out: Path) -> str:
    command = disturbed(reference, out, name)
    disk.fill(0)
    return _fails_in_words(command, disk)


def _fails_in_words(command: Command, disk: places.Disk) -> str:
    """Waits for the end of a command on a full disk, and makes room."""
    code, said = command.wait(), command.said()
    reached = command.subject.reached(command.out)
    disk.free()
    command.check_alone()
    if "Traceback" in said:
        raise Wrong(f"a traceback: {said[-300:]}")
    if not command.subject.done(command.out, code) and "No space left" not in said and "disk is full" not in said:
        raise Wrong(f"no word about the disk: {said[-300:]}")
    return reached


# ---- read-only folder ----


def read_only_folder(reference: Reference, folder: Path) -> Iterator[Case]:
    """A folder that is read-only before the command begins, and one that is read-only when it is continued."""
    if not places.can_mount(folder / "disk"):
        yield Case("read-only folder", reference.subject.name, "", "", "", 0, NO_MOUNT)
        return
    yield case("read-only folder", reference, "new", "start", folder / "read-only, new", _new)
    yield case("read-only folder", reference, "begun", CHECKPOINT, folder / "read-only, begun", _begun)


def _new(reference: Reference, out: Path) -> str:
    out.mkdir(parents=True)
    return _refused(reference, out)


def _begun(reference: Reference, out: Path) -> str:
    disturbed(reference, out, CHECKPOINT).kill_all()
    return _refused(reference, out)


def _refused(reference: Reference, out: Path) -> str:
    with places.read_only(out):
        command = Command(reference.subject, out)
        code, said = command.wait(), command.said()
        command.check_alone()
    if code == 0 or "Traceback" in said or "Read-only file system" not in said:
        raise Wrong(f"exit code {code}: {said[-300:]}")
    return reference.subject.reached(out)


# ---- clock set back ----


def clock_set_back(reference: Reference, folder: Path) -> Iterator[Case]:
    """The clock goes back by a day between a kill and the next command, and while the command runs."""
    yield case("clock set back", reference, "after a kill", CHECKPOINT, folder / "clock, killed", _continued)
    library = clock.build(folder)
    if library is None:
        yield Case("clock set back", reference.subject.name, "while it runs", "", "", 0, NO_COMPILER)
        return
    for name in (CHECKPOINT, MODEL):
        story = partial(_runs_on, name, library)
        yield case("clock set back", reference, "while it runs", name, folder / f"clock, {name}", story)


def _continued(reference: Reference, out: Path) -> str:
    disturbed(reference, out, CHECKPOINT).kill_all()
    clock.move_to_tomorrow(out)
    return reference.subject.reached(out)


def _runs_on(name: str, library: Path, reference: Reference, out: Path) -> str:
    sign = out.with_suffix(".sign")
    command = disturbed(reference, out, name, clock.set_back_by(sign, library))
    sign.touch()
    clock.move_to_tomorrow(out)
    reached, code = reference.subject.reached(out), command.wait()
    if not reference.subject.done(out, code):
        raise Wrong(f"exit code {code}: {command.said()[-300:]}")
    return reached
