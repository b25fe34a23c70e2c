"""The mutation runner: its lists still fit the source, and it notices a fault from end to end."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutmut is not installed; returns with locant[mutants]")

from reliability.mutants import results
from reliability.mutants.generating import mutants_of_file
from reliability.mutants.listed import PYTHON_FAULTS, listed_mutants
from reliability.mutants.listed_c import C_FAULTS
from reliability.mutants.mapping import mirror, statement_lines
from reliability.mutants.mutant import MODULE_LEVEL
from reliability.mutants.reasons import EQUIVALENT, PERFORMANCE, PLATFORM, REASONS, TUNING
from reliability.mutants.results import Result, Results

ROOT = Path(__file__).parents[2]


def test_every_listed_fault_is_in_the_source():
    mutants = list(listed_mutants(ROOT))
    assert len({mutant.key for mutant in mutants}) == len(mutants) == len(PYTHON_FAULTS) + len(C_FAULTS)
    assert len(C_FAULTS) >= 40


SOURCE = '''"""A module."""

from __future__ import annotations

__all__ = ["half"]
LIMIT: int = 3


def half(x: int, *, strict: bool = True) -> int:
    """Half of x."""
    assert x is not None
    if x > LIMIT:
        raise ValueError(f"too large: {x}" + " by far")
    return sum(
        a for a, _ in zip([x // 2], [0], strict=strict)
    )
'''


def test_mutants_of_a_file(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    mutants = list(mutants_of_file(tmp_path, "module.py"))
    changes = {mutant.new.strip() for mutant in mutants}
    assert {"LIMIT: int = 4", "if x >= LIMIT:", "a for a, _ in zip([x / 2], [0], strict=strict)"} <= changes
    assert not any(word in change for change in changes for word in ("XX", "__all__", "assert", "by far"))
    assert {mutant.function for mutant in mutants} == {"half", MODULE_LEVEL}
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    on_line = list(mutants_of_file(tmp_path, "module.py", {12}))
    assert on_line
    assert {mutant.line for mutant in on_line} == {12}
    (tmp_path / "module.py").write_text("# a line more\n" + SOURCE)
    assert {mutant.key for mutant in mutants_of_file(tmp_path, "module.py")} == {mutant.key for mutant in mutants}


def test_lines_of_a_statement():
    assert statement_lines(SOURCE, 12) == range(12, 13)
    assert statement_lines(SOURCE, 15) == range(14, 17)


def test_the_test_file_of_a_source_file():
    assert mirror("src/locant/attention/fused.c") == "tests/attention/test_fused.py"
    assert mirror("src/locant/terms.py") == "tests/test_terms.py"


@pytest.fixture
def project(tmp_path):
    """A project of one module; one of its functions has no test."""
    package, tests = tmp_path / "src" / "locant", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").write_text("")
    (package / "terms.py").write_text(
        "START = 9\n\n\n"
        "def odd(x):\n    while x > 3:\n        x -= 2\n    return x == 3\n\n\n"
        "def positive(x):\n    return x > 0\n\n\n"
        "def untested(x):\n    return x + 1\n\n\n"
        "def twice(x):\n    return x * 2\n"
    )
    (tests / "test_terms.py").write_text(
        "import subprocess, sys\n\nfrom locant import terms\n\n\n"
        "def test_odd():\n    assert terms.odd(terms.START)\n\n\n"
        "def test_positive():\n    assert terms.positive(2)\n    assert not terms.positive(-2)\n\n\n"
        "def test_twice_of_nothing():\n    assert terms.twice(0) == 0\n\n\n"
        "def test_twice_apart():\n"
        "    code = f'import runpy; assert runpy.run_path({terms.__file__!r})[\"twice\"](3) == 6'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    return tmp_path


RUN = """
import sys
from pathlib import Path
from reliability.mutants import campaign
from reliability.mutants.generating import mutants_of_file
from reliability.mutants.results import Results

root = Path(sys.argv[1])
campaign.tests_of = lambda root, path: ("tests/test_terms.py",)
mutants = [mutant for mutant in mutants_of_file(root, "src/locant/terms.py") if mutant.new.strip() in sys.argv[2:]]
campaign.run(root, mutants, Results(root / "results.csv"))
"""


def test_faults_are_noticed_from_end_to_end(project):
    """In a process of its own, which has not imported the library yet."""
    odd = Result(results.KILLED, "tests/test_terms.py::test_odd")
    expected = {
        "x = 2": odd,
        "START = 10": odd,  # runs when the module is imported
        "return x >= 0": Result(results.SURVIVED, "", "return x > 0 → return x >= 0"),
        "return x - 1": Result(results.SURVIVED, "", "return x + 1 → return x - 1"),
        "return x / 2": Result(
            results.KILLED, "tests/test_terms.py::test_twice_apart"
        ),  # by a process that a test starts
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project / "src"), str(ROOT)])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # three sessions of pytest start sooner without plugins
    command = [sys.executable, "-c", RUN, str(project), *expected]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = Results(project / "results.csv")
    mutants = {mutant.new.strip(): mutant for mutant in mutants_of_file(project, "src/locant/terms.py")}
    assert {change: kept.get(mutants[change]) for change in expected} == expected


def test_a_process_that_hangs_crashes_or_fails():
    """Run apart, in a fresh process: this one may have threads, and forking those is not safe."""
    script = """
import os, time
from reliability.mutants.processes import run_apart

def hang(announce):
    announce(0.1)
    time.sleep(60)

def loop(announce):
    announce(0.1)
    while True:
        pass

def wait(announce):  # the limit is CPU time: a busy machine may keep a process waiting
    announce(1.0)
    time.sleep(1.5)
    return "waited"

print(run_apart(lambda announce: 7), run_apart(hang), run_apart(loop), run_apart(wait), end=" ")
print(run_apart(lambda announce: os.abort()))
run_apart(lambda announce: 1 / 0)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "7 timeout timeout waited crash\n"
    assert "a forked process failed" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_reasons_belong_to_functions_that_exist():
    for reason in (each for each in REASONS if each.path.endswith(".py")):
        names = {part.name for part in ast.walk(ast.parse((ROOT / reason.path).read_text())) if hasattr(part, "name")}
        assert reason.function == MODULE_LEVEL or set(reason.function.split(".")) <= names, reason
        assert reason.kind in (EQUIVALENT, PERFORMANCE, PLATFORM, TUNING)
        assert re.search(reason.change, "no mutant") is None, "the pattern fits everything"
