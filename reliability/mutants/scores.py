"""The score: how many mutants a test has noticed, per package, and the survivors with the reason of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reliability.mutants.mutant import Mutant
from reliability.mutants.results import FOUND, Results, shown


def report(mutants: Sequence[Mutant], kept: Results) -> int:
    """Prints the score; returns 1 if a mutant was not noticed and has no reason."""
    total, noticed = Counter[str](), Counter[str]()
    unexplained = 0
    for mutant in mutants:
        found = kept.get(mutant)
        if found is None:
            continue
        total[package(mutant)] += 1
        if found.status in FOUND:
            noticed[package(mutant)] += 1
        else:
            unexplained += 1
            print(f"{found.status}  {mutant.path}:{mutant.line}  {shown(mutant)}")
    for name in sorted(total):
        print(f"{name:24} {noticed[name]:5} of {total[name]:5}  {noticed[name] / total[name]:.1%}")
    return int(unexplained > 0)


def package(mutant: Mutant) -> str:
    """The part of the library in which a mutant is counted."""
    parts = mutant.path.removeprefix("src/locant/").split("/")
    if mutant.path.endswith(".c"):
        return "attention (C)"
    return parts[0].removesuffix(".py") if parts[0] != "experiments" else "/".join(parts)
