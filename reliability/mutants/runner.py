"""Runs tests on mutants in forked processes.

This process imports torch, transformers and pytest, and neither the library nor the tests. From here on there are two
ways. A server is forked that collects the tests once; for each mutant it forks a process that replaces the code of one
function and runs the tests. A mutant whose line runs at import needs a process forked from here, which imports
the library with the mutant and collects the tests again.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reliability.mutants.applying import (
    compile_instead,
    functions_by_code,
    import_everywhere,
    import_instead,
    replace_code,
)
from reliability.mutants.mapping import Reach, cached_reach, test_files
from reliability.mutants.mutant import Mutant
from reliability.mutants.processes import CRASH, TIMEOUT, end, run_apart, start_apart

PRELOADED = (
    "torch", "torch._dynamo", "transformers", "numpy", "pytest", "hypothesis", "safetensors.torch", "scipy.stats",
    "sklearn.metrics", "torchmetrics", "datasets", "accelerate", "peft", "coverage",
)  # fmt: skip
"""Imported before the first fork."""
PYTEST = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:faulthandler",
    "-W",
    "ignore::pytest.PytestWarning",
)
SLACK = 20.0
"""Seconds that any test may take on a mutant, besides 20 times the CPU time that it takes without."""
KILLED, SURVIVED, UNREACHED, IMPORT = "killed", "survived", "unreached", "import"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: KILLED, TIMEOUT, SURVIVED or UNREACHED (no test runs the line), and by which test."""

    status: str
    by: str = ""


def preload() -> None:
    """Imports everything that tests need except the library, in one thread, as forked processes need it."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in PRELOADED:
        importlib.import_module(name)
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    # Failing examples of a mutant must not reach the database of the real tests; the same examples for every mutant.
    settings.register_profile("mutants", database=None, deadline=None, derandomize=True)
    settings.load_profile("mutants")
    if threading.active_count() > 1:
        raise RuntimeError(f"cannot fork: an import has started threads: {threading.enumerate()}")


class Tests:
    """Some test files, ready to run on mutants. A context: the server ends with it."""

    def __init__(self, root: Path, paths: tuple[str, ...]) -> None:
        self.root, self.paths = root, paths
        self.temporary = tempfile.TemporaryDirectory(prefix="locant-mutants-")
        self.folder = Path(self.temporary.name)
        self.trusted: set[str] = set()  # tests that have noticed a mutant and passed the control
        self.reach = self._measured()
        self.process, self.connection = start_apart(self._serve)
        if self.connection.recv() != "ready":
            raise RuntimeError(f"cannot collect {', '.join(paths)}")

    def __enter__(self) -> Tests:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        end(self.process)
        self.temporary.cleanup()

    def judge(self, mutant: Mutant, tests: Sequence[str], imported: bool) -> Outcome:
        """Runs tests on a mutant until one fails. `imported`: the mutant must be there when the library is imported."""
        if not tests:
            return Outcome(UNREACHED)
        result = IMPORT if imported else self._ask(mutant, tests)
        if result == IMPORT:
            result = run_apart(lambda announce: self._import_and_run(mutant, tests, announce))
        if result in (TIMEOUT, CRASH):
            return Outcome(TIMEOUT if result == TIMEOUT else KILLED, result)
        if result in tests and not self._passes_without_a_mutant(tests[: tests.index(result) + 1]):
            return self.judge(mutant, [test for test in tests if test != result], imported)
        return Outcome(KILLED, result) if result else Outcome(SURVIVED)

    def _passes_without_a_mutant(self, tests: Sequence[str]) -> bool:
        """The control: whether the last of these tests passes in this order. If not, it is not used again."""
        test = tests[-1]
        if test not in self.trusted:
            if self._ask(None, tests):
                self.reach.seconds.pop(test, None)
                return False
            self.trusted.add(test)
        return True

    def _ask(self, mutant: Mutant | None, tests: Sequence[str]) -> Any:
        self.connection.send((mutant, list(tests)))
        return self.connection.recv()

    # ---- in forked processes -----------------------------------------------------------------------

    def _measured(self) -> Reach:
        """The reach of all test files, each measured in a process of its own and kept until it changes."""
        whole = Reach()
        for test_file in test_files(self.root, self.paths):
            kept, reach = cached_reach(self.root, test_file)
            if reach is None:
                reach = run_apart(lambda announce, test_file=test_file: self._measure(test_file, announce))
                if not isinstance(reach, Reach):
                    raise RuntimeError(f"{test_file} does not run without a mutant: {reach}")
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(pickle.dumps(reach))
            whole.add(reach)
        return whole

    def _measure(self, test_file: str, announce: Callable[[float], None]) -> Reach:
        import coverage

        source = self.root / "src" / "locant"
        measuring = coverage.Coverage(data_file=None, config_file=False, include=[f"{source}/*"])
        reach = Reach()
        with measuring.collect():
            self._pytest([test_file], _Measurement(measuring, reach, announce))
        data = measuring.get_data()
        for file in data.measured_files():
            path = str(Path(file).relative_to(self.root))
            for line, contexts in data.contexts_by_lineno(file).items():
                reach.lines.setdefault(path, {})[line] = [name for name in contexts if name]
                if "" in contexts:
                    reach.at_import.setdefault(path, set()).add(line)
        return reach

    def _serve(self, connection: Connection) -> None:
        self._pytest(self.paths, _Server(self, connection))

    def _import_and_run(self, mutant: Mutant, tests: Sequence[str], announce: Callable[[float], None]) -> str:
        import_instead(self.root, mutant)
        import_everywhere(self.root, mutant, self.folder)
        plugin = _Run(self, tests, announce)
        self._pytest(sorted({test.partition("::")[0] for test in tests}), plugin)
        return plugin.failed if plugin.ran else "collecting the tests"

    def _pytest(self, paths: Sequence[str], plugin: object) -> None:
        import pytest

        os.chdir(self.root)
        pytest.main([*PYTEST, *paths], plugins=[plugin])


def cpu_seconds() -> float:
    """The time of this process and of those that it started and that ended: it does not depend on other programs."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def limit(seconds: float) -> float:
    """How long a test may take on a mutant. Generous: the machine may be busy, and only endless loops are meant."""
    return SLACK + 20 * seconds


