"""`locant.attention.diagnosis`: what `locant doctor` prints."""

import platform

import pytest
import torch

from locant.attention import build, diagnosis, verification


class Library:
    """In place of a loaded kernel."""

    def locant_lanes(self):
        return 8


def found(monkeypatch, built):
    monkeypatch.setattr(diagnosis, "build", lambda: built)
    return {finding.name: finding for finding in diagnosis.diagnose()}


def test_findings_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = "gcc -O3 -fopenmp"
    findings = found(monkeypatch, build.Built(Library(), "built and loaded", "kernel.so", command, 1.26))
    assert {name: finding.active for name, finding in findings.items()} == {
        "python": None, "torch": None, "GPU": None, "fused": True, "its library": None, "cache folder": None,
        "triton": False, "sdpa": True, "flex": False, "eager": True,
    }  # fmt: skip
    assert findings["python"].detail == f"{platform.python_version()} on {platform.platform()}"
    assert findings["torch"].detail == f"{torch.__version__}, {torch.get_num_threads()} threads"
    assert findings["GPU"].detail == "none that torch can use"
    assert findings["fused"].detail == "built in 1.3 s with `gcc -O3 -fopenmp`: 8 lanes, threads"
    assert findings["its library"].detail == "kernel.so"
    assert findings["cache folder"].detail == str(build.cache_folder())
    assert "for GPUs; here only forward" in findings["flex"].detail


def test_findings_of_other_kernels(monkeypatch):
    before = found(monkeypatch, build.Built(Library(), "built before and loaded", "kernel.so", "gcc -O3"))
    assert before["fused"].detail == "built before with `gcc -O3`: 8 lanes, no threads"
    none = found(monkeypatch, build.Built(None, "no C compiler was found"))
    assert none["fused"].active is False
    assert "no C compiler was found. Without it" in none["fused"].detail
    assert "its library" not in none


def test_findings_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(diagnosis.triton, "find_spec", lambda name: None)
    findings = found(monkeypatch, build.Built(None, "no C compiler was found"))
    assert findings["GPU"].detail == "a GPU"
    assert findings["flex"].active is True
    assert findings["flex"].detail == "for GPUs"


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "a GPU"])
def test_findings_about_triton(monkeypatch, gpu):
    built = build.Built(None, "no C compiler was found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(diagnosis.triton, "find_spec", lambda name: object())
    monkeypatch.setattr(diagnosis.metadata, "version", lambda name: "3.9.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability[0])
    for agrees, detail in ((True, "the largest error is 0.01"), (False, "the largest error is 0.5")):
        monkeypatch.setattr(verification, "_verdicts", {torch.device("cuda", 0): verification.Verdict(agrees, detail)})
        finding = found(monkeypatch, built)["triton"]
        assert finding.active is (gpu and agrees)
        assert (detail if gpu else "on CPUs only in Triton's interpreter") in finding.detail
        assert ("impl='auto' does not take it" in finding.detail) is (gpu and not agrees)
    if gpu:
        capability[0] = (7, 5)
        finding = found(monkeypatch, built)["triton"]
        assert (finding.active, finding.detail) == (
            False, "it needs a GPU of compute capability 8.0 or later; this one has 7.5",
        )  # fmt: skip
    monkeypatch.setattr(diagnosis.triton, "find_spec", lambda name: None)
    finding = found(monkeypatch, built)["triton"]
    assert (finding.active, finding.detail) == (False, "triton is not installed; pip install 'locant[gpu]'")


@pytest.mark.skipif(build.build().library is None, reason="no kernel here; returns with a C compiler")
def test_choices_on_a_cpu(monkeypatch):
    """The table of `locant doctor`: the rules of `choice.py` in five situations."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    columns = ("reading", "training", "in bfloat16", "in float64", "decoding")
    rows = {
        "rope": ("sdpa", "sdpa", "sdpa", "sdpa", "sdpa"),
        "tisa": ("fused", "fused", "fused", "sdpa", "fused"),
        "huang4:clip=64": ("fused", "fused", "fused", "sdpa", "fused"),
        "huang3:clip=64": ("fused", "fused", "fused", "eager", "fused"),
        "shaw:clip=64": ("fused", "fused", "fused", "eager", "fused"),
        "cope": ("sdpa", "sdpa", "sdpa", "sdpa", "sdpa"),
    }
    assert diagnosis.choices() == {spec: dict(zip(columns, row, strict=True)) for spec, row in rows.items()}


def test_gradients_and_sizes_of_the_situations(monkeypatch):
    seen = []
    choose = diagnosis.choose

    def record(request, impl):
        q, k = request.q, request.k
        grad = torch.is_grad_enabled()
        seen.append((q.shape, k.shape, q.dtype, grad, q.requires_grad, k.requires_grad, request.causal, impl))
        return choose(request, impl)

    monkeypatch.setattr(diagnosis, "choose", record)
    diagnosis.choices()
    sizes = [(64, torch.float32, False), (64, torch.float32, True), (64, torch.bfloat16, True)]
    sizes += [(64, torch.float64, True), (1, torch.float32, False)]
    expected = [
        ((1, 2, queries, 16), (1, 2, 64, 16), dtype, train, train, train, True, "auto")
        for queries, dtype, train in sizes
    ]
    assert seen == expected * 6


def test_every_finding_has_a_detail():
    for finding in diagnosis.diagnose():
        assert finding.name
        assert finding.active in (None, False, True)
        assert isinstance(finding.detail, str)
        assert finding.detail not in ("", "None")
