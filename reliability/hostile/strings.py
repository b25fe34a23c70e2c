"""Spec strings, budgets and sizes that are absurd."""

from __future__ import annotations

import locant
from locant import notation
from locant.runs.budget import Budget
from reliability.hostile.case import Cases

CASES = Cases("spec")
SIZES = {"n_heads": 12, "head_dim": 64, "d_model": 768}


def build(spec):
    """Builds a scheme."""
    return lambda folder: locant.scheme(spec, **SIZES)


for name, spec, says in [
    ("kernels of 10^12", "tisa:kernels=1000000000000", "numbers"),
    ("kernels of 10^30", f"tisa:kernels={10**30}", "kernels"),
    ("kernels with 5,000 digits", "tisa:kernels=" + "9" * 5000, "must be a whole number"),
    ("kernels as 10**12", "tisa:kernels=10**12", "must be a whole number"),
    ("kernels negative", "tisa:kernels=-1", "kernels"),
    ("kernels NaN", "tisa:kernels=nan", "must be a whole number"),
    ("a length of 1e15", "learned:length=1e15", "must be a whole number"),
    ("a length of 10^15", "learned:length=1000000000000000", "numbers"),
    ("a length of zero", "learned:length=0", "length"),
    ("a clip of 10^15", "huang4:clip=1000000000000000", "numbers"),
    ("a clip of 10^12 for a vector gain", "huang3:clip=1000000000000", "numbers"),
    ("a negative clip", "shaw:clip=-5", "clip"),
    ("theta NaN", "rope:theta=nan", "theta"),
    ("theta infinite", "rope:theta=inf", "theta"),
    ("theta zero", "rope:theta=0", "theta"),
    ("base NaN", "xpos:base=nan", "base"),
    ("buckets of 10^15", "t5:buckets=1000000000000000,max_distance=10000000000000000", "numbers"),
    ("a negative bucket", "t5:buckets=-2", "buckets"),
    ("code as a name", "__import__('os').system('true')", "unknown scheme"),
    ("a format string", "{0.__class__}", "unknown scheme"),
    ("a path", "../../etc/passwd", "per layer"),
    ("a null byte", "tisa\0", "unknown scheme"),
    ("a million characters", "x" * 10**6, "characters"),
    ("100,000 sums", "nope+" * 100_000 + "nope", "characters"),
    ("200,000 spaces", "+" + " " * 200_000, "characters"),
    ("200,000 colons", ":" * 200_000, "characters"),
    ("an option twice", "tisa:kernels=3,kernels=4", "twice"),
    ("an option with a null byte", "tisa:kernels=\0", "kernels"),
    ("brackets", "tisa(" * 1000, "unknown scheme"),
    ("a dunder option", "tisa:__class__=x", "has no option"),
    ("the option self", "tisa:self=1", "has no option"),
    ("a size as an option", "tisa:n_heads=1000000000", "has no option"),
    ("empty", "", "empty"),
    ("spaces", "   ", "empty"),
    ("only a plus", "+", "without a name"),
    ("a number", 5, "a spec is a string"),
    ("bytes", b"tisa", "a spec is a string"),
]:
    CASES.add(name, says, build(spec))
CASES.add("a budget without end", "budget", lambda folder: Budget.parse("9" * 400 + "s"))
CASES.add("a budget of 10^300 steps", "budget", lambda folder: Budget.parse("9" * 300 + "steps"))
CASES.add("a budget of digits only", "budget", lambda folder: Budget.parse("9" * 100_000))
CASES.add("a list of commas", "empty place", lambda folder: notation.split("," * 100_000))
