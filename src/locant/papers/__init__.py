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

of tisa.py:
position_tables.py  tables of trained models: R² and controls (A1, A2)
small_models.py     models with a table, trained here; table_training.py: their R² by step, and their loss (A3, A4)
glue.py             MiniLM on GLUE, shared with huang.py; albert_glue.py: an ALBERT shape that is pretrained here (A5)
position_counts.py  parameters (A6); longer_inputs.py: loss by length (A7); head_kinds.py: local and global heads (A8)

of huang.py:
huang_sizes.py, huang_numbers.py    its arms and sizes, and its effects and tables
squad.py            SQuAD, warm and cold (C1 to C3); retrieval.py: meetings (C5)
absolute.py         method 4 and absolute embeddings, in numbers (C6); offsets.py: what method 4 learns (C7)

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
