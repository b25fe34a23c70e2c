"""`locant schemes`, `locant curve` and `locant check`."""

import csv

import pytest

import locant
from locant.cli.terminal import console
from tests.command_line import locant_command


def test_schemes_prints_every_scheme_with_the_papers_numbers():
    result = locant_command("schemes")
    assert result.exit_code == 0
    for name in locant.SCHEMES:
        assert name in result.output
    for number in ("393,216", "65,472", "180", "2,160"):
        assert number in result.output
    for word in ("inductive", "data-driven", "parameter-efficient", "translation-invariant", "parallelizable"):
        assert word in result.output


def test_schemes_names_those_that_need_more_than_q_and_k():
    output = locant_command("schemes").output
    assert "Need the hidden states of tokens (attend's x): inkling, fox\n" in output
    assert "For causal attention: fox, grape\n" in output


@pytest.mark.parametrize("name", ["path", "stick-breaking"])
def test_schemes_out_of_scope_say_why(name):
    result = locant_command("schemes", name)
    assert result.exit_code == 2
    assert f"{name} is not a scheme of locant" in result.stderr
    assert "not the softmax attention over pairs of tokens that attend computes" in " ".join(result.stderr.split())
    with pytest.raises(ValueError, match=f"{name} is not a scheme of locant"):
        locant.scheme(name, n_heads=2)


def test_curves_of_schemes_that_depend_on_tokens(tmp_path):
    result = locant_command("curve", "fox", "grape", "inkling:extent=4", "pope", "-o", tmp_path / "x.png", "--reach", 6)
    assert result.exit_code == 0, result.output
    with (tmp_path / "x.csv").open() as file:
        fields = {(row["scheme"], row["field"]) for row in csv.DictReader(file)}
    assert fields == {
        ("fox", "levels"), ("grape", "level"), ("grape", "levels"), ("inkling:extent=4", "query_side"),
        ("pope", "rotate"),
    }  # fmt: skip


def test_schemes_of_one_name_shows_its_options():
    result = locant_command("schemes", "rope")
    assert result.exit_code == 0
    assert "Su et al. 2021" in result.output
    assert "scaling=none" in result.output
    assert "head_dim" not in result.output.split("Parameters:")[1]


def test_schemes_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(console, "width", 80)
    result = locant_command("schemes")
    assert result.exit_code == 0
    assert "393,216" in result.stdout
    assert "65,472" in result.stdout
    assert "…" not in result.stdout


def test_curve_draws_a_picture_and_its_numbers(tmp_path):
    out = tmp_path / "new" / "curves.png"
    result = locant_command("curve", "alibi", "rope", "shaw:clip=3", "nope", "-o", out, "--reach", 10, "--heads", 4)
    assert result.exit_code == 0, result.output
    assert "nope does not depend on the offset" in result.output
    assert "alibi: added to the logit" in result.output
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert out.stat().st_size > 10_000
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    alibi = {(row["head"], row["r"]): float(row["value"]) for row in rows if row["scheme"] == "alibi"}
    assert alibi["1", "-8"] == alibi["1", "8"] == -8 * 2**-2
    assert len(alibi) == 4 * 21
    assert {row["field"] for row in rows if row["scheme"] == "shaw:clip=3"} == {"query", "value"}


def test_check_passes_and_fails_with_an_exit_code(monkeypatch):
    good = locant_command("check", "huang4:clip=3")
    assert good.exit_code == 0
    assert good.output.count("✓") == 14

    class Wrong(locant.Scheme):
        def parameter_count(self):
            return 3

    monkeypatch.setitem(locant.SCHEMES, "wrong", Wrong)
    bad = locant_command("check", "wrong")
    assert bad.exit_code == 1
    assert "parameter_count() is 3" in bad.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "hunag4"], "did you mean 'huang4'"),
        (["curve", "tisa:kernel=3"], "did you mean 'kernels'"),
        (["schemes", "--heads", "5"], "must be a multiple of"),
        (["schemes", "hunag4"], "did you mean 'huang4'"),
        (["schemes", "tisa:kernels=5"], "expected the name of one scheme, such as tisa; got 'tisa:kernels=5'"),
        (["check", "tisa[/x]"], "'tisa[/x]' names a scheme per layer"),
        (["check", "tisa", "--heads", "5"], "--width must be a multiple of --heads; got 32 and 5"),
        (["curve", "tisa", "-o", "/proc/nowhere/x.png"], "error:"),
    ],
)
def test_mistakes_get_one_line_and_no_traceback(arguments, message):
    result = locant_command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_maps_are_listed_described_checked_and_drawn(tmp_path):
    assert "rope@grouped:size=4: interpolated, grouped, recurrent, selfextend" in " ".join(
        locant_command("schemes").output.split()
    )
    described = locant_command("schemes", "selfextend")
    assert described.exit_code == 0
    assert "Jin et al. 2024" in described.output
    assert "window=128" in described.output
    assert "scheme=" not in described.output
    checked = locant_command("check", "rope@recurrent:length=512")
    assert checked.exit_code == 0, checked.output
    out = tmp_path / "curves.png"
    drawn = locant_command("curve", "rope@selfextend:window=4,size=2", "rope", "-o", out, "--reach", 12, "--heads", 1,
                           "--width", 8)  # fmt: skip
    assert drawn.exit_code == 0, drawn.output
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    near, far = ({int(x["r"]): float(x["value"]) for x in rows if ("@" in x["scheme"]) == own} for own in (False, True))
    assert all(far[r] == near[r] for r in range(-4, 5))
    # the query is at 12: 12 // 2 + 2 − 0 // 2 = 8
    assert far[-12] == pytest.approx(near[-8])
    assert far[12] == pytest.approx(near[8])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schemes", "rope@grouped"), "expected the name of one scheme"),
        (("check", "rope@grouppd"), "unknown map 'grouppd'"),
        (("curve", "grouped:size=4"), "write SCHEME@grouped"),
        (("swap", "folder", "rope/rope@alibi", "-o", "x"), "a map must follow @"),
        (("compare", "clm", "--schemes", "nope,rope@x", "-o", "x"), "unknown map 'x'"),
    ],
)
def test_wrong_maps_are_rejected_at_once(words, message):
    result = locant_command(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
