"""One run over many mutants: which tests each of them meets, in which order, and the record of the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from reliability.mutants import results
from reliability.mutants.mapping import Reach, mirror, names, statement_lines, tests_of
from reliability.mutants.mutant import Mutant, digest
from reliability.mutants.reasons import reason_of
from reliability.mutants.results import Results
from reliability.mutants.runner import Tests

SECONDS = 25.0
"""CPU seconds of tests that a mutant meets at most."""
SECONDS_OF_KERNEL = 120.0
"""The same for a fault of the C kernel. The list is short, and some faults show in few parameters of one test."""
KERNEL = "src/locant/attention/fused.py"
"""Tests that run this file run the C kernel."""


def run(root: Path, mutants: Iterable[Mutant], kept: Results) -> None:
    """Runs mutants, grouped by their tests. Those with a result that holds are not run again."""
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(tests_of(root, mutant.path), []).append(mutant)
    for paths, members in groups.items():
        # In the order of a hash: an interrupted run has judged a random sample.
        waiting = sorted((mutant for mutant in members if unfinished(kept, mutant)), key=lambda each: digest(each.key))
        if not waiting:
            continue
        print(f"{len(waiting)} of {len(members)} mutants, tests: {', '.join(paths)}", flush=True)
        with Tests(root, paths) as tests:
            _run_group(tests, Order(root, tests.reach), waiting, kept)


def unfinished(kept: Results, mutant: Mutant) -> bool:
    """Whether a mutant has no result yet, or was excused for a reason that is gone."""
    found = kept.get(mutant)
    return found is None or (found.status == results.EXCUSED and reason_of(mutant) is None)


def _run_group(tests: Tests, order: Order, mutants: Sequence[Mutant], kept: Results) -> None:
    for count, mutant in enumerate(mutants, 1):
        if reason_of(mutant) is None:
            outcome = tests.judge(mutant, order.tests(mutant), order.imported(mutant))
            kept.add(mutant, outcome.status, outcome.by)
            order.learn(mutant, outcome.by)
        else:  # a survivor takes longer than all others
            kept.add(mutant, results.EXCUSED, "")
        if count % 50 == 0 or count == len(mutants):
            noticed = sum(kept.by_key[each.key].status in results.FOUND for each in mutants[:count])
            print(f"  {count} of {len(mutants)} mutants, {noticed} noticed", flush=True)


class Order:
    """The tests of a mutant, in the order in which they run."""

    def __init__(self, root: Path, reach: Reach) -> None:
        self.root, self.reach = root, reach
        self.killers: dict[str, list[str]] = {}  # function -> tests that noticed a mutant of it, the last one first
        self._sources: dict[str, str] = {}

    def learn(self, mutant: Mutant, test: str) -> None:
        """A test that has noticed one mutant of a function runs first on the next."""
        if test in self.reach.seconds:
            known = self.killers.setdefault(f"{mutant.path}:{mutant.function}", [])
            if test in known:
                known.remove(test)
            known.insert(0, test)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant, up to a limit, those first that have noticed others of the same function."""
        reaching = self._reaching(mutant)
        killers = [test for test in self.killers.get(f"{mutant.path}:{mutant.function}", ())[:5] if test in reaching]
        ordered = [*killers, *(test for test in self.reach.ordered(reaching, mutant.path) if test not in killers)]
        most = SECONDS_OF_KERNEL if mutant.path.endswith(".c") else SECONDS
        chosen: list[str] = []
        total = 0.0
        for test in ordered:
            if not chosen or total + self.reach.seconds[test] <= most:
                chosen.append(test)
                total += self.reach.seconds[test]
        return chosen

    def imported(self, mutant: Mutant) -> bool:
        """Whether the mutant must be in place when the library is imported: its line runs then."""
        if mutant.path.endswith(".c"):
            return False
        return mutant.runs_at_import or bool(self._lines(mutant) & self.reach.at_import.get(mutant.path, set()))

    def _reaching(self, mutant: Mutant) -> set[str]:
        if mutant.path.endswith(".c"):
            return self._of_file(KERNEL)
        spawning = self.reach.spawning & set(self.reach.seconds)  # coverage does not see what these reach
        own = {test for test in spawning if test.startswith(f"{mirror(mutant.path)}::")}
        if self.imported(mutant):  # any test of the file may notice it
            own_file = f"{mirror(mutant.path)}::"  # a test of a constant runs no line of the file
            about = {test for test in self.reach.seconds if names(test, mutant.path) or test.startswith(own_file)}
            return self._of_file(mutant.path) | about | own or set(self.reach.seconds)
        return self.reach.tests(mutant.path, self._lines(mutant)) | own or spawning

    def _of_file(self, path: str) -> set[str]:
        return self.reach.tests(path, self.reach.lines.get(path, {}))

    def _lines(self, mutant: Mutant) -> set[int]:
        source = self._sources.setdefault(mutant.path, (self.root / mutant.path).read_text())
        return set(statement_lines(source, mutant.line))
