"""Runs that are killed or cannot write end with the bits of undisturbed ones, on one machine with fixed threads."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from locant.experiments import arms, workers
from locant.experiments.comparison import DATA, open_folder, pending, where
from locant.experiments.presets import SCRATCH, find_preset
from locant.experiments.run import load_setting
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.experiments.workers import LocalWorkers, _run_process, _write_failure
from locant.runs import files, run_folder
from tests.experiments.processes import (
    PAUSE,
    PRESET,
    SCHEMES,
    assert_same,
    compared,
    comparer,
    complete,
    dying,
    numbers,
    pausing,
    starved,
    text,
)


@pytest.fixture(scope="module")
def whole_with_dropout(tmp_path_factory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    there = tmp_path_factory.mktemp("dropout")
    data = str(text(there / "text.txt"))
    tokenizer = find_task("clm").tokenizer(data, find_preset(PRESET, SCRATCH))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.2, embd_pdrop=0.2,
        attn_pdrop=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(there / "model")
    tokenizer.save_pretrained(there / "model")
    out = there / "out"
    complete(out, compared(out, ["native", "tisa"], data=data, model=str(there / "model")))
    return out


def start(target, *arguments):
    """A process from the fork server, and the end of the pipe that it sends to."""
    context = LocalWorkers(1).context
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    return process, receiver


def kill_at(run: Run, here: Path, data: Path, moment: str, after: int) -> None:
    process, _ = start(dying, run, here, data, moment, after)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, f"{moment} never came"


MOMENTS = [
    ("step", 0),
    ("step", 8),
    ("half a line", 5),
    ("half a checkpoint", 0),
    ("half a checkpoint", 3),
    ("whole checkpoint, unmarked", 5),  # the last one
    ("old checkpoint half deleted", 1),
    ("half a model", 0),
    ("test", 1),
]


@pytest.mark.parametrize(("moment", "after"), MOMENTS)
def test_a_run_killed_at_any_moment_ends_as_if_it_were_not(whole, tmp_path, moment, after):
    run = open_folder(whole).runs()[0]
    here = tmp_path / "run"
    kill_at(run, here, whole / DATA, moment, after)
    assert run_folder.state(here) in ("new", "begun")
    finish(run, here, whole / DATA)
    assert_same(here, where(whole, run))


def finish(run: Run, here: Path, data: Path) -> None:
    process, _ = start(_run_process, run, here, data, -1)
    process.join(120)
    assert process.exitcode == 0, (here / "log.txt").read_text()


@pytest.mark.parametrize("number", [1, 2, 3], ids=SCHEMES[1:])
def test_any_scheme_killed_three_times(whole, tmp_path, number):
    three_kills(whole, open_folder(whole).runs()[number], tmp_path / "run")


@pytest.mark.parametrize("number", [0, 1], ids=["native", "tisa"])
def test_dropout_goes_on_with_the_numbers_it_would_have_had(whole_with_dropout, tmp_path, number):
    run = open_folder(whole_with_dropout).runs()[number]
    assert not torch.equal(*losses_with_two_seeds_of_dropout(whole_with_dropout, run))  # the model has dropout
    three_kills(whole_with_dropout, run, tmp_path / "run")


def losses_with_two_seeds_of_dropout(out: Path, run: Run) -> list[torch.Tensor]:
    here = load_setting(run.work, out / DATA)
    model = arms.build(find_task("clm"), here, run.work.model, run.scheme, 0).train()
    ids = torch.arange(16)[None]
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        found.append(model(input_ids=ids, labels=ids).loss)
    return found


def three_kills(whole: Path, run: Run, here: Path) -> None:
    kill_at(run, here, whole / DATA, "step", 7)
    kill_at(run, here, whole / DATA, "half a checkpoint", 1)
    kill_at(run, here, whole / DATA, "test", 1)
    finish(run, here, whole / DATA)
    assert_same(here, where(whole, run))


def test_a_deletion_cut_short_twice_leaves_no_torn_checkpoint_behind(whole, tmp_path):
    """A partly deleted checkpoint keeps its marker, so it must not survive alone."""
    run, here = open_folder(whole).runs()[0], tmp_path / "run"
    kill_at(run, here, whole / DATA, "old checkpoint half deleted", 0)
    kill_at(run, here, whole / DATA, "whole checkpoint, unmarked", 0)
    finish(run, here, whole / DATA)
    assert_same(here, where(whole, run))


def test_a_process_killed_from_outside_is_reported_and_taken_up_again(whole, tmp_path, monkeypatch):
    """The out-of-memory killer does this. The other runs continue."""
    out = tmp_path / "out"
    shutil.copytree(whole / DATA, out / DATA)
    shutil.copy(whole / "comparison.json", out)
    comparison = open_folder(out)
    victim = where(out, comparison.runs()[1])
    killed = False
    runs = [(run, where(out, run)) for run in pending(out, comparison)]
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_run_process", partial(pausing, victim.name))  # so that it cannot end before
        for _ in LocalWorkers(1).work(runs, out / DATA):
            for process in multiprocessing.active_children():
                if not killed and process.name == victim.name and len(files.lines(victim / run_folder.METRICS)) > 3:
                    os.kill(process.pid, signal.SIGKILL)
                    killed = True
    assert killed
    states = [run_folder.state(where(out, run)) for run in comparison.runs()]
    assert states == ["done", "failed", "done", "done"]
    reason = files.read_json(victim / run_folder.FAILED)
    assert reason == {"reason": "its process was killed by signal 9 (out of memory?)", "final": False}

    complete(out, comparison)
    for run in comparison.runs():
        assert_same(where(out, run), where(whole, run))
    assert not (victim / run_folder.FAILED).exists()


def test_a_finished_run_is_never_repeated(whole):
    comparison = open_folder(whole)
    assert list(pending(whole, comparison)) == []
    here = where(whole, comparison.runs()[0])
    before = {path.name: path.stat().st_mtime_ns for path in here.iterdir() if path.name not in (".lock", "log.txt")}
    finish(comparison.runs()[0], here, whole / DATA)  # another comparer may have listed it before it was done
    assert before == {path.name: path.stat().st_mtime_ns for path in here.iterdir() if path.name in before}


def test_checkpoints_that_a_run_killed_at_its_end_left_are_deleted(whole):
    comparison = open_folder(whole)
    left = where(whole, comparison.runs()[0]) / "checkpoint-12"
    left.mkdir()
    (left / "optimizer.pt").touch()
    assert list(pending(whole, comparison)) == []
    assert not left.exists()


def test_a_run_that_diverges_is_reported_for_good_and_the_others_go_on(tmp_path):
    out = tmp_path / "out"
    # The learning rate of schemes alone: a model with its own positions has none.
    preset = f"{PRESET},scheme_rate=1e30"
    comparison = compared(out, ["native", "tisa"], preset=preset)
    complete(out, comparison)
    native, tisa = (where(out, run) for run in comparison.runs())
    assert run_folder.state(native) == "done"
    failed = files.read_json(tisa / run_folder.FAILED)
    assert failed["final"]
    assert failed["reason"].startswith("the loss was nan at step ")
    assert list(pending(out, comparison)) == []  # it would do so again


@pytest.mark.slow
def test_two_comparers_share_the_work_and_one_of_them_may_be_killed(whole, tmp_path):
    out, data = tmp_path / "out", text(tmp_path / "text.txt")
    both = [start(comparer, out, data, 0) for _ in range(2)]
    third = None
    try:
        started = []
        for process, receiver in both:
            process.join(240)
            printed = output(receiver)
            assert process.exitcode == 0, printed
            started.append({int(word) for word in printed.splitlines()[-1].split()})
        comparison = open_folder(out)
        done_by = [files.read_json(where(out, run) / "run.json")["process"] for run in comparison.runs()]
        assert len(done_by) == 6
        assert all(sum(process in own for own in started) == 1 for process in done_by)
        assert all(own & {*done_by} for own in started), "one of them did nothing"
        for run in comparison.runs()[:3]:  # the first seed is that of the undisturbed comparison
            assert_same(where(out, run), where(whole, run))

        # More of the same, from a comparer that is killed: its runs end with it, and the next one goes on.
        victim = where(out, comparison.runs()[4])
        before = numbers(victim)
        shutil.rmtree(victim)
        command = [sys.executable, "-m", "tests.experiments.processes", str(out), str(data), victim.name]
        third = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        wait_until(lambda: len(files.lines(victim / run_folder.METRICS)) == PAUSE, third)
        third.kill()
        wait_until(lambda: free(victim))
        assert run_folder.state(victim) == "begun"
        complete(out, comparison)
        assert numbers(victim) == before
    finally:
        for process, _ in both:
            process.kill()
        if third is not None:
            third.kill()
            third.communicate()


def output(receiver) -> str:
    with os.fdopen(os.dup(receiver.fileno())) as file:
        return file.read()


def wait_until(true, process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        if process is not None:
            assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def free(here: Path) -> bool:
    try:
        with run_folder.held(here):
            return True
    except run_folder.Busy:
        return False


@pytest.mark.parametrize("most", [2000, 20_000], ids=["metrics", "checkpoint"])
def test_a_disk_that_is_full_in_the_middle_of_a_run(whole, tmp_path, most):
    run, here = open_folder(whole).runs()[0], tmp_path / "run"
    process, _ = start(starved, run, here, whole / DATA, most)
    process.join(120)
    assert run_folder.state(here) == "failed"
    failed = files.read_json(here / run_folder.FAILED)
    assert os.strerror(errno.EFBIG) in failed["reason"]
    assert not failed["final"]

    (here / run_folder.FAILED).unlink()  # as `pending` does
    finish(run, here, whole / DATA)
    assert_same(here, where(whole, run))


def test_a_full_disk_is_called_so_whatever_a_library_calls_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    _write_failure(RuntimeError("unexpected pos 64 vs 0"), tmp_path)
    assert files.read_json(tmp_path / run_folder.FAILED)["reason"] == "the disk is full (unexpected pos 64 vs 0)"
    assert "unexpected pos" in capsys.readouterr().err


def test_a_disk_where_nothing_can_be_written(whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    comparison = open_folder(out)
    first, second, *_ = (where(out, run) for run in comparison.runs())
    shutil.rmtree(second)
    process, receiver = start(comparer, out, tmp_path, 20)
    process.join(240)
    assert process.exitcode == 1
    last = output(receiver).strip().splitlines()[-1]
    assert last.startswith("OSError: huang4-clip=4.s0 failed ([Errno 27] File too large")
    assert "Finished runs are kept; give the same command again" in last
    assert_same(first, where(whole, comparison.runs()[0]))

    complete(out, comparison)
    assert_same(second, where(whole, comparison.runs()[1]))


def test_a_folder_with_another_comparison_is_refused(whole, tmp_path):
    data = open_folder(whole).work.data
    with pytest.raises(ValueError, match=r"holds another comparison \(steps: 12 there, 30 now\); name a new folder"):
        compared(whole, SCHEMES, steps=30, data=data)
    with pytest.raises(ValueError, match="the first scheme is the baseline"):
        compared(whole, SCHEMES[::-1], data=data)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"contains files that locant did not write \(thesis.tex\)"):
        compared(tmp_path / "out", SCHEMES)
    assert compared(whole, SCHEMES, data=data) == open_folder(whole)  # this one is welcome


def test_a_comparison_killed_before_it_began_can_be_given_again(tmp_path):
    out = tmp_path / "out"
    (out / DATA / "train").mkdir(parents=True)  # half of the data
    (out / ".comparison.json.4321").write_text("{")  # and half of what is compared
    comparison = compared(out, ["native"])
    assert open_folder(out) == comparison
    complete(out, comparison)
    assert run_folder.state(where(out, comparison.runs()[0])) == "done"
