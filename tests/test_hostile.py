"""The hostile inputs of reliability/hostile: each is refused in words, within 2 s and 1 GiB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CODE = """
import json, os, time
from dataclasses import asdict
from reliability.hostile import __main__ as hostile
from reliability.hostile.case import Case

def refuse(folder): raise ValueError("no")
def burn(folder):
    end = time.process_time() + 1.2
    while time.process_time() < end: pass
    refuse(folder)

wrong = [
    Case("accepted", "", lambda folder: None), Case("not in words", "", lambda folder: {}["x"]),
    Case("other words", "yes", refuse), Case("slow", "", burn),
    Case("large", "", lambda folder: [bytearray(2**27), refuse(folder)]),
    Case("blocked", "", lambda folder: time.sleep(60)), Case("dead", "", lambda folder: os._exit(1)),
    Case("code", "", lambda folder: [os.mkdir("was-run"), refuse(folder)]), Case("refused", "no", refuse),
]
limits = hostile.SECONDS, hostile.BYTES, hostile.PATIENCE
hostile.SECONDS, hostile.BYTES, hostile.PATIENCE = 1.0, 2**26, 5.0
print(json.dumps([asdict(outcome) for outcome in hostile.run(wrong)]), flush=True)
hostile.SECONDS, hostile.BYTES, hostile.PATIENCE = limits
hostile.main()
"""
"""First cases that are not as they should be, to see that they are noticed; then all cases. One process: its imports
take longer than many cases."""


@pytest.fixture(scope="module")
def outcomes():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) > 100, done.stderr
    return lines


@pytest.mark.slow
def test_every_hostile_input_is_refused_in_words(outcomes):
    assert len({outcome["name"] for outcome in outcomes[1:]}) == len(outcomes) - 1 > 300
    assert [outcome for outcome in outcomes[1:] if outcome["problem"]] == []


@pytest.mark.slow
def test_what_is_not_refused_is_noticed(outcomes):
    problems = {outcome["name"]: outcome["problem"] for outcome in outcomes[0]}
    assert "nothing was refused" in problems["accepted"]
    assert "KeyError" in problems["not in words"]
    assert "does not say 'yes'" in problems["other words"]
    assert problems["slow"].endswith(" s")
    assert "MiB" in problems["large"]
    assert "blocked" in problems["blocked"]
    assert "died" in problems["dead"]
    assert "foreign code" in problems["code"]
    assert problems["refused"] == ""
