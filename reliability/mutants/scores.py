"""The score: how many mutants a test has noticed, per package, and the survivors with the reason of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reliability.mutants.mutant import Mutant
from reliability.mutants.reasons import reason_of
from reliability.mutants.results import FOUND, Results, shown


def report(mutants: Sequence[Mutant], kept: Results) -> int:
    """Prints survivors and scores; returns 1 if a survivor has no reason."""
    judged = [mutant for mutant in mutants if kept.get(mutant) is not None]
    survivors = [mutant for mutant in judged if kept.by_key[mutant.key].status not in FOUND]
    for mutant in survivors:
        reason = reason_of(mutant)
        why = f"{reason.kind}: {reason.why}" if reason else "NO REASON"
        print(f"{kept.by_key[mutant.key].status}  {mutant.path}:{mutant.line}  {shown(mutant)}  [{why}]")
    total = Counter(package(mutant) for mutant in judged)
    survived = Counter(package(mutant) for mutant in survivors)
    explained = Counter(package(mutant) for mutant in survivors if reason_of(mutant))
    print(f"{'':28}{'mutants':>8}{'noticed':>9}{'score':>8}{'with a reason':>15}{'score without those':>21}")
    for name in sorted(total):
        noticed = total[name] - survived[name]
        others = total[name] - explained[name]
        print(
            f"{name:28}{total[name]:8}{noticed:9}{noticed / total[name]:8.1%}{explained[name]:15}"
            f"{noticed / others if others else 1:21.1%}"
        )
    return int(survived.total() > explained.total())


def package(mutant: Mutant) -> str:
    """The part of the library in which a mutant is counted."""
    parts = mutant.path.removeprefix("src/locant/").split("/")
    if mutant.path.endswith(".c"):
        return "attention (C)"
    return parts[0].removesuffix(".py") if parts[0] != "experiments" else "/".join(parts)
