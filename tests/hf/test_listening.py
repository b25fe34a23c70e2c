"""Observers of attention: all of them run, nobody else's do, and no output changes."""

import asyncio
import copy
import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModel

import locant
from locant.attention import eager
from locant.hf.call import AttentionCall
from locant.hf.listening import observers, observing
from locant.hf.seam import through_seam
from locant.hf.swapping import native_as_schemes
from tests.hf_models import CONFIGS, DECODERS, GROUPED, inputs, make, output

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def swapped():
    """A BERT with ALiBi. Tests must leave it as it is."""
    return locant.swap(make("bert"), "alibi")


def attention_modules(model):
    """Of BERT or MPNet, in the order they run."""
    return [module for name, module in model.named_modules() if name.endswith(("attention.self", "attention.attn"))]


# ---- blocks ---------------------------------------------------------------------------------------


def test_nested_observers_all_run_the_outermost_first(swapped):
    seen = []

    def observer(name):
        return {
            "before": lambda call: seen.append(f"{name} before"),
            "after": lambda call, out: seen.append(f"{name} after"),
        }

    with observing(**observer("outer")), observing(**observer("middle")):
        with observing(**observer("inner")):
            output(swapped, input_ids=IDS)
        names = ["outer", "middle", "inner"]
        one_layer = [f"{name} before" for name in names] + [f"{name} after" for name in names]
        assert seen == 2 * one_layer
        seen.clear()
        output(swapped, input_ids=IDS)
        assert "inner before" not in seen
        assert len(seen) == 2 * 4
    assert observers() == ()


def test_blocks_may_end_in_any_order(swapped):
    first, second = [], []
    one, two = observing(before=first.append), observing(before=second.append)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    output(swapped, input_ids=IDS)
    two.__exit__(None, None, None)
    output(swapped, input_ids=IDS)
    assert (len(first), len(second)) == (0, 2)
    assert observers() == ()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("kind", "spec"), [("bert", None), ("bert", "tisa"), ("mpnet", None), ("mpnet", "tisa")])
def test_an_observer_that_raises_leaves_nothing_behind(kind, spec, moment):
    model = make(kind)
    if spec is not None:
        locant.swap(model, spec)
    before, implementation = output(model, input_ids=IDS), model.config._attn_implementation

    def fail(*_):
        raise ArithmeticError("from the observer")

    with pytest.raises(ArithmeticError, match="from the observer"), through_seam(model), observing(**{moment: fail}):
        output(model, input_ids=IDS)
    assert observers() == ()
    assert model.config._attn_implementation == implementation
    assert torch.equal(output(model, input_ids=IDS), before)
    seen = []
    with through_seam(model), observing(before=seen.append):
        assert torch.equal(output(model, input_ids=IDS), before)
    assert len(seen) == 2


def test_what_before_may_return(swapped):
    with (
        pytest.raises(TypeError, match="before= returned Tensor; return an AttentionCall"),
        observing(before=lambda call: call.query),
    ):
        output(swapped, input_ids=IDS)


# ---- threads and tasks ----------------------------------------------------------------------------


def test_threads_do_not_see_each_other_s_observers():
    """Two models at once, every forward of one between two forwards of the other."""
    models = {"bert": locant.swap(make("bert"), "tisa"), "mpnet": make("mpnet")}
    expected = {kind: output(model, input_ids=IDS) for kind, model in models.items()}
    seen, outputs, problems = {kind: [] for kind in models}, {kind: [] for kind in models}, []
    together = threading.Barrier(2, timeout=60)

    def work(kind):
        try:
            together.wait()
            with through_seam(models[kind]), observing(before=seen[kind].append):
                for _ in range(5):
                    together.wait()
                    outputs[kind].append(output(models[kind], input_ids=IDS))
                together.wait()
        except BaseException as problem:
            problems.append(problem)
            together.abort()

    threads = [threading.Thread(target=work, args=[kind]) for kind in models]
    with observing(before=lambda call: pytest.fail("seen from the main thread")):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    for kind, model in models.items():
        assert [call.module for call in seen[kind]] == 5 * attention_modules(model)
        assert all(torch.equal(found, expected[kind]) for found in outputs[kind])


