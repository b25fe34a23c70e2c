"""Inspections of tiny models."""

from locant.analysis import inspection

QUICK = {
    "LENGTH": 24,
    "SEQUENCES": 6,
    "CERTAINTY_LENGTH": 12,
    "CERTAINTY_SEQUENCES": 8,
    "PROBE_LENGTH": 16,
    "PROBE_STEPS": 5,
    "LENGTHS": (8, 16, 32),
}
"""Sizes that make an inspection fast."""


def inspected(model, name="tiny"):
    tokens = inspection.Tokens(None, "", 60)
    *_, (stage, found) = inspection.inspect(model, tokens, name)
    assert stage == "done"
    return found
