"""The checks of one architecture. Each returns an `Outcome`; `check` runs them all.

The reference of a swapped model is itself: without padding, without a cache, before it was saved. Where a swapped model
fails, the original takes the same check. If it fails too, the swap is not to blame.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import locant
from census.generating import generation_error
from census.models import output
from census.oracle import all_keys, by_hand
from census.outcome import LIKE_ORIGINAL, NOT_RUN, OK, REFUSED, Outcome, not_run, of_exception, wrong
from census.sizes import TOKENS
from census.subject import LEFT, RIGHT, TOLERANCE, Subject, difference
from tests.words import Letters, text

SPEC = "alibi"
FITTED = "tisa:kernels=2"
FIT_LENGTH, FIT_TOKENS = 16, 64
MOST_LAYERS = 6
"""Layers whose scheme is taken away, one at a time, to see that each of them uses it."""
CANNOT_WRITE = "the original cannot write"
SCHEME = "locant"
"""Name of the submodule of an attention module that holds its scheme."""


def swapped(subject: Subject) -> PreTrainedModel:
    """Returns a fresh model with ALiBi."""
    return locant.swap(subject.fresh(), SPEC)


def schemes(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules that hold a scheme."""
    return [name for name, _ in model.named_modules() if name.split(".")[-1] == SCHEME]


def same_bits(subject: Subject, model: PreTrainedModel) -> str:
    """Returns what differs between a model and the original, to the last bit; nothing if they are the same."""
    original = subject.original
    mine, theirs = model.state_dict(), original.state_dict()
    if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in theirs):
        return "its weights are not those of the original"
    if model.config._attn_implementation != original.config._attn_implementation:
        return f"its attention is {model.config._attn_implementation}"
    if not torch.equal(subject.run(model), subject.run(original)):
        return "its outputs are not those of the original"
    rows = subject.padded(LEFT)
    pair = [_or_class(lambda each=each: output(each, subject.given(rows.ids, rows.mask))) for each in (model, original)]
    if isinstance(pair[0], type) or isinstance(pair[1], type):
        return "" if pair[0] is pair[1] else "it takes other masks than the original"
    return "" if torch.equal(*pair) else "its outputs with padding are not those of the original"


def _or_class(call: Callable[[], Any]) -> Any:
    """The result of a call, or the class of its exception."""
    try:
        return call()
    except Exception as problem:
        return type(problem)


def check_swap(subject: Subject) -> Outcome:
    """The output changes, and every layer uses its scheme. After a refusal the model is as it was."""
    model = subject.fresh()
    try:
        locant.swap(model, SPEC)
    except Exception as problem:
        left = same_bits(subject, model)
        return wrong(f"after the refusal {left} ({problem})") if left else of_exception(problem)
    found = subject.run(model)
    if not found.isfinite().all():
        return wrong("outputs are not finite")
    if difference(found, subject.run(subject.original)) < TOLERANCE:
        own = SPEC in str(locant.native(subject.fresh()))  # BLOOM and MPT: it is their own scheme
        if not own or difference(found, subject.run(locant.swap(subject.fresh(), "nope"))) < TOLERANCE:
            return wrong("the output did not change")
    count = len(schemes(model))
    for layer in range(min(count, MOST_LAYERS)):
        specs = ["nope" if each == layer else SPEC for each in range(count)]
        if count > 1 and difference(subject.run(locant.swap(model, specs)), found) < TOLERANCE / 10:
            return wrong(f"scheme {layer + 1} of {count} has no effect")
    return Outcome(OK)


def _unless_original(error: float, of_original: Callable[[], float], what: str) -> Outcome:
    """OK if the error is small, or if the original has one of its size too: that of rounding in Zamba 2, say."""
    if error <= TOLERANCE:
        return Outcome(OK)
    theirs = _or_class(of_original)
    if isinstance(theirs, type) or 10 * theirs > error:
        return Outcome(OK, LIKE_ORIGINAL)
    return wrong(f"{what} changes outputs by {error:.1e}")


def check_padding(subject: Subject) -> Outcome:
    """Padding leaves the outputs of real tokens alone, on either side, in either stack."""
    model, notes = swapped(subject), ""
    if not subject.takes("attention_mask"):
        return not_run("it takes no attention mask")
    for side in (LEFT, RIGHT):
        pairs = [(subject.padding_error, f"padding on the {side}")]
        if subject.two_stacks and subject.takes("decoder_attention_mask"):
            pairs.append((subject.decoder_padding_error, f"padding on the {side} of the decoder"))
        for error, what in pairs:

            def of_original(error: Callable[..., float] = error, side: str = side) -> float:
                own = error(subject.original, side)
                if own > TOLERANCE and error == subject.padding_error and subject.takes("position_ids"):
                    return error(subject.original, side, numbered=True)
                return own

            outcome = _unless_original(error(model, side), of_original, what)
            if outcome.state != OK:
                return outcome
            notes = notes or outcome.reason
    return Outcome(OK, notes)


def check_oracle(subject: Subject) -> Outcome:
    """ALiBi by hand, in the original model, gives the same outputs."""
    expected = by_hand(subject)
    if expected is None:
        return not_run("no model by hand to compare with")
    error = difference(subject.run(all_keys(swapped(subject))), expected)
    return Outcome(OK) if error <= TOLERANCE else wrong(f"ALiBi by hand differs by {error:.1e}")


