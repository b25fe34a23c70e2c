"""`auto` takes `triton` on a device only after it has agreed with `eager` there: `locant.attention.verification`.

No GPU is needed. The CPU stands for the GPU, and the operators of `fused` for those of `triton`, right or wrong.
"""

import threading
import warnings

import pytest
import torch

import locant
from locant.attention import choice, fused, triton, verification
from locant.attention.build import build
from locant.attention.choice import choose
from locant.attention.fused_call import WITH_GRADIENT, Call
from locant.attention.request import prepare
from tests import cases

pytestmark = pytest.mark.skipif(
    build().library is None, reason=f"no kernel here: {build().why}; returns with a C compiler"
)
CPU = torch.device("cpu")


class Kernel:
    """The operators of `fused`, with a fault in the output, in a gradient, or in the weights that stay."""

    def __init__(self, fault=lambda number, out: out, gradient=None, factor=1.001, kept=lambda x: x):
        self.fault, self.gradient, self.factor, self.number, self.change = fault, gradient, factor, 0, kept

    def forward(self, *call):
        self.number += 1
        out, lse = fused.forward(*call)
        return self.fault(self.number, out.clone()), lse

    def backward(self, *arguments):
        grads = fused.backward(*arguments)
        if self.gradient is not None:
            at = WITH_GRADIENT.index(self.gradient)
            grads[at] = grads[at] * self.factor
        return grads

    def kept(self, call):
        return self.change(fused.OPERATORS.kept(call))


def one_number(number, out):
    out[1, 3, -1, -1] += 0.1 * out.abs().max()
    return out


def not_finite(number, out):
    out[0, 0, 0, 0] = float("nan")
    return out


def without(name):
    """A kernel that ignores a term, forward and backward."""

    class Without(Kernel):
        def forward(self, *call):
            return super().forward(*self.changed(call))

        def backward(self, grad, out, lse, wanted, *call):
            return super().backward(grad, out, lse, wanted, *self.changed(call))

        def changed(self, call):
            call = Call(*call)
            term = getattr(call, name)
            if name in ("lowest", "highest", "mask", "softcap"):
                return call._replace(**{name: None})
            neutral = torch.ones_like if name == "gain" else torch.zeros_like
            return call if term is None else call._replace(**{name: neutral(term)})

    return Without()