def test_tasks_do_not_see_each_other_s_observers(swapped):
    other = make("mpnet")
    seen = {"bert": [], "mpnet": []}

    async def work(kind, model):
        with through_seam(model), observing(before=seen[kind].append):
            for _ in range(3):
                output(model, input_ids=IDS)
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(work("bert", swapped), work("mpnet", other))

    asyncio.run(both())
    assert [call.module for call in seen["bert"]] == 3 * attention_modules(swapped)
    assert [call.module for call in seen["mpnet"]] == 3 * attention_modules(other)
    assert observers() == ()


def test_what_a_block_starts_has_its_observers_until_it_ends(swapped):
    seen = []

    async def late(ended):
        await ended.wait()
        output(swapped, input_ids=IDS)

    async def work():
        ended = asyncio.Event()
        with observing(before=seen.append):
            await asyncio.to_thread(output, swapped, input_ids=IDS)
            assert len(seen) == 2
            task = asyncio.create_task(late(ended))
            await asyncio.sleep(0)
        ended.set()
        await task

    asyncio.run(work())
    assert len(seen) == 2


# ---- compiled models ------------------------------------------------------------------------------


def counting_compiler():
    """A back end of torch.compile that counts how often it compiles and how often compiled code runs."""
    counts = SimpleNamespace(compiled=0, run=0)

    def compiler(graph, example_inputs):
        counts.compiled += 1

        def run(*args):
            counts.run += 1
            return graph(*args)

        return run

    return compiler, counts


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_uncompiled_inside_the_block_and_compiled_outside(in_place):
    torch._dynamo.reset()
    model = locant.swap(make("bert"), "tisa")
    expected = output(model, input_ids=IDS)
    compiler, counts = counting_compiler()
    if in_place:
        model.compile(backend=compiler)
    compiled = model if in_place else torch.compile(model, backend=compiler)
    torch.testing.assert_close(output(compiled, input_ids=IDS), expected)
    before = copy.copy(counts)
    assert before.run > 0
    seen = []
    with observing(before=seen.append):
        assert torch.equal(output(compiled, input_ids=IDS), expected)
    assert counts == before
    assert [call.module for call in seen] == attention_modules(model)
    output(compiled, input_ids=IDS)
    assert (counts.compiled, counts.run) == (before.compiled, 2 * before.run)
    assert len(seen) == 2


def test_blocks_that_overlap_in_two_threads_leave_the_compiler_on():
    """torch has one switch for all threads."""
    torch._dynamo.reset()
    compiler, counts = counting_compiler()
    double = torch.compile(lambda x: 2 * x, backend=compiler)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with observing():
            first_is_in.set()
            second_is_in.wait(60)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    with observing():
        second_is_in.set()
        first_is_out.wait(60)
        double(IDS)
        assert counts.run == 0
    thread.join()
    double(IDS)
    assert counts.run == 1


# ---- outputs --------------------------------------------------------------------------------------


def observed_output(model, given):
    """The output, and the calls, of a model with two observers."""
    calls, outs = [], []
    with through_seam(model), observing(before=calls.append, after=lambda call, out: outs.append(out)), observing():
        found = output(model, **given)
    assert len(calls) == len(outs)
    assert all(call.query.shape[0] == out.shape[0] and call.query.shape[1:] == out.transpose(1, 2).shape[1:]
               for call, out in zip(calls, outs, strict=True))  # fmt: skip
    return found, calls


