"""Products of float32 by oneDNN: only where nothing is rounded, and the setting of the process is given back."""

import threading

import pytest
import torch

from locant.runs import float32_products
from locant.runs.float32_products import TEST_SIZES, fast_products, takes_onednn


@pytest.fixture
def taken(monkeypatch):
    """A machine on which oneDNN is taken."""
    monkeypatch.setattr(float32_products, "takes_onednn", lambda: True)


@pytest.fixture
def amd(monkeypatch):
    """A machine that looks as if oneDNN were taken; the answer is not remembered."""
    monkeypatch.setattr(float32_products, "_processor", lambda: "vendor_id : AuthenticAMD")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    takes_onednn.cache_clear()
    yield
    takes_onednn.cache_clear()


def setting():
    return torch.get_float32_matmul_precision()


def test_products_have_the_digits_of_float32():
    left, right = torch.randn(256, 384), torch.randn(384, 128)
    exact = left.double() @ right.double()
    with fast_products():
        found = left @ right
    assert (found - exact).abs().max() < 2e-4  # rounding to bfloat16 gives 0.1


def test_the_setting_is_given_back(taken):
    with fast_products():
        with fast_products():
            assert setting() == "medium"
        assert setting() == "medium"
    assert setting() == "highest"
    with pytest.raises(KeyError), fast_products():
        raise KeyError
    assert setting() == "highest"


def test_threads_that_end_in_any_order_give_it_back(taken):
    begun, end = threading.Event(), threading.Event()

    def other():
        with fast_products():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with fast_products():
        thread.start()
        begun.wait()
    assert setting() == "medium"
    end.set()
    thread.join()
    assert setting() == "highest"


def test_a_setting_of_the_caller_stays(taken):
    torch.set_float32_matmul_precision("high")
    try:
        with fast_products():
            assert setting() == "high"
        assert setting() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="needs a PyTorch with settings per library")
def test_a_setting_of_one_library_stays(taken):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with fast_products():
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert setting() == "highest"


def test_it_is_taken_if_nothing_is_rounded(amd, monkeypatch):
    monkeypatch.setattr(float32_products, "_rounds", lambda *sizes: False)
    assert takes_onednn()
    assert setting() == "highest"


@pytest.mark.parametrize("rounded", TEST_SIZES)
def test_it_is_not_taken_if_a_product_is_rounded(amd, monkeypatch, rounded):
    monkeypatch.setattr(float32_products, "_rounds", lambda *sizes: sizes == rounded)
    assert not takes_onednn()


def test_it_is_not_taken_on_other_processors_or_beside_a_gpu(amd, monkeypatch):
    monkeypatch.setattr(float32_products, "_rounds", lambda *sizes: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not takes_onednn()
    takes_onednn.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(float32_products, "_processor", lambda: "vendor_id : GenuineIntel")
    assert not takes_onednn()


def test_rounding_is_seen(monkeypatch):
    assert not float32_products._rounds(64, 64, 64)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *size, **rest: full(*size, **rest).bfloat16().float())
    assert float32_products._rounds(64, 64, 64)