WRONG = {
    **{f"without {name}": without(name) for name in ("bias", "gain", "query", "key", "value", "mask", "softcap")},
    **{f"without {name} ": without(name) for name in ("sinks", "lowest", "highest")},
    "one number of the output": Kernel(one_number),
    "a number that is not finite": Kernel(not_finite),
    "other bits the second time": Kernel(lambda number, out: out * (1 + 1e-6 * (number % 2))),
    "more dropout than asked for": Kernel(kept=lambda kept: kept * (torch.rand(kept.shape) < 0.9)),
    **{f"the gradient of {name}": Kernel(gradient=name) for name in ("q", "k", "v", "bias", "gain", "query", "key")},
    **{f"the gradient of {name} ": Kernel(gradient=name) for name in ("value", "sinks")},
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`auto` has the order of CUDA devices on the CPU; the checks are small and in dtypes that `fused` has."""
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setitem(choice.AUTO, "cpu", choice.AUTO["cuda"])
    able = choice.Backend("triton", fused.attend, choice.fused_unsupported)
    monkeypatch.setitem(choice.BACKENDS, "triton", able)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, size in (("QUERIES", 20), ("KEYS", 24), ("WIDTH", 8)):
        monkeypatch.setattr(verification, name, size)
    dtypes = {torch.float16: torch.bfloat16}
    checks = {name: x._replace(dtype=dtypes.get(x.dtype, x.dtype)) for name, x in verification.CHECKS.items()}
    windowed = next(name for name, x in checks.items() if "window" in x.how)
    checks[windowed] = checks[windowed]._replace(how={"window": (6, 2)})
    monkeypatch.setattr(verification, "CHECKS", checks)


def chosen(**how):
    return choose(
        prepare(*cases.tensors(dtype=torch.float32), cases.build("huang3:clip=3").float(), **how), "auto"
    ).name


def test_a_right_kernel_is_taken(on_a_gpu, monkeypatch):
    monkeypatch.setattr(triton, "OPERATORS", Kernel())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "triton"
    assert "the largest error is" in verification.verdict(CPU).detail


@pytest.mark.parametrize("kernel", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_not_taken(on_a_gpu, monkeypatch, kernel):
    """The next back end computes the call, with one warning that has the largest error."""
    monkeypatch.setattr(triton, "OPERATORS", kernel)
    with pytest.warns(UserWarning, match=r"does not take 'triton' on cpu.*largest error is .* of the largest number"):
        assert chosen() == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "eager"


def test_a_kernel_that_does_not_run_is_not_taken(on_a_gpu, monkeypatch):
    def fail(*call):
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(triton, "OPERATORS", Kernel(lambda number, out: fail()))
    with pytest.warns(UserWarning, match="its kernels do not run: RuntimeError: out of resources: shared memory"):
        assert chosen() == "eager"


def test_the_interpreter_is_not_taken(on_a_gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.warns(UserWarning, match="interpreter is slow"):
        assert chosen() == "eager"


def test_each_device_is_verified_once_and_only_if_needed(on_a_gpu, monkeypatch):
    seen = []

    def verify(device):
        seen.append(device)
        return verification.Verdict(True, "right")

    monkeypatch.setattr(verification, "_verify", verify)
    assert chosen(need_weights=True) == "eager"
    assert seen == []  # `triton` could not compute that call
    assert chosen() == chosen() == "triton"
    assert seen == [CPU]
    assert verification.agrees("cuda", 0)
    assert verification.agrees("cuda", 1)
    assert seen == [CPU, torch.device("cuda", 0), torch.device("cuda", 1)]


def test_nothing_is_verified_while_a_graph_is_captured(on_a_gpu, monkeypatch):
    monkeypatch.setattr(verification, "_verify", lambda device: verification.Verdict(True, "right"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not verification.agrees("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert verification.agrees("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert verification.agrees("cuda", 0)  # known by now


def test_modes_of_the_caller_do_not_matter(on_a_gpu, monkeypatch):
    """Nor do the checks change the caller's random numbers."""
    monkeypatch.setattr(triton, "OPERATORS", Kernel())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert chosen() == "triton"
    torch.manual_seed(5)
    verification._verdicts.clear()
    verification.verdict(CPU)
    assert torch.equal(torch.rand(3), expected)


def test_compiled_code_verifies_too(on_a_gpu, monkeypatch):
    """The compiler takes the answer, and traces no check."""
    torch.compiler.reset()
    threads = []

    def verify(device):
        threads.append(threading.current_thread().name)
        return verification.Verdict(True, "right")

    monkeypatch.setattr(verification, "_verify", verify)
    given, scheme = cases.tensors(dtype=torch.float32), cases.build("huang3:clip=3").float()
    compiled = torch.compile(lambda q, k, v: locant.attend(q, k, v, scheme), backend="eager", fullgraph=True)
    found = compiled(*given)
    assert len(threads) == 1
    torch.testing.assert_close(found, locant.attend(*given, scheme, impl="eager"), rtol=1e-4, atol=1e-5)


def test_gradients_are_checked_with_the_dtypes_of_training(on_a_gpu, monkeypatch):
    """Autograd gives a kernel the gradient of its output in the dtype of the output, also for inputs in bfloat16."""
    seen = []

    class Recording(Kernel):
        def backward(self, grad, out, lse, wanted, *call):
            seen.append((Call(*call).q.dtype, grad.dtype, out.dtype))
            return super().backward(grad, out, lse, wanted, *call)

    monkeypatch.setattr(triton, "OPERATORS", Recording())
    assert verification.verdict(CPU).agrees
    assert {q for q, _, _ in seen} == {torch.bfloat16, torch.float32}
    assert all(grad == out for _, grad, out in seen)