def implementations(model):
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_observing_changes_no_output(kind):
    """Bit for bit: native with each implementation of transformers, and swapped."""
    model = make(kind)
    # T5 has a cross-attention beside each of its decoder's self-attentions, and so has BART.
    number = {"t5": 2 + 2 * 2, "bart": 2 + 2 * 3}.get(kind, 2)
    paddings = [None] if kind == "vit" else [None, "left", "right"]
    for implementation in ["eager"] if kind == "mpnet" else ["sdpa", "eager"]:
        if kind != "mpnet":
            model.set_attn_implementation(implementation)
        names = implementations(model)
        for padding in paddings:
            given = inputs(kind, padding=padding)
            before = output(model, **given)
            during, calls = observed_output(model, given)
            assert torch.equal(during, before)
            assert torch.equal(output(model, **given), before)
            assert len(calls) == number
            assert all(call.is_native for call in calls)
        assert implementations(model) == names
    for spec in ("nope", "tisa", "rope"):
        locant.swap(model, spec)
        for padding in paddings:
            given = inputs(kind, padding=padding)
            before = output(model, **given)
            during, calls = observed_output(model, given)
            assert torch.equal(during, before), spec
            assert torch.equal(output(model, **given), before), spec
            assert len(calls) == number
            assert sum(call.scheme is None for call in calls) == {"t5": 2, "bart": 3}.get(kind, 0)


def test_parts_of_a_model_keep_their_implementations():
    model = make("t5")
    model.encoder.set_attn_implementation("eager")
    names, given = implementations(model), inputs("t5")
    assert set(names) == {"eager", "sdpa"}
    before = output(model, **given)
    during, calls = observed_output(model, given)
    assert torch.equal(during, before)
    assert implementations(model) == names
    assert [call.transformers_attention.__name__ for call in calls] == ["eager_attention_forward"] * 2 + [
        "sdpa_attention_forward"
    ] * 4


UNUSUAL = {
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 6},  # caps its logits
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},  # one more logit per head
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_attention_with_a_softcap_or_sinks_is_observed_as_it_is(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **GROUPED, **UNUSUAL[kind], head_dim=8)
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    before = output(model, input_ids=IDS)
    during, calls = observed_output(model, {"input_ids": IDS})
    assert torch.equal(during, before)
    assert len(calls) == 2
    argument = {"gemma2": "softcap", "gpt_oss": "s_aux"}[kind]
    assert all(call.others[argument] is not None for call in calls)
    assert all((call.softcap is None) == (kind == "gpt_oss") for call in calls)
    assert all((call.sinks is None) == (kind == "gemma2") for call in calls)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "t5"])
def test_weights_of_a_native_model_are_those_of_transformers(kind):
    model, given = make(kind), {**inputs(kind, padding="right"), "output_attentions": True}
    if kind != "mpnet":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        before = model(**given)
        with through_seam(model):
            during = model(**given)
    names = [name for name in before if "attentions" in name and before[name]]
    assert len(names) == (3 if kind == "t5" else 1)
    for name in names:
        assert len(before[name]) == 2
        assert all(torch.equal(a, b) for a, b in zip(before[name], during[name], strict=True))


def test_blocks_inside_each_other_go_through_the_seam_to_the_end():
    model, seen = make("mpnet"), []
    before = output(model, input_ids=IDS)
    with through_seam(model):
        with through_seam(model):
            pass
        with observing(before=seen.append):
            assert torch.equal(output(model, input_ids=IDS), before)
    assert len(seen) == 2
    assert "forward" not in model.__dict__
    assert torch.equal(output(model, input_ids=IDS), before)


# ---- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "spec"), [("bert", None), ("mpnet", None), ("gpt2", "tisa"), ("llama", "nope")])
def test_a_changed_call_is_computed_in_its_place(kind, spec):
    model = make(kind)
    if spec is not None:
        locant.swap(model, spec)
    before, plain, doubled, received = output(model, input_ids=IDS), [], [], []
    with through_seam(model):
        with observing(after=lambda call, out: plain.append(out)):
            output(model, input_ids=IDS)
        with ExitStack() as stack:
            stack.enter_context(observing(before=lambda call: replace(call, value=2 * call.value)))
            stack.enter_context(observing(before=received.append, after=lambda call, out: doubled.append(out)))
            changed = output(model, input_ids=IDS)
    assert torch.equal(doubled[0], 2 * plain[0])  # a power of two: to the last bit
    assert all(isinstance(call, AttentionCall) for call in received)
    assert not torch.allclose(changed, before, atol=1e-2)
    assert torch.equal(output(model, input_ids=IDS), before)


