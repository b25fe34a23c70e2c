"""The folder of a run: its metrics, checkpoints, state and lock."""

import json

import filelock
import pytest

from locant.runs import run_folder

STEPS = [{"kind": "step", "step": step, "seconds": 1.5, "loss": 2.0, "name": "grün"} for step in (2, 4, 6)]
TEST = {"kind": "test", "length": 8, "values": {}, "refused": ""}
COST = {"kind": "cost", "seconds_per_step": 1, "seconds": {}, "memory_mb": 2.5, "scheme_parameters": 3}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_folder_is_new_or_empty_or_ours(tmp_path):
    folder = tmp_path / "run"
    run_folder.check(folder, "run.json")
    folder.mkdir()
    run_folder.check(folder, "run.json")
    for name in (".lock", "log.txt"):
        (folder / name).touch()
    run_folder.check(folder, "run.json", "log.txt")
    for name in "dcba":
        (folder / name).touch()
    with pytest.raises(ValueError, match=r"contains files that locant did not write \(a, b, c\); name a new folder"):
        run_folder.check(folder, "run.json", "log.txt")
    (folder / "run.json").touch()
    run_folder.check(folder, "run.json")
    with pytest.raises(ValueError, match=r"run\.json is a file; name a folder"):
        run_folder.check(folder / "run.json", "run.json")


def test_metrics_are_of_a_known_kind_with_its_entries(tmp_path):
    path = write(tmp_path / "metrics.jsonl", *STEPS, TEST, COST)
    assert run_folder.metrics(path) == [*STEPS, TEST, COST]
    assert run_folder.metrics(tmp_path / "none") == []


@pytest.mark.parametrize(
    "line",
    [
        {},
        {**TEST, "kind": "other"},
        {**STEPS[0], "step": 1.5},
        {**STEPS[0], "seconds": "1"},
        *({key: value for key, value in line.items() if key != name} for line, name in [
            (STEPS[0], "step"), (STEPS[0], "seconds"), (TEST, "length"), (TEST, "values"), (TEST, "refused"),
            (COST, "seconds_per_step"), (COST, "seconds"), (COST, "memory_mb"), (COST, "scheme_parameters"),
        ]),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(line, tmp_path):
    path = write(tmp_path / "metrics.jsonl", STEPS[0], line, STEPS[1])
    words = "expected one of: step with step and seconds, test with length and values and refused, cost with"
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2 is damaged: got \{{.*; {words}"):
        run_folder.metrics(path)


def test_rewind_keeps_the_steps_up_to_one(tmp_path):
    path = write(tmp_path / "metrics.jsonl", *STEPS, TEST, COST)
    run_folder.rewind(path, 4)
    assert run_folder.metrics(path) == STEPS[:2]
    assert path.read_text(encoding="utf-8").count("grün") == 2


def checkpoint(folder, step, *, whole=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "weights").touch()
    if whole:
        (path / run_folder.WHOLE).touch()


def steps(folder):
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.iterdir())


def test_the_latest_complete_checkpoint_is_kept_alone(tmp_path):
    assert run_folder.last_checkpoint(tmp_path) is None
    for step, whole in ((8, True), (9, True), (10, True), (11, False)):
        checkpoint(tmp_path, step, whole=whole)
    assert run_folder.last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert steps(tmp_path) == [10]
    checkpoint(tmp_path, 12, whole=False)
    run_folder.mark_checkpoint(tmp_path, 12)
    assert steps(tmp_path) == [12]
    assert (tmp_path / "checkpoint-12" / run_folder.WHOLE).exists()
    checkpoint(tmp_path, 14, whole=False)
    run_folder.delete_checkpoints(tmp_path)
    assert steps(tmp_path) == []
    checkpoint(tmp_path, 14, whole=False)
    assert run_folder.last_checkpoint(tmp_path) is None
    assert steps(tmp_path) == []


def test_the_state_of_a_run(tmp_path):
    found = []
    for name in ("log.txt", "metrics.jsonl", "FAILED", "DONE"):
        (tmp_path / name).touch()
        found.append(run_folder.state(tmp_path))
    assert found == ["new", "begun", "failed", "done"]


def test_one_process_holds_a_folder(tmp_path):
    folder = tmp_path / "a" / "run"
    with run_folder.held(folder):
        with pytest.raises(run_folder.Busy, match=r"another process is working in .*run"), run_folder.held(folder):
            pass
        assert (folder / ".lock").exists()
    with run_folder.held(folder):
        pass


def test_who_was_there_before_the_lock_stays(tmp_path):
    """A process that fails deletes what it wrote itself."""
    (tmp_path / "old").touch()

    def fail():
        (tmp_path / "new").touch()
        raise ValueError("it")

    with pytest.raises(ValueError, match="it"), run_folder.held(tmp_path, resumes=lambda: False):
        fail()
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == {"old"}


def test_a_lock_that_cannot_be_made_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(self, timeout):
        raise PermissionError("no")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(PermissionError, match="no"), run_folder.held(tmp_path / "a" / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wait", [False, True])
def test_a_folder_that_vanishes_is_made_again(wait, tmp_path, monkeypatch):
    """Another process has deleted it: first before the lock is there, then while this one waited for it."""
    acquire, found = filelock.FileLock.acquire, []

    def late(self, timeout):
        found.append(timeout)
        if len(found) == 1:
            raise FileNotFoundError
        held = acquire(self, timeout=timeout)
        if len(found) == 2:
            (tmp_path / "run" / ".lock").unlink()
        return held

    monkeypatch.setattr(filelock.FileLock, "acquire", late)
    with run_folder.held(tmp_path / "run", wait=wait):
        assert (tmp_path / "run" / ".lock").exists()
    assert found == [-1 if wait else 0] * 3


def test_models_are_kept_after_halves_of_halves(tmp_path):
    assert [run_folder.kept_steps(*each) for each in ((800, 3), (3, 5), (8, 0))] == [[100, 200, 400], [1], []]
    assert run_folder.kept_model(tmp_path, 7) == tmp_path / "kept" / "step-7"


def test_a_block_that_raises_leaves_its_files(tmp_path):
    def stopped():
        with run_folder.held(tmp_path / "run"):
            (tmp_path / "run" / "half").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert (tmp_path / "run" / "half").read_text() == "x"