class _Running:
    """A plugin of pytest that runs some tests until one fails."""

    def __init__(self, reach: Reach) -> None:
        self.reach, self.failed = reach, ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def run(self, items: Sequence[Any], announce: Callable[[float], None]) -> str:
        for item, following in zip(items, [*items[1:], None], strict=True):
            announce(limit(self.reach.seconds[item.nodeid]))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return self.failed


class _Run(_Running):
    """Runs the given tests in place of all."""

    def __init__(self, tests: Tests, wanted: Sequence[str], announce: Callable[[float], None]) -> None:
        super().__init__(tests.reach)
        self.wanted, self.announce, self.ran = wanted, announce, False

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:
            return True
        items = {item.nodeid: item for item in session.items}
        if any(test not in items for test in self.wanted):  # the mutant changed the parameters of the tests
            return True
        self.ran = True
        self.run([items[test] for test in self.wanted], self.announce)
        return True


class _Server(_Running):
    """Collects the tests, then runs them on the mutants that it receives, each in a process of its own."""

    def __init__(self, tests: Tests, connection: Connection) -> None:
        super().__init__(tests.reach)
        self.root, self.folder, self.connection = tests.root, tests.folder, connection

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = functions_by_code(self.root / "src" / "locant")

        def judge(mutant: Mutant | None, tests: Sequence[str], announce: Callable[[float], None]) -> str:
            if mutant is None:
                pass
            elif mutant.path.endswith(".c"):
                compile_instead(mutant, self.folder)
            elif not replace_code(self.root, mutant, functions):
                return IMPORT
            else:
                import_everywhere(self.root, mutant, self.folder)
            return self.run([items[test] for test in tests], announce)

        self.connection.send("ready")
        while True:
            try:
                mutant, tests = self.connection.recv()
            except EOFError:
                return True
            self.connection.send(run_apart(lambda announce, mutant=mutant, tests=tests: judge(mutant, tests, announce)))


class _Measurement:
    """Runs all tests once without a mutant: how long they take, whether they pass, and what they reach."""

    def __init__(self, measuring: Any, reach: Reach, announce: Callable[[float], None]) -> None:
        self.measuring, self.reach, self.announce = measuring, reach, announce
        self.unusable: set[str] = set()
        self.running = ""
        sys.addaudithook(self._notice)

    def _notice(self, event: str, arguments: object) -> None:
        if event == "subprocess.Popen" and self.running:
            self.reach.spawning.add(self.running)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":  # skipped, or failed: it tells nothing about a mutant
            self.unusable.add(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            self.announce(300)
            self.running = item.nodeid
            self.measuring.switch_context(item.nodeid)
            start = cpu_seconds()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.reach.seconds[item.nodeid] = cpu_seconds() - start
        self.measuring.switch_context("")
        for test in self.unusable:
            self.reach.seconds.pop(test, None)
        return True
