"""The result of an adaptation: the model, and a table of its states: original, silenced, fitted, adapted."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from locant.adaptation.by_length import LengthRow
from locant.adaptation.contrast import Contrasted
from locant.adaptation.fitting import Fit
from locant.adaptation.retrieval import Reading
from locant.adaptation.schedule import FEW
from locant.adaptation.training import AgreementAtStep
from locant.analysis.distance import Layer


@dataclass(frozen=True)
class StateRow:
    """One row of the table: the model in one of its states."""

    state: str  # original, silenced, fitted, adapted
    agreement: float  # with the original, on held-out text
    parameters: int  # of its positions
    scores: dict[str, float]


@dataclass
class Adapted:
    """An adapted model and its measurements."""

    model: PreTrainedModel
    spec: str
    measure: str  # the kind of agreement, such as "same label"
    rows: list[StateRow]
    fit: Fit
    curves: dict[str, list[Layer]]  # attention by distance, for each state
    evaluations: list[AgreementAtStep] = field(default_factory=list)  # of agreement, during training
    notices: list[str] = field(default_factory=list)  # about the training
    lengths: list[LengthRow] = field(default_factory=list)  # the adapted model at each length
    readings: list[Reading] = field(default_factory=list)  # the original, reading long documents in several ways
    contrast: Contrasted | None = None  # the contrastive stage

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.evaluations[-1].step if self.evaluations else 0

    @property
    def trained(self) -> bool:
        """Whether the model was trained for more than a few steps. If not, it is fitted only."""
        return max(self.steps, 0 if self.contrast is None else self.contrast.kept.step) >= FEW

    def __str__(self) -> str:
        """The tables in Markdown: by state, by length, of ways to read long documents, and of held-out retrieval."""
        scores = list(self.rows[0].scores)
        head = ["", f"agreement ({self.measure})", *scores, "position parameters"]
        lines = [
            [row.state, f"{row.agreement:.4f}", *(f"{row.scores[name]:.4f}" for name in scores), f"{row.parameters:,}"]
            for row in self.rows
        ]
        at = [
            [f"{row.length:,}", f"{row.adapted:.4f}", f"{row.truncated:.4f}", f"{row.chunked:.4f}"]
            for row in self.lengths
        ]
        tables = [_markdown(head, lines), *([self.measured_on, _markdown(self.length_head, at)] if at else [])]
        if self.readings:
            tables.append(_markdown(READING_HEAD, [reading_cells(each) for each in self.readings]))
        if self.contrast is not None:
            tables += [self.contrast.measured_on, _markdown(CONTRAST_HEAD, contrast_cells(self.contrast))]
        return "\n\n".join(tables)

    @property
    def measured_on(self) -> str:
        """The texts on which agreement is measured, in one sentence. Most of them are short."""
        each = [f"{row.texts} of up to {row.length:,} tokens" for row in self.lengths]
        return f"Agreement is the mean over these held-out texts: {', '.join(each)}."

    @property
    def length_head(self) -> list[str]:
        """The columns of the table by length."""
        return ["tokens, up to", self.rows[-1].state, "original, truncated", "original, chunked"]


READING_HEAD = ["original, reading", "nDCG@10", "95 % interval", "accuracy@1"]
"""The columns of the table of ways to read long documents."""


def reading_cells(reading: Reading) -> list[str]:
    """Returns a row of that table."""
    return [reading.way, f"{reading.ndcg:.4f}", f"{reading.low:.4f} … {reading.high:.4f}", f"{reading.accuracy:.4f}"]


CONTRAST_HEAD = ["held-out documents, read by", "nDCG@10", "agreement, short texts"]
"""The columns of the table of the contrastive stage."""


def contrast_cells(found: Contrasted) -> list[list[str]]:
    """Returns the rows of that table: before and after."""
    after = f"after step {found.kept.step}" if found.kept.step else "after contrast: unchanged"
    states = [("before contrast", found.start), (after, found.kept)]
    measured = [[name, f"{at.retrieval:.4f}", f"{at.agreement:.4f}"] for name, at in states]
    return [["original, chunked", f"{found.original:.4f}", "1.0000"], *measured]


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])