def check_back(subject: Subject) -> Outcome:
    """`native` gives the original back bit for bit."""
    model = swapped(subject)
    subject.run(model)
    left = same_bits(subject, locant.swap(model, "native"))
    return wrong(f"back with native positions, {left}") if left else Outcome(OK)


def check_cache(subject: Subject) -> Outcome:
    """Text written with a cache is the text written without, also after padding on the left."""
    if not subject.writes:
        return not_run("it does not write text")
    model, notes = swapped(subject), list[str]()
    for padded in (False, True):
        theirs = _or_class(lambda padded=padded: generation_error(subject, subject.original, padded))
        if isinstance(theirs, type):
            notes.append(CANNOT_WRITE)
            continue
        what = "a cache after padding on the left" if padded else "a cache"
        mine = generation_error(subject, model, padded)
        outcome = _unless_original(mine, lambda theirs=theirs: theirs, what)
        if outcome.state != OK:
            return outcome
        notes.append(outcome.reason)
    return not_run(CANNOT_WRITE) if set(notes) == {CANNOT_WRITE} else Outcome(OK, max(notes))


def check_native(subject: Subject) -> Outcome:
    """The model's own positions can be read; the reason of OK is their kind."""
    return Outcome(OK, locant.native(subject.fresh()).kind)


def check_law(subject: Subject) -> Outcome:
    """`swap(model, native(model))` keeps the outputs: plain, padded, and with a padding token that is visible."""
    model = subject.fresh()
    locant.swap(model, locant.native(model))
    inside = subject.ids.clone()
    inside[:, 4] = TOKENS["pad_token_id"]
    cases: list[tuple[str, Any, Any]] = [("", subject.ids, None), (" with visible padding", inside, None)]
    if subject.takes("attention_mask"):
        rows = [(side, subject.padded(side)) for side in (RIGHT, LEFT)]
        cases += [(f" with padding on the {side}", each.ids, each.mask) for side, each in rows]
    for what, ids, mask in cases:
        given = subject.given(ids, mask)
        pair = [subject.by_row(output(each, given), 2) for each in (model, subject.original)]
        shown = torch.ones_like(ids) if mask is None else mask
        for row in range(2):
            error = difference(*(subject.real(each[row], shown[row]) for each in pair))
            if error > TOLERANCE:
                return wrong(f"the law{what} is off by {error:.1e}")
    return Outcome(OK)


def _saved_error(subject: Subject, model: PreTrainedModel, load: Callable[[str, Any], PreTrainedModel]) -> float:
    """How far the outputs of a model that was saved and loaded are from its own."""
    with tempfile.TemporaryDirectory(prefix="census-") as folder:
        model.save_pretrained(folder)
        again = load(folder, type(model)).eval()
    return difference(subject.run(again), subject.run(model))


def check_saved(subject: Subject) -> Outcome:
    """A model that was saved and loaded has the same outputs."""
    error = _saved_error(subject, swapped(subject), locant.load)
    return _unless_original(
        error,
        lambda: _saved_error(subject, subject.fresh(), lambda folder, cls: cls.from_pretrained(folder)),
        "saving and loading",
    )


def check_fit(subject: Subject) -> Outcome:
    """`fit` runs, changes the outputs, keeps them finite, and `native` undoes it bit for bit."""
    model = subject.fresh()
    try:
        locant.fit(model, FITTED, text(40), tokenizer=Letters(), length=FIT_LENGTH, tokens=FIT_TOKENS)
    except Exception as problem:
        left = same_bits(subject, model)
        return wrong(f"after the refusal {left} ({problem})") if left else of_exception(problem)
    if not subject.run(model).isfinite().all():
        return wrong("outputs are not finite")
    left = same_bits(subject, locant.swap(model, "native"))
    return wrong(f"back with native positions, {left}") if left else Outcome(OK)


CHECKS: dict[str, Callable[[Subject], Outcome]] = {
    "swap": check_swap,
    "padding": check_padding,
    "by_hand": check_oracle,
    "back": check_back,
    "cache": check_cache,
    "read": check_native,
    "law": check_law,
    "saved": check_saved,
    "fit": check_fit,
}
"""Column of the table -> check, in order."""
NEEDS = {"padding": "swap", "by_hand": "swap", "back": "swap", "cache": "swap", "saved": "swap", "law": "read",
         "fit": "read"}  # fmt: skip
"""A check -> the check without which it is not run."""


def check(subject: Subject) -> dict[str, Outcome]:
    """Runs all checks of one architecture."""
    found: dict[str, Outcome] = {}
    for name, run in CHECKS.items():
        needed = found.get(NEEDS.get(name, ""))
        if needed is not None and needed.state in (REFUSED, "error", NOT_RUN):
            found[name] = not_run()
            continue
        try:
            found[name] = run(subject)
        except Exception as problem:
            found[name] = of_exception(problem)
    left = same_bits(subject, subject.fresh())
    if left:  # the original itself must not change, or every comparison above means nothing
        found["swap"] = wrong(f"a check changed the original: {left}")
    return found
