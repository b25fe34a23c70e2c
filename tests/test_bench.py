"""The benchmarks can be started. None is run here."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SHARED = {"fused_call", "measuring", "next_token", "side_terms"}


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCH.glob("*.py")} - SHARED))
def test_a_benchmark_explains_itself(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    assert f"python bench/{name}.py" in module.__doc__
