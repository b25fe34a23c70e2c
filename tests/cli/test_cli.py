"""The command line, as a user sees it."""

import csv
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import locant
from locant.analysis.curve import curves
from locant.analysis.properties import table
from locant.cli import app
from tests import cases


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_schemes_prints_every_scheme_with_the_papers_numbers():
    result = run("schemes")
    assert result.exit_code == 0
    for name in locant.SCHEMES:
        assert name in result.output
    for number in ("393,216", "65,472", "180", "2,160"):
        assert number in result.output
    for word in ("inductive", "data-driven", "parameter-efficient", "translation-invariant", "parallelizable"):
        assert word in result.output


def test_schemes_of_one_name_shows_its_options():
    result = run("schemes", "rope")
    assert result.exit_code == 0
    assert "Su et al. 2021" in result.output
    assert "scaling=none" in result.output
    assert "head_dim" not in result.output.split("Parameters:")[1]


def test_schemes_fits_a_narrow_terminal():
    result = subprocess.run(
        [sys.executable, "-c", "import locant.cli as c; c.console.width = 80; c.app()", "schemes"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "393,216" in result.stdout
    assert "65,472" in result.stdout
    assert "…" not in result.stdout


def test_properties_table():
    rows = {row.spec.split(":")[0]: row for row in table()}
    assert all(rows["tisa"].properties.values())
    assert not rows["learned"].properties["inductive"]
    assert not rows["learned"].properties["translation-invariant"]
    assert not rows["alibi"].properties["data-driven"]
    assert not rows["huang4"].properties["parameter-efficient"]
    assert not rows["rope"].properties["interpretable"]
    assert not rows["shaw"].properties["interpretable"]
    assert (rows["learned"].shared, rows["learned"].own) == (393_216, 393_216)
    assert (rows["huang4"].shared, rows["huang4"].own) == (65_472, 12 * 65_472)
    small = {row.spec: row for row in table(length=128, layers=2, n_heads=2, d_model=64)}
    assert small["huang2:clip=127"].own == 2 * 2 * 255


def test_curve_draws_a_picture_and_its_numbers(tmp_path):
    out = tmp_path / "new" / "curves.png"
    result = run("curve", "alibi", "rope", "shaw:clip=3", "nope", "-o", str(out), "--reach", "10", "--heads", "4")
    assert result.exit_code == 0, result.output
    assert "nope does nothing with the offset" in result.output
    assert "alibi: added to the logit" in result.output
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert out.stat().st_size > 10_000
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    alibi = {(row["head"], row["r"]): float(row["value"]) for row in rows if row["scheme"] == "alibi"}
    assert alibi["1", "-8"] == alibi["1", "8"] == -8 * 2**-2
    assert len(alibi) == 4 * 21
    assert {row["field"] for row in rows if row["scheme"] == "shaw:clip=3"} == {"query", "value"}


@pytest.mark.parametrize("spec", cases.SPECS)
def test_every_scheme_has_curves(spec):
    found = curves(locant.scheme(spec, n_heads=4, head_dim=8, d_model=32), reach=12)
    assert bool(found) == (spec != "nope")
    for curve in found:
        assert curve.r == list(range(-12, 13))
        assert all(len(line) == 25 for line in curve.values)


def test_curves_say_what_the_scheme_does():
    rope = curves(locant.scheme("rope", head_dim=8), reach=5)[0]
    assert rope.values[0][5] == pytest.approx(1.0)
    expected = sum(__import__("math").cos(3 * 10000 ** (-t / 4)) for t in range(4)) / 4
    assert rope.values[0][8] == pytest.approx(expected, rel=1e-6)


def test_check_passes_and_fails_with_an_exit_code(monkeypatch):
    good = run("check", "huang4:clip=3")
    assert good.exit_code == 0
    assert good.output.count("✓") == 13

    class Wrong(locant.Scheme):
        def parameter_count(self):
            return 3

    monkeypatch.setitem(locant.SCHEMES, "wrong", Wrong)
    bad = run("check", "wrong")
    assert bad.exit_code == 1
    assert "parameter_count() is 3" in bad.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "hunag4"], "did you mean 'huang4'"),
        (["curve", "tisa:kernel=3"], "did you mean 'kernels'"),
        (["schemes", "--heads", "5"], "must be a multiple of"),
        (["schemes", "hunag4"], "did you mean 'huang4'"),
        (["check", "tisa[/x]"], "'tisa[/x]' names a scheme per layer"),
        (["check", "tisa", "--heads", "5"], "--width must be a multiple of --heads; got 32 and 5"),
        (["curve", "tisa", "-o", "/proc/nowhere/x.png"], "error:"),
    ],
)
def test_mistakes_get_one_line_and_no_traceback(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_the_command_is_installed():
    result = subprocess.run([sys.executable, "-m", "locant", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"locant {locant.__version__}, torch ")


def test_doctor_says_what_is_active_and_why(monkeypatch):
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for word in ("fused", "sdpa", "flex", "eager", "torch", "decoding", "huang4:clip=64"):
        assert word in done.output
    from locant.attention import build

    monkeypatch.setattr("locant.attention.diagnosis.build", lambda: build.Built(None, "no C compiler was found"))
    assert "no C compiler was found" in CliRunner().invoke(app, ["doctor"]).output


def test_bench_prints_ratios_and_draws(tmp_path):
    out = tmp_path / "speed.png"
    command = [
        "bench",
        "tisa",
        "huang4:clip=8",
        "--lengths",
        "32,64",
        "--tokens",
        "64",
        "--heads",
        "2",
        "--width",
        "32",
    ]
    done = CliRunner().invoke(app, [*command, "--repeats", "3", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.count("forward + backward") == 4
    assert out.exists()
    assert len(out.with_suffix(".csv").read_text().splitlines()) == 9
    assert CliRunner().invoke(app, ["bench", "tisa", "--lengths", "many"]).exit_code == 2
