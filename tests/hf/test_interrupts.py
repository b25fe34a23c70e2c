"""Interrupts wait until a model is whole again, and a model is analysed by one thread at a time."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

import locant
from locant.analysis.attribution import attribute, similarity
from locant.analysis.certainty import certainty
from locant.hf import attaching, interrupts, swapping
from locant.hf.exclusive import exclusive
from tests import hf_models

IDS = torch.tensor([[5, 17, 42, 8]])
MANY = torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A process that a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def state(model):
    """Everything that an analysis changes for a while."""
    return (
        [(name, type(module), sorted(module.__dict__.keys() - {"config"}), module.training, sorted(module._modules),
          list(module._forward_pre_hooks.values()), list(module._forward_hooks.values()),
          list(module._state_dict_pre_hooks.values()))
         for name, module in model.named_modules()],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        model.config.to_dict(), model.config._attn_implementation,
        torch.is_grad_enabled(),
    )  # fmt: skip


def test_a_signal_waits_for_the_end_of_the_block():
    before, done = signal.getsignal(signal.SIGINT), []

    @interrupts.deferred()
    def run(*, checked):
        with interrupts.deferred():
            interrupt()
        if checked:
            interrupts.check()
        done.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        run(checked=False)
    assert done
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        run(checked=True)
    assert len(done) == 1
    interrupts.check()  # nothing is left


def test_other_threads_have_no_signals():
    def run():
        with interrupts.deferred():
            interrupts.check()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() is signal.getsignal(signal.SIGINT)


def interrupted(monkeypatch, owner, name, *, after=False):
    """Ctrl-C whenever a function is called, or when it has ended."""
    real = getattr(owner, name)

    def run(*args, **kwargs):
        if not after:
            interrupt()
        found = real(*args, **kwargs)
        if after:
            interrupt()
        return found

    monkeypatch.setattr(owner, name, run)


PLACES = [
    (swapping, "prove", False), (swapping, "attach", True), (swapping, "detach", False),
    (swapping, "find_attentions", False), (attaching, "follow", True), (attaching, "unfollow", False),
    (attaching, "use_attention", True), (torch.autograd, "grad", False),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "after"), PLACES)
def test_ctrl_c_leaves_the_model_as_it_was(monkeypatch, owner, name, after):
    model = hf_models.make("llama", AutoModelForCausalLM).train()
    before = state(model)
    with monkeypatch.context() as patch:
        interrupted(patch, owner, name, after=after)
        with pytest.raises(KeyboardInterrupt):
            attribute(model, IDS)
    assert state(model) == before
    assert attribute(model, IDS).layers


def test_ctrl_c_in_the_middle_of_a_run():
    model = hf_models.make("llama", AutoModelForCausalLM)
    model.model.layers[0].register_forward_hook(interrupt)
    ran = []
    model.lm_head.register_forward_pre_hook(lambda module, args: ran.append(torch.is_grad_enabled()))
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        attribute(model, IDS)
    assert ran == [False]  # the plain run ended, and the run by the rules did not start
    assert state(model) == before


def test_ctrl_c_while_a_swapped_model_is_swapped_again(monkeypatch):
    model = locant.swap(hf_models.make("llama"), "tisa:kernels=1")
    with monkeypatch.context() as patch:
        interrupted(patch, swapping, "prove")
        with pytest.raises(KeyboardInterrupt):
            locant.swap(model, "alibi")
    assert str(model.layers[0].self_attn.locant) == "tisa:kernels=1"


def test_ctrl_c_in_the_middle_of_certainty(monkeypatch):
    model = hf_models.make("t5").get_encoder()
    before = state(model)
    with monkeypatch.context() as patch:
        interrupted(patch, torch, "multinomial")
        with pytest.raises(KeyboardInterrupt):
            certainty(model, MANY)
    assert state(model) == before


@pytest.mark.parametrize("spec", [None, "tisa:kernels=2"])
def test_threads_that_share_a_model_wait_for_each_other(spec):
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    if spec:
        locant.swap(model, spec)
    before = state(model)
    jobs = [lambda: attribute(model, IDS, output=3).content, lambda: similarity(model.base_model, IDS, IDS).pairs]
    expected = [job() for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: jobs[number % 2](), range(8)))
    for number, each in enumerate(found):
        torch.testing.assert_close(each, expected[number % 2])
    assert state(model) == before


def test_another_thread_that_runs_the_model_gets_an_error_in_words():
    model = hf_models.make("t5")
    with exclusive(model), exclusive(model), ThreadPoolExecutor(1) as pool:
        model.get_encoder()(input_ids=IDS)  # this thread may
        with pytest.raises(RuntimeError, match=r"T5Stack is being analysed in another thread.*run a copy of the model"):
            pool.submit(model.get_encoder(), input_ids=IDS).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.get_encoder(), input_ids=IDS).result()


def test_a_thread_that_waits_for_a_model_can_be_interrupted():
    model, entered, end = hf_models.make("bert"), threading.Event(), threading.Event()

    def hold():
        with exclusive(model):
            entered.set()
            end.wait(10)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        entered.wait(10)
        threading.Timer(0.1, interrupt).start()
        with pytest.raises(KeyboardInterrupt), exclusive(model):
            raise AssertionError("entered a model that another thread has")
        end.set()
        held.result()
