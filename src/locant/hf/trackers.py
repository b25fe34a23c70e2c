"""Trackers of experiments, such as TensorBoard and Weights & Biases, to which transformers' Trainer can report."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


def checked(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of trackers as a tuple; ValueError for an unknown one, ImportError for a missing package.

    Without names it imports nothing. The Trainer would raise only after all preparations, in the process of a run.
    """
    wanted = tuple(each.strip() for each in (names.split(",") if isinstance(names, str) else names) if each.strip())
    if not wanted:
        return ()
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    for each in wanted:
        if each not in known:
            near = difflib.get_close_matches(each, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown tracker {each!r}{hint}; transformers can report to: {', '.join(sorted(known))}")
        if each not in integration_utils.get_available_reporting_integrations():
            raise ImportError(f"reporting to {each} needs its package; install it with: pip install {each}")
    return wanted


def report_last(trainer: Any) -> None:
    """Moves the trackers of a Trainer behind its other callbacks, which add to the logs."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    handler = trainer.callback_handler
    handler.callbacks.sort(key=lambda each: isinstance(each, kinds))  # a stable sort
