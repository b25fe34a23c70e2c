"""`locant bench` and `locant doctor`."""

from locant.attention import build
from tests.command_line import locant_command


def test_doctor_prints_what_is_active_and_why(monkeypatch):
    done = locant_command("doctor")
    assert done.exit_code == 0, done.output
    for word in ("fused", "sdpa", "flex", "eager", "torch", "decoding", "huang4:clip=64"):
        assert word in done.output
    monkeypatch.setattr("locant.attention.diagnosis.build", lambda: build.Built(None, "no C compiler was found"))
    assert "no C compiler was found" in locant_command("doctor").output


def test_bench_prints_ratios_and_draws(tmp_path):
    out = tmp_path / "speed.png"
    command = ["bench", "tisa", "huang4:clip=8", "--lengths", "32,64", "--tokens", 64, "--heads", 2, "--width", 32]
    done = locant_command(*command, "--repeats", 3, "-o", out)
    assert done.exit_code == 0, done.output
    assert done.output.count("forward + backward") == 4
    assert out.exists()
    assert len(out.with_suffix(".csv").read_text().splitlines()) == 9
    wrong = locant_command("bench", "tisa", "--lengths", "many")
    assert wrong.exit_code == 2
    assert "--lengths: expected whole numbers ≥ 1 with commas between them, got 'many'" in wrong.stderr
