"""`make kill`: a difference in the results is noticed, and one in times and process numbers is none."""

import json
import shutil

import pytest

from locant.report.comparison import write_comparison_page
from reliability.kill.outcome import SAME, Case, judged, summary
from reliability.kill.subjects import Compare
from tests import comparisons


@pytest.fixture
def compared(tmp_path):
    """A command, and the folder of a comparison with its page."""
    out = tmp_path / "out"
    comparisons.whole(out, seeds=2, schemes=("learned", "tisa"))
    (out / "runs" / "tisa.s0" / "model.safetensors").write_bytes(b"weights")
    write_comparison_page(out)
    return Compare(tmp_path), out


def change_line(path, number, **changes):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_times_and_processes_may_differ(compared):
    subject, out = compared
    before, run = subject.results(out), out / "runs" / "tisa.s0"
    change_line(run / "metrics.jsonl", 0, seconds=77.0)
    change_line(run / "metrics.jsonl", -1, seconds_per_step=9.0, memory_mb=9.0)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "began": "2031-01-01T12:00:00+00:00"}))
    (run / "DONE").write_text("2031-01-01T12:00:00+00:00\n")
    (run / "log.txt").write_text("a library said something")
    (out / ".report.html.123.456").write_text("a process was killed here")
    write_comparison_page(out)
    assert judged(before, subject.results(out)) == SAME


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda out: (out / "runs/tisa.s0/model.safetensors").write_bytes(b"Weights"), "model.safetensors"),
        (lambda out: change_line(out / "runs/tisa.s0/metrics.jsonl", 3, loss=3.0), "metrics.jsonl"),
        (lambda out: (out / "runs/tisa.s0/checkpoint-12").write_text("left"), "checkpoint-12"),
        (lambda out: shutil.rmtree(out / "csv"), "page and tables"),
        (lambda out: (out / "report.html").write_text("an older page"), "page and tables"),
        (lambda out: (out / "csv" / "99-old.csv").touch(), "page and tables"),
        (lambda out: (out / "runs/tisa.s1/DONE").unlink(), "DONE"),
    ],
    ids=["weights", "metrics", "checkpoint", "no tables", "old page", "left table", "not done"],
)
def test_a_difference_is_noticed(compared, change, name):
    subject, out = compared
    before = subject.results(out)
    change(out)
    after = subject.results(out)
    assert judged(before, after).startswith("differ: ")
    assert any(each.endswith(name) and before.get(each) != after.get(each) for each in before.keys() | after.keys())


def test_the_table_counts_kills_and_what_came_of_them():
    made = [Case("kill", "compare", "SIGKILL to both", "", "", 1, outcome) for outcome in (SAME, "differ: x", SAME)]
    table = summary([*made, Case("full disk", "adapt", "", "", "", 0, "left out: it needs the right to mount")])
    assert "| kill | compare | SIGKILL to both | 3 | 2 |" in table
    assert "| **all kills** | | | 3 | 2 |" in table
    assert "| full disk | adapt |  | 1 | left out: it needs the right to mount |" in table
    assert "| **all other cases** | | | 0 | 0 |" in table