def test_cross_attention_of_t5_has_no_scheme():
    model, given = locant.swap(make("t5"), "tisa"), inputs("t5")
    calls = []
    with observing(before=calls.append):
        output(model, **given)
    shapes = [(call.scheme is None, call.query.shape[2], call.key.shape[2]) for call in calls]
    assert shapes == 2 * [(False, 9, 9)] + 2 * [(False, 6, 6), (True, 6, 9)]
    names = {module: name for name, module in model.named_modules()}
    for call in calls:
        assert names[call.module].endswith("EncDecAttention" if call.scheme is None else "SelfAttention")
        assert not call.is_native


@pytest.mark.parametrize("kind", ["bert", "mpnet", "t5", *DECODERS])
def test_the_request_of_a_call_is_what_attention_computes(kind):
    """Against weights made of its logits, with padding, and for a decoder with a cache too."""
    model = locant.swap(make(kind), "tisa+rope")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "locant" in name:
                parameter.normal_()
    checked = []

    def compare(call, out):
        if call.scheme is None:
            return
        request = call.request()
        logits, visible = eager.logits(request), request.visible()
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        value = call.value.repeat_interleave(logits.shape[1] // call.value.shape[1], dim=1)[:, :, : logits.shape[-1]]
        wanted = (logits.softmax(-1) @ value).transpose(1, 2)
        real = wanted.isfinite()  # a padding token on the left sees nothing
        torch.testing.assert_close(out[real], wanted[real], rtol=1e-4, atol=1e-5)
        checked.append(bool(real.all()))

    with observing(after=compare), torch.no_grad():
        for padding in (None, "left", "right"):
            model(**inputs(kind, padding=padding))
        if kind in DECODERS:
            cache = model(input_ids=IDS[:, :5], use_cache=True).past_key_values
            for rest in (IDS[:, 5:8], IDS[:, 8:]):
                cache = model(input_ids=rest, past_key_values=cache).past_key_values
    assert len(checked) == (4 if kind == "t5" else 2) * (6 if kind in DECODERS else 3)


@pytest.mark.parametrize("spec", [None, "tisa"])
def test_gradients_are_those_of_the_model(spec):
    """Also where checkpointing repeats a layer in the backward pass: the observer sees that as well."""
    model = make("llama")
    if spec is not None:
        locant.swap(model, spec)
    model.gradient_checkpointing_enable()
    model.train()

    def gradients():
        model.zero_grad()
        model(input_ids=IDS).last_hidden_state.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    before, seen = gradients(), []
    with through_seam(model), observing(before=seen.append):
        during = gradients()
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["bert", "mpnet", "t5"])
def test_a_swap_inside_the_seam_leaves_nothing_behind(kind):
    """Attention by distance swaps a model for a moment; the block around it goes on, and ends as it began."""
    model = make(kind)
    implementation = model.config._attn_implementation
    given = inputs(kind)
    expected = output(model, **given)
    seen = []
    with through_seam(model):
        with native_as_schemes(model):
            torch.testing.assert_close(output(model, **given), expected)
        with observing(before=lambda call: seen.append(call.module)):
            assert torch.equal(output(model, **given), expected)
    assert len(set(seen)) >= 2
    assert model.config._attn_implementation == model.base_model.config._attn_implementation == implementation
    with through_seam(model):
        locant.swap(model, "alibi")
    swapped = output(model, **given)
    assert not torch.allclose(swapped, expected)
    locant.swap(model, "native")
    assert model.config._attn_implementation == implementation
    assert torch.equal(output(model, **given), expected)
