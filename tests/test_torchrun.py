"""One run in several processes (torchrun, gloo): the losses of one process, and it survives as well."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from locant.experiments import folder
from locant.experiments.comparison import DATA, Comparison, where
from locant.experiments.workers import Local, do
from tests.test_survival import PRESET, STEPS, compared, numbers

# mlm: processes have unequal numbers of labels, sometimes none, and BERT's loss knows nothing of the other processes.
TASKS = {"clm": ["tisa"], "mlm": ["native"]}
SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    from locant.experiments import folder
    from locant.experiments.comparison import DATA, open_folder
    from locant.experiments.workers import do

    out, here, die_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    append = folder.append

    def appending(path, line):
        append(path, line)
        if line.get("step") == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    folder.append = appending
    do(open_folder(out).runs()[0], here, out / DATA)
    import torch
    assert not torch.distributed.is_initialized()
    print("ended", os.environ["RANK"])
"""


def together(tmp_path: Path, out: Path, here: Path, *, die_at: int = -1) -> subprocess.CompletedProcess:
    script = tmp_path / "together.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    return subprocess.run(
        [*command, str(out), str(here), str(die_at)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module", params=TASKS)
def alone(request, tmp_path_factory) -> tuple[Path, Comparison]:
    """The run in one process, without dropout."""
    out = tmp_path_factory.mktemp("alone") / "out"
    comparison = compared(out, TASKS[request.param], task=request.param)
    run = comparison.runs()[0]
    for _ in Local(1).work([(run, where(out, run))], out / DATA):
        pass
    return out, comparison


def test_two_processes_have_the_losses_of_one(alone, tmp_path):
    out, comparison = alone
    here = tmp_path / "run"
    kept = []
    if comparison.work.task == "clm":  # killed in the middle, and taken up again: both find the same checkpoint
        first = together(tmp_path, out, here, die_at=STEPS // 2 + 1)
        assert first.returncode != 0
        assert folder.state(here) == "begun"
        kept = numbers(here)
    second = together(tmp_path, out, here)
    assert second.returncode == 0, second.stderr
    assert sorted(second.stdout.split("\n"))[1:] == ["ended 0", "ended 1"]
    assert folder.state(here) == "done"
    assert folder.read_json(here / "run.json")["processes"] == 2
    assert not list(here.glob("checkpoint-*"))

    one, two = numbers(where(out, comparison.runs()[0])), numbers(here)
    assert two[: len(kept)] == kept
    assert len(one) == len(two) == STEPS + 3  # each written once
    for before, after in zip(one, two, strict=True):
        assert before.keys() == after.keys()
        if before["kind"] == "step":
            assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
            assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3)
            assert after["learning_rate"] == before["learning_rate"]
        elif before["kind"] == "test":
            assert after["values"] == pytest.approx(before["values"], rel=1e-5)
        else:
            assert after == before


def test_two_processes_that_diverge_say_so_once_and_end(tmp_path):
    out = tmp_path / "out"
    compared(out, ["tisa"], preset=f"{PRESET},scheme_rate=1e30")
    here = tmp_path / "run"
    ended = together(tmp_path, out, here)
    assert ended.returncode == 0, ended.stderr
    failed = json.loads((here / folder.FAILED).read_text())
    assert failed["final"]
    assert failed["reason"].startswith("the loss was nan at step ")


def test_a_batch_that_does_not_go_into_the_processes_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "out"
    comparison = compared(out, ["tisa"])
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="a batch of 4 does not go evenly into 3 processes"):
        do(comparison.runs()[0], tmp_path / "run", out / DATA)
    assert "a batch of 4" in folder.read_json(tmp_path / "run" / folder.FAILED)["reason"]


def test_a_comparison_is_not_started_twice_by_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one of 2 processes"):
        Local(1)
