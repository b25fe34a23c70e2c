"""One run in several processes (torchrun, gloo): the losses of one process, and it survives as well."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch

from locant.experiments.comparison import DATA, Comparison, where
from locant.experiments.workers import LocalWorkers, do_run
from locant.runs import files, run_folder
from tests.experiments.test_survival import PRESET, STEPS, compared, numbers

# mlm: processes have unequal numbers of labels, sometimes none, and BERT's loss knows nothing of the other processes.
TASKS = {"clm": ["tisa"], "mlm": ["native"]}
SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    import accelerate, torch
    from locant.experiments import trainer as training
    from locant.runs import files, run_folder
    from locant.experiments.comparison import DATA, open_folder
    from locant.experiments.workers import do_run

    out, here, die_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    append, make, states = files.append, training.make_trainer, accelerate.state.AcceleratorState

    def appending(path, line):
        append(path, line)
        if line.get("step") == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    files.append = appending

    # accelerate has FSDP for GPUs and the like alone; torch has it for CPUs too. This is the switch that it leaves off.
    begin = states.__init__

    def beginning(self, *args, fsdp_plugin=None, **rest):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **rest)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin
            accelerate.PartialState._shared_state["distributed_type"] = self.distributed_type

    states.__init__ = beginning

    def making(*args):
        global trainer
        trainer = make(*args)
        return trainer

    training.make_trainer = making
    do_run(open_folder(out).runs()[0], here, out / DATA)
    assert not torch.distributed.is_initialized()
    print("ended", os.environ["RANK"], type(next(trainer.model.parameters())).__name__)
"""
FSDP = """
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def together(there: Path, out: Path, here: Path, *, launcher=TORCHRUN, die_at=-1) -> subprocess.CompletedProcess:
    """The first run of a comparison in two processes, the first of which may be killed after a step."""
    (there / "together.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", *launcher, str(there / "together.py"), str(out), str(here), str(die_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module", params=TASKS)
def alone(request, tmp_path_factory) -> tuple[Path, Comparison]:
    """The run in one process, without dropout."""
    out = tmp_path_factory.mktemp("alone") / "out"
    comparison = compared(out, TASKS[request.param], task=request.param)
    run = comparison.runs()[0]
    for _ in LocalWorkers(1).work([(run, where(out, run))], out / DATA):
        pass
    return out, comparison


def test_two_processes_have_the_losses_of_one(alone, tmp_path):
    out, comparison = alone
    ended = together(tmp_path, out, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert {*ended.stdout.split("\n")} == {"ended 0 Parameter", "ended 1 Parameter", ""}
    assert_as_one(tmp_path / "run", where(out, comparison.runs()[0]))


@pytest.mark.parametrize("alone", ["clm"], indirect=True)
@pytest.mark.parametrize("sharded", [False, True], ids=["torchrun", "FSDP"])
def test_two_processes_are_killed_and_go_on_from_one_checkpoint(alone, tmp_path, sharded):
    out, comparison = alone
    here = tmp_path / "run"
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    launch = ["accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml"), "--main_process_port", "0"]
    launcher = launch if sharded else TORCHRUN
    first = together(tmp_path, out, here, launcher=launcher, die_at=STEPS // 2 + 1)
    assert first.returncode != 0
    assert run_folder.state(here) == "begun", first.stderr
    kept = numbers(here)
    assert len(kept) == STEPS // 2 + 1
    second = together(tmp_path, out, here, launcher=launcher)
    assert second.returncode == 0, second.stderr
    kind = "DTensor" if sharded else "Parameter"
    assert {*second.stdout.split("\n")} == {f"ended 0 {kind}", f"ended 1 {kind}", ""}
    assert numbers(here)[: len(kept)] == kept
    assert_as_one(here, where(out, comparison.runs()[0]))


def assert_as_one(here: Path, alone: Path) -> None:
    assert run_folder.state(here) == "done"
    assert files.read_json(here / "run.json")["processes"] == 2
    assert not list(here.glob("checkpoint-*"))
    one, two = numbers(alone), numbers(here)
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
    weights, trained = (safetensors.torch.load_file(each / "model.safetensors") for each in (alone, here))
    assert weights.keys() == trained.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-4)


def test_two_processes_that_diverge_say_so_once_and_end(tmp_path):
    out = tmp_path / "out"
    compared(out, ["tisa"], preset=f"{PRESET},scheme_rate=1e30")
    here = tmp_path / "run"
    ended = together(tmp_path, out, here)
    assert ended.returncode == 0, ended.stderr
    failed = json.loads((here / run_folder.FAILED).read_text())
    assert failed["final"]
    assert failed["reason"].startswith("the loss was nan at step ")


def test_a_batch_that_does_not_go_into_the_processes_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "out"
    comparison = compared(out, ["tisa"])
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="a batch of 4 does not divide evenly among 3 processes"):
        do_run(comparison.runs()[0], tmp_path / "run", out / DATA)
    assert "a batch of 4" in files.read_json(tmp_path / "run" / run_folder.FAILED)["reason"]


def test_a_comparison_is_not_started_twice_by_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one of 2 processes"):
        LocalWorkers(1)


def test_the_command_does_one_run_in_two_processes(tmp_path):
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    words = ["locant", "train", "clm", "tisa", "--data", str(tmp_path / "words.txt"), "--budget", "4steps", "--preset",
             "quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=256"]  # fmt: skip
    for name, start in (("two", [*TORCHRUN, "-m"]), ("one", [])):
        done = subprocess.run(
            [sys.executable, "-m", *start, *words, "-o", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("tisa, seed 0: loss") >= 1
    one, two = (
        [line["loss"] for line in files.lines(tmp_path / name / "runs/tisa.s0/metrics.jsonl") if line["kind"] == "step"]
        for name in ("one", "two")
    )
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)
