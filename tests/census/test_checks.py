"""The checks of the census pass on healthy models, and each of them notices a swap that is broken on purpose."""

import warnings

import pytest
import torch

import locant
from census import campaign, checks
from census.campaign import PARTLY, RIGHT, Result
from census.names import DECODER, ENCODER, Architecture, architectures
from census.outcome import ERROR, NOT_RUN, OK, REFUSED, WRONG, Outcome, of_exception
from census.subject import Subject

BY_NAME = {each.name: each for each in architectures()}
swap, native, load, fit = locant.swap, locant.native, locant.load, locant.fit


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def subject(name):
    return Subject(BY_NAME[name])


@pytest.mark.parametrize("name", ["bert", "gpt2", "mistral", "t5"])
def test_a_healthy_model_passes(name):
    result = Result(BY_NAME[name], checks.check(subject(name)))
    assert result.verdict == RIGHT, result.outcomes
    assert result.outcomes["by_hand"].state == (NOT_RUN if name == "t5" else OK)


def with_forward(change):
    """A swap after which the model's forward gets other arguments."""

    def broken(model, spec, **options):
        swap(model, spec, **options)
        forward = model.forward
        model.forward = lambda *args, **given: forward(*args, **change(given))
        return model

    return broken


def forgets_mask(given):
    return {name: value for name, value in given.items() if name != "attention_mask"}


def stretches_positions(given):
    return {**given, "position_ids": 2 * torch.arange(given["input_ids"].shape[1])[None]}


def forgets_the_past(given):
    one = given["input_ids"].shape[1] == 1
    return {**given, "position_ids": torch.zeros(len(given["input_ids"]), 1, dtype=torch.long)} if one else given


def does_nothing(model, spec, **options):
    return model


def ignores_lists(model, spec, **options):
    return swap(model, spec if isinstance(spec, str) else "alibi", **options)


@torch.no_grad()
def nudge(model):
    """Changes one weight by the smallest step."""
    weight = next(model.parameters())
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    return model


def nudges(model, spec, **options):
    swap(model, spec, **options)
    return nudge(model) if isinstance(spec, str) and spec == "native" else model


def refuses_too_late(model, spec, **options):
    nudge(model)
    raise NotImplementedError("no")


@pytest.mark.parametrize(
    ("broken", "name", "check", "says"),
    [
        (with_forward(forgets_mask), "bert", checks.check_padding, "padding on the left changes outputs"),
        (with_forward(forgets_mask), "llama", checks.check_padding, "padding on the left changes outputs"),
        (with_forward(forgets_mask), "t5", checks.check_padding, "padding on the left changes outputs"),
        (with_forward(stretches_positions), "llama", checks.check_oracle, "by hand differs"),
        (with_forward(stretches_positions), "bert", checks.check_oracle, "by hand differs"),
        (with_forward(forgets_the_past), "llama", checks.check_cache, "a cache changes outputs"),
        (does_nothing, "bert", checks.check_swap, "did not change"),
        (ignores_lists, "bert", checks.check_swap, "scheme 1 of 2 has no effect"),
        (nudges, "gpt2", checks.check_back, "weights are not those of the original"),
        (refuses_too_late, "gpt2", checks.check_swap, "after the refusal its weights"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_broken_swap_is_wrong(broken, name, check, says, monkeypatch):
    assert check(subject(name)).state == OK
    monkeypatch.setattr(locant, "swap", broken)
    outcome = check(subject(name))
    assert outcome.state == WRONG
    assert says in outcome.reason


def test_positions_that_are_read_one_off_break_the_law(monkeypatch):
    def one_off(model):
        found = native(model)
        found.table.copy_(found.table.roll(1, 0))
        return found

    monkeypatch.setattr(locant, "native", one_off)
    outcome = checks.check_law(subject("gpt2"))
    assert outcome.state == WRONG
    assert "the law is off" in outcome.reason


def test_visible_padding_is_part_of_the_law(monkeypatch):
    """RoBERTa does not count a padding token; a swap that does is noticed, and only there."""

    def counts(model, spec, **options):
        swap(model, spec, **options)
        forward = model.forward

        def numbered(**given):
            ids = given["input_ids"]
            if "attention_mask" not in given:
                given["position_ids"] = 2 + torch.arange(ids.shape[1]).expand_as(ids)
            return forward(**given)

        model.forward = numbered
        return model

    monkeypatch.setattr(locant, "swap", counts)
    outcome = checks.check_law(subject("roberta"))
    assert outcome.state == WRONG
    assert "with visible padding" in outcome.reason


def test_other_weights_after_loading_are_wrong(monkeypatch):
    @torch.no_grad()
    def loads_other(*args):
        model = load(*args)
        next(model.parameters()).mul_(1.01)
        return model

    monkeypatch.setattr(locant, "load", loads_other)
    assert checks.check_saved(subject("bert")).state == WRONG


def test_a_fit_that_ends_in_nan_is_wrong(monkeypatch):
    @torch.no_grad()
    def to_nan(model, *args, **options):
        fit(model, *args, **options)
        next(parameter for name, parameter in model.named_parameters() if "locant" in name).fill_(torch.nan)

    monkeypatch.setattr(locant, "fit", to_nan)
    assert "not finite" in checks.check_fit(subject("bert")).reason


def test_a_fault_of_the_original_is_not_blamed_on_the_swap():
    """MobileBERT mixes each token with its neighbours, padding included."""
    assert checks.check_padding(subject("mobilebert")) == Outcome(OK, checks.LIKE_ORIGINAL)


def test_a_refusal_in_our_words_and_an_accident_are_told_apart():
    assert checks.check(subject("nystromformer"))["swap"].state == REFUSED
    with pytest.raises(ValueError, match="invalid literal") as elsewhere:
        int("x")
    assert of_exception(elsewhere.value).state == ERROR
    with pytest.raises(TypeError) as found:
        swap("not a model", "alibi")
    assert of_exception(found.value).state == REFUSED


def test_verdicts():
    def verdict(**states):
        return Result(BY_NAME["bert"], {name: Outcome(state) for name, state in states.items()}).verdict

    assert verdict(swap=OK, padding=OK, read=REFUSED, fit=REFUSED) == RIGHT
    assert verdict(swap=OK, saved=REFUSED) == PARTLY
    assert verdict(swap=OK, saved=ERROR, law=WRONG) == WRONG
    assert verdict(swap=OK, saved=ERROR) == ERROR
    assert verdict(swap=REFUSED, read=OK) == REFUSED


def test_an_architecture_that_takes_too_long_or_dies_or_cannot_be_built_stops_nothing():
    broken = [Architecture("none", ENCODER, "Nothing"), Architecture("bert", DECODER, "BertModel")]
    results = list(campaign.run([broken[0]], 30)) + list(campaign.run([broken[1]], 0.0))
    assert [result.verdict for result in results] == [ERROR, ERROR]
    assert "not built" in results[0].reason
    assert "no answer within 0 s" in results[1].reason
