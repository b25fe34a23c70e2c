"""Programs: torch.export and ONNX."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import locant
from locant.exporting import traced
from locant.exporting.refusal import CannotExport
from tests.exporting.models import differ, padded, swapped
from tests.hf_models import make, output

ONNX = pytest.mark.skipif(
    any(traced.find_spec(name) is None for name in traced.PACKAGES), reason="needs the extra `onnx` (in `test`)"
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tisa", "shaw:clip=4"])
def test_a_program_of_torch(tmp_path, spec):
    model = swapped("bert", spec, num_hidden_layers=1)
    done = locant.export(model, tmp_path / "out", "torch", length=700)
    assert (done.to, done.exact, done.length) == ("torch", True, 700)
    run = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for batch in (padded("left", 41), padded("right", 600)):
        found = run(**batch)
        assert differ(output(model, **batch), found, batch["attention_mask"]) < 1e-5


@pytest.mark.slow
@ONNX
@pytest.mark.parametrize(
    ("kind", "spec"), [("bert", "tisa"), ("bert", "huang1:clip=4"), ("roberta", "shaw:clip=4"), ("llama", "rope/nope")]
)
def test_onnx(tmp_path, kind, spec):
    options = {"auto": AutoModelForCausalLM} if kind == "llama" else {}
    model = swapped(kind, spec, **options)
    done = locant.export(model, tmp_path / "out", "onnx", length=700)
    assert done.difference < 1e-4
    session = traced.import_module("onnxruntime").InferenceSession(tmp_path / "out" / "model.onnx")
    pad = 1 if kind == "roberta" else 0
    for batch in (padded("left", 41, pad), padded("right", 600, pad)):
        (found,) = session.run(None, {name: value.numpy() for name, value in batch.items()})
        assert differ(output(model, **batch), torch.from_numpy(found), batch["attention_mask"]) < 1e-4


def test_a_program_that_differs_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(traced, "_to_torch", lambda *_: None)  # tracing takes seconds
    monkeypatch.setattr(
        traced,
        "_opened",
        lambda path, to: lambda ids, mask: output(make("bert", seed=5, max_position_embeddings=400), input_ids=ids),
    )
    with pytest.raises(CannotExport, match="computes something else"):
        locant.export(swapped("bert", "tisa", num_hidden_layers=1), tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_traced_says_so(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no operator\nfor this")

    monkeypatch.setattr(traced, "_to_torch", broken)
    with pytest.raises(CannotExport, match=r"cannot be traced: RuntimeError: no operator$"):
        locant.export(swapped("bert", "tisa", num_hidden_layers=1), tmp_path / "out", "torch")
    with pytest.raises(CannotExport, match="has a decoder"):
        locant.export(swapped("bart", "alibi"), tmp_path / "out", "torch")


def test_onnx_without_its_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(traced, "PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(ImportError, match=r"no_such_package.*locant\[onnx\]"):
        locant.export(make("bert"), tmp_path / "out", "onnx")


@pytest.mark.slow
def test_a_program_runs_where_locant_is_not(tmp_path):
    locant.export(swapped("bert", "tisa", num_hidden_layers=1), tmp_path / "out", "torch", length=100)
    code = (
        "import sys; sys.modules['locant'] = None; import torch; "
        f"run = torch.export.load({str(tmp_path / 'out' / 'model.pt2')!r}).module(); "
        "ids = torch.arange(3, 13)[None]; print(run(input_ids=ids, attention_mask=torch.ones_like(ids)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch.Size([1, 10, 32])" in done.stdout, done.stderr
