"""One run in several processes (torchrun, gloo): the losses of one process, and it survives as well.

torchrun's agent starts the processes from the fork server, so that they have imported everything. The last test gives
the command `torchrun`.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from locant.experiments import fork_server
from locant.experiments.comparison import DATA, open_folder, where
from locant.experiments.workers import LocalWorkers, do_run
from locant.runs import files, run_folder
from tests.command_line import locant_command
from tests.experiments.processes import PRESET, STEPS, compared, complete, numbers, together

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


def launched(there: Path, out: Path, here: Path, *, die_at=-1, environment=None) -> tuple[dict[int, tuple] | None, str]:
    """The first run of a comparison in two processes, the first of which may be killed after a step.

    Returns what each process returns (see `together`), None where one failed, and all that they printed.
    """
    fork_server.start()
    logs = there / f"logs-{uuid.uuid4().hex}"
    logs.mkdir()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=uuid.uuid4().hex, max_restarts=0, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        found = elastic_launch(config, together)(out, here, die_at, environment or {})
    except ChildFailedError:
        found = None
    finally:
        for number, handler in handlers.items():  # the agent sets its own
            signal.signal(number, handler)
    printed = "\n".join(path.read_text() for path in sorted(logs.rglob("*.log")))
    return found, printed


ALONE = ("Parameter", [])
"""No thread of gloo is left: one that still works when Python shuts down aborts the process."""


def sharding(there: Path) -> dict[str, str]:
    """What `accelerate launch` adds to the environment of a process, for FSDP."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env

    (there / "fsdp.yaml").write_text(FSDP)
    given = launch_command_parser().parse_args(["--config_file", str(there / "fsdp.yaml"), "script.py"])
    found = prepare_multi_gpu_env(_validate_launch_command(given)[0])
    return {key: value for key, value in found.items() if os.environ.get(key) != value}


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    """Processes have unequal numbers of labels, sometimes none, and BERT's loss knows nothing of other processes."""
    out = tmp_path_factory.mktemp("masked") / "out"
    complete(out, compared(out, ["native"], task="mlm"))
    return out


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_two_processes_have_the_losses_of_one(task, tmp_path, request):
    out = request.getfixturevalue("whole" if task == "clm" else "masked")
    found, printed = launched(tmp_path, out, tmp_path / "run")
    assert found is not None, printed
    assert found == {0: ALONE, 1: ALONE}
    assert_as_one(tmp_path / "run", where(out, open_folder(out).runs()[0]))


@pytest.mark.parametrize("sharded", [False, True], ids=["torchrun", "FSDP"])
def test_two_processes_are_killed_and_go_on_from_one_checkpoint(whole, tmp_path, sharded):
    here = tmp_path / "run"
    environment = sharding(tmp_path) if sharded else None
    found, printed = launched(tmp_path, whole, here, die_at=STEPS // 2 + 1, environment=environment)
    assert found is None
    assert run_folder.state(here) == "begun", printed
    kept = numbers(here)
    assert len(kept) == STEPS // 2 + 1
    found, printed = launched(tmp_path, whole, here, environment=environment)
    assert found is not None, printed
    if sharded:  # torch caches the layout of sharded tensors, and with it the process group and its threads
        assert {rank: kind for rank, (kind, _) in found.items()} == {0: "DTensor", 1: "DTensor"}
    else:
        assert found == {0: ALONE, 1: ALONE}
    assert numbers(here)[: len(kept)] == kept
    assert_as_one(here, where(whole, open_folder(whole).runs()[0]))


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


def test_two_processes_that_diverge_end_with_one_reason(tmp_path):
    out = tmp_path / "out"
    compared(out, ["tisa"], preset=f"{PRESET},scheme_rate=1e30")
    here = tmp_path / "run"
    found, printed = launched(tmp_path, out, here)
    assert found is not None, printed
    assert [threads for _, threads in found.values()] == [[], []]
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


@pytest.mark.slow
def test_the_command_does_one_run_in_two_processes(tmp_path):
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    words = ["train", "clm", "tisa", "--data", str(tmp_path / "words.txt"), "--budget", "4steps", "--preset",
             "quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=256",
             "-o"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "locant"]
    two = subprocess.Popen(
        [*torchrun, *words, str(tmp_path / "two")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        one = locant_command(*words, tmp_path / "one")
        printed, problems = two.communicate(timeout=300)
    finally:
        two.kill()
    for code, text, problem in ((one.exit_code, one.output, one.output), (two.returncode, printed, problems)):
        assert code == 0, problem
        assert text.count("tisa, seed 0: loss") >= 1
    one, two = (
        [line["loss"] for line in files.lines(tmp_path / name / "runs/tisa.s0/metrics.jsonl") if line["kind"] == "step"]
        for name in ("one", "two")
    )
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)
