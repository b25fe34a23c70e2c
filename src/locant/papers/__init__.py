"""The claims of three papers as experiments: `locant reproduce`.

claim.py          what a claim is
rules.py          from an effect with its interval to a verdict
sources.py        the data, and where to get it
place.py          the folder of a reproduction
steps.py          the work: trainings, fits, adaptations, analyses
effects.py        effects with intervals
cost.py           how long it takes, by a formula
reproduction.py   runs the claims of a paper
tisa.py, variance.py, huang.py    the papers, one file each

of variance.py:
variance_steps.py, variance_tables.py    its steps, and its tables
random_models.py  random models without positions: probes and theory
traces.py         variance and probes of trained models
bigrams.py        the loss of a smoothed bigram model
"""

from __future__ import annotations

from importlib import import_module

from locant.papers.claim import Paper

NAMES = ("tisa", "variance", "huang")


def find_paper(name: str) -> Paper:
    """Returns a paper by its name; ValueError if there is none."""
    if name not in NAMES:
        raise ValueError(f"unknown paper {name!r}; choose one of: {', '.join(NAMES)}")
    paper: Paper = import_module(f"locant.papers.{name}").PAPER
    return paper
