"""The kernel under sanitizers, in short; `make sanitize` runs more calls and more checks."""

import pytest

from locant.attention import build
from reliability.sanitize import __main__ as sanitize
from reliability.sanitize import broken, checks, python_threads, running
from reliability.sanitize.checks import ADDRESS, AVX512, MEMCHECK, NATIVE, THREAD, Build

pytestmark = pytest.mark.slow

ANY_CPU = checks.Instructions("any CPU", ())
MISTAKES = {mistake.name: mistake for mistake in broken.MISTAKES}


def require(check):
    reason = checks.why_no_check(check)
    if reason is not None:
        pytest.skip(f"{reason}; returns when it is installed")


@pytest.mark.parametrize(("instructions", "calls"), [(NATIVE, 40), (ANY_CPU, 15)], ids=["this CPU", "any CPU"])
def test_sanitizers_find_nothing(instructions, calls, tmp_path):
    """Random calls, every tensor in memory of exactly its size, against loops in double: see fused_fuzz.c."""
    require(ADDRESS)
    program = running.compile_driver(ADDRESS, instructions, tmp_path, ("-Og",))
    done = running.call(ADDRESS, program, 11, calls)
    assert running.finding_in(done) is None, done.stdout + done.stderr


def test_threads_have_no_race(tmp_path):
    """Within a call, whose threads begin in the middle of a head in call 18, and between six callers."""
    require(THREAD)
    program = running.compile_driver(THREAD, ANY_CPU, tmp_path, ("-Og",))
    done = running.call(THREAD, program, 17, 3)
    assert running.finding_in(done) is None, done.stdout + done.stderr
    # openmp.c takes the place of libgomp, whose locks ThreadSanitizer does not see
    listed = running.subprocess.run(["nm", "--undefined-only", program], capture_output=True, text=True, check=True)
    assert not [line for line in listed.stdout.splitlines() if "GOMP" in line or "omp_" in line]


@pytest.mark.parametrize("name", ["one position read beyond the last", "memory shared by all callers"])
def test_a_broken_kernel_is_reported(name):
    require(MISTAKES[name].check)
    assert broken.is_reported(MISTAKES[name], ANY_CPU, calls=5)


def test_the_mistake_of_the_python_threads_is_left_in_the_kernel_of_users():
    """Their self-check builds with -O3, which leaves out what nothing reads."""
    require(THREAD)
    assert broken.is_reported(MISTAKES["memory shared by all callers"], ANY_CPU, calls=5, flags=running.OPTIMIZED)


def test_every_mistake_still_applies(tmp_path):
    for mistake in broken.MISTAKES:
        assert broken.break_kernel(mistake, tmp_path).read_text() != build.SOURCE.read_text()
    gone = broken.Mistake("gone", "no such line", "", ADDRESS, "")
    with pytest.raises(ValueError, match=r"fused\.c has 0 places 'no such line', expected 1"):
        broken.break_kernel(gone, tmp_path)


def test_six_python_threads_get_the_bits_of_one():
    if build.build().library is None:
        pytest.skip(f"no kernel here: {build.build().why}; returns with a C compiler")
    assert python_threads.differences(python_threads.JOBS[::5], 3) == []


def test_other_bits_are_noticed(monkeypatch):
    """A call that gives another result every time."""
    results = iter(range(10**6))
    monkeypatch.setattr(python_threads.Job, "make", lambda job: lambda: [python_threads.torch.tensor(next(results))])
    (found,) = python_threads.differences(python_threads.JOBS[:1], 2)
    assert "12 of 12 calls gave other bits" in found


def test_a_check_that_cannot_run_says_so(monkeypatch):
    planned = Build(ADDRESS, AVX512, 1)
    monkeypatch.setattr(checks, "cpu_flags", lambda: AVX512.needs - {"avx512f"})
    outcome = running.run(planned, 1)
    assert outcome.not_run == "this CPU has no avx512f; run on one that has"
    assert sanitize.row(outcome)["what"].startswith("not run: this CPU has no avx512f")
    assert sanitize.row(outcome)["findings"] == ""
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    checks.why_no_check.cache_clear()
    assert checks.why_no_check(MEMCHECK) == "gcc is missing; apt-get install gcc libc6-dev valgrind"
    checks.why_no_check.cache_clear()


def test_findings_end_with_exit_code_1(monkeypatch, tmp_path, capsys):
    found = [running.Outcome("good", 5, 1.0, (), 0.3), running.Outcome("bad", 5, 1.0, ("data race",))]
    monkeypatch.setattr(sanitize, "outcomes", lambda part, seed: iter(found))
    monkeypatch.setattr("sys.argv", ["sanitize", "--output", str(tmp_path / "out.csv")])
    with pytest.raises(SystemExit) as stop:
        sanitize.main()
    assert stop.value.code == 1
    assert (tmp_path / "out.csv").read_text().splitlines() == [
        "check,calls,seconds,worst error,findings,what",
        "good,5,1,0.30,0,nothing found",
        "bad,5,1,,1,data race",
    ]
    assert "1 findings; 0 of 2 checks were not run" in capsys.readouterr().out
