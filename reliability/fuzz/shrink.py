"""Makes a failing case smaller while it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from reliability.fuzz.case import DEFAULTS, Case
from reliability.fuzz.check import FAILED, Outcome, run

SIZES = ("b", "kv", "groups", "lq", "lk", "d", "dv")
SECONDS = 60.0  # that shrinking may take


def shrink(case: Case, outcome: Outcome, attempt: Callable[[Case], Outcome] = run) -> tuple[Case, Outcome]:
    """The smallest case found that fails as `case` does, and its outcome."""
    end = time.monotonic() + SECONDS
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            try:
                found = attempt(smaller)
            except Exception:  # the smaller case is not a case, such as a rotation of one dimension
                continue
            if found.kind == FAILED and _way(found) == _way(outcome):
                case, outcome, shrunk = smaller, found, True
                break
    return case, outcome


def _way(outcome: Outcome) -> str:
    """How a case fails: the type of an exception, or that a result is off."""
    return "off" if " is off by " in outcome.what else outcome.what.partition(" in ")[0][:40]


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""
    for spec in _simpler_specs(case.spec):
        yield replace(case, spec=spec)
    for name, default in DEFAULTS.items():
        if name not in ("spec", "impl", "data", *SIZES) and getattr(case, name) != default:
            yield replace(case, **{name: default})
    for name in SIZES:
        size = getattr(case, name)
        for less in (1, size // 2, size - 2, size - 1):
            if 1 <= less < size:
                yield replace(case, **{name: less})
                if name in ("d", "lq"):  # values of the same size, as many keys as queries
                    yield replace(case, **{name: less, {"d": "dv", "lq": "lk"}[name]: less})
    for letter in case.wanted if case.context == "plain" else "":
        yield replace(case, wanted=case.wanted.replace(letter, ""))
    if case.impl == "auto":
        for impl in ("eager", "sdpa", "fused"):
            yield replace(case, impl=impl)


def _simpler_specs(spec: str) -> Iterator[str]:
    parts = spec.split("+")
    if len(parts) > 1:
        for i in range(len(parts)):
            yield "+".join(parts[:i] + parts[i + 1 :])
    for i, part in enumerate(parts):
        if "@" in part:
            yield "+".join([*parts[:i], part.partition("@")[0], *parts[i + 1 :]])
        name, _, options = part.partition(":")
        listed = options.split(",") if options else []
        for fewer in ([], *(listed[:n] + listed[n + 1 :] for n in range(len(listed)))):
            if len(fewer) < len(listed):
                yield "+".join([*parts[:i], ":".join([name, ",".join(fewer)]).rstrip(":"), *parts[i + 1 :]])
