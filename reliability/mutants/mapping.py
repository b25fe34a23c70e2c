"""Which tests run for a source file, and which of them reach a line."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ATTENTION = (
    "tests/attention", "tests/schemes", "tests/test_testing.py", "tests/test_spec.py", "tests/test_terms.py",
    "tests/cli/test_machine.py", "tests/cli/test_schemes.py",
)  # fmt: skip
TASKS = ("tests/experiments/tasks",)
SCORES = (
    "tests/experiments/test_statistics.py", "tests/experiments/test_results.py", "tests/experiments/test_averages.py",
)  # fmt: skip
TESTS = {
    "src/locant/terms.py": ATTENTION,
    "src/locant/schemes/*.py": ATTENTION,
    "src/locant/attention/*": ATTENTION,
    "src/locant/hf/*.py": ("tests/hf",),
    "src/locant/runs/*.py": ("tests/runs", "tests/attention/test_build.py", "tests/experiments/tasks/test_glue.py"),
    "src/locant/experiments/statistics.py": SCORES,
    "src/locant/experiments/results.py": SCORES,
    "src/locant/experiments/averages.py": SCORES,
    "src/locant/experiments/tasks/squad.py": TASKS,
    "src/locant/experiments/tasks/glue.py": TASKS,
    "src/locant/experiments/trainer.py": ("tests/experiments/test_trainer.py",),
}
"""Source files in scope -> the tests of their mutants. tests/reliability/test_fuzz.py joins those of attention."""
NOT_MUTATED = ("src/locant/attention/triton/*",)
"""Their tests need Triton, which has an environment of its own (`make gpu-proof`)."""
FUZZ = "tests/reliability/test_fuzz.py"
CHEAP = 0.03
"""CPU seconds of a test that a mutant of its source file always meets."""


def files_in_scope(root: Path) -> list[str]:
    """The Python files that are mutated."""
    found = (str(path.relative_to(root)) for path in sorted((root / "src/locant").rglob("*.py")))
    return [path for path in found if _matches(path, TESTS) and not _matches(path, NOT_MUTATED)]


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def tests_of(root: Path, path: str) -> tuple[str, ...]:
    """The test files and folders of a source file."""
    tests = next(tests for pattern, tests in TESTS.items() if fnmatch.fnmatch(path, pattern))
    return (*tests, FUZZ) if tests is ATTENTION and (root / FUZZ).exists() else tests


def mirror(path: str) -> str:
    """The test file of a source file, by the layout of the repository."""
    folder, _, name = path.removeprefix("src/locant/").rpartition("/")
    return "/".join(part for part in ("tests", folder, f"test_{name.rpartition('.')[0]}.py") if part)


def names(test: str, path: str) -> bool:
    """Whether the parameters of a test name a source file: test_defaults[rope] is about rope.py."""
    return path.rpartition("/")[2].partition(".")[0] in test.partition("[")[2]


@dataclass
class Reach:
    """What one run of the tests showed: how long each took, and which lines it ran."""

    seconds: dict[str, float] = field(default_factory=dict)  # of CPU time, of the tests that passed
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)  # source file -> line -> tests
    spawning: set[str] = field(default_factory=set)  # tests that start other processes
    at_import: dict[str, set[int]] = field(default_factory=dict)  # source file -> lines that ran outside of tests

    def add(self, other: Reach) -> None:
        """Adds what another run showed."""
        self.seconds |= other.seconds
        self.spawning |= other.spawning
        for path, by_line in other.lines.items():
            for line, tests in by_line.items():
                self.lines.setdefault(path, {}).setdefault(line, []).extend(tests)
        for path, lines in other.at_import.items():
            self.at_import.setdefault(path, set()).update(lines)

    def tests(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that run one of the lines."""
        by_line = self.lines.get(path, {})
        return {test for line in lines for test in by_line.get(line, ()) if test in self.seconds}

    def ordered(self, tests: set[str], path: str) -> list[str]:
        """The tests of a source file in the order in which they run: one of each test function, then the next of each.

        Tests of one function with different parameters mostly notice the same mutants. First are those in the test file
        of the source file, then fast ones. Of the parameters of a test, those that name the source file are first.
        Cheap tests in the test file of the source file do not wait for their turn: a list of wrong arguments is one
        test function, and each mutant of a check is noticed by one of its parameters alone.
        """
        own = mirror(path)
        by_function: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (not names(test, path), self.seconds[test], test)):
            by_function.setdefault(test.partition("[")[0], []).append(test)

        def turn(index: int, test: str) -> int:
            if test.startswith(own) and self.seconds[test] <= CHEAP:
                return 0
            return index // 4 if names(test, path) else index

        ranked = [
            (turn(index, test), not test.startswith(own), self.seconds[test], test)
            for each in by_function.values()
            for index, test in enumerate(each)
        ]
        return [test for *_, test in sorted(ranked)]


def statement_lines(source: str, line: int) -> range:
    """The lines of the innermost statement around a line, without the statements inside it."""
    best: range | None = None
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.stmt, ast.excepthandler)) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        body = [part for name in ("body", "orelse", "finalbody", "handlers") for part in getattr(node, name, [])]
        end = min([part.lineno for part in body], default=(node.end_lineno or 0) + 1)
        found = range(node.lineno, max(end, node.lineno + 1))
        if best is None or found.start >= best.start:
            best = found
    return best or range(line, line + 1)


def test_files(root: Path, paths: Iterable[str]) -> list[str]:
    """The test files among files and folders."""
    found = [
        file for path in paths for file in ([root / path] if path.endswith(".py") else (root / path).rglob("*.py"))
    ]
    return [str(file.relative_to(root)) for file in sorted(found) if file.name.startswith("test_")]


def cached_reach(root: Path, test_file: str) -> tuple[Path, Reach | None]:
    """The file in which the reach of a test file is kept, and its content if sources and tests are unchanged."""
    helpers = [file for file in (root / "tests").rglob("*.py") if not file.name.startswith("test_")]
    sources = [file for suffix in ("*.py", "*.c") for file in (root / "src").rglob(suffix)]
    state = hashlib.sha256()
    for file in sorted([*sources, *helpers, root / test_file]):
        state.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    kept = root / "build" / "mutants" / f"{test_file.replace('/', '.')}-{state.hexdigest()[:16]}.pickle"
    return kept, pickle.loads(kept.read_bytes()) if kept.exists() else None
