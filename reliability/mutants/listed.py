"""Faults that no tool makes: each a text of a source file that occurs once, and what stands there instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reliability.mutants.listed_c import C_FAULTS
from reliability.mutants.mutant import Mutant, changed_lines, digest
from reliability.mutants.owners import owner_of_line

KERNEL = "src/locant/attention/fused.c"


@dataclass(frozen=True)
class Fault:
    """One change of one source file."""

    name: str
    path: str
    old: str  # occurs exactly once in the file
    new: str


PYTHON_FAULTS = (
    Fault(
        "cached tables: the first element of each tensor is compared",
        "src/locant/attention/tables.py",
        "torch.equal(number, copy)\n",
        "torch.equal(number.flatten()[:1], copy.flatten()[:1])\n",
    ),
    Fault(
        "cached tables: plain attributes are not compared",
        "src/locant/attention/tables.py",
        "not self.plain.items() <= attributes.items()",
        "not len(self.plain) <= len(attributes)",
    ),
    Fault(
        "beam search: positions of cached keys repeat as a whole",
        "src/locant/hf/cached.py",
        "x.repeat_interleave(repeats, dim=0)",
        "x.repeat(repeats, *(1 for _ in x.shape[1:]))",
    ),
    Fault(
        "beam search: reordering the cache leaves positions as they are",
        "src/locant/hf/cached.py",
        "_rearrange(cache, lambda x: x.index_select(0, rows.to(x.device)))",
        "_rearrange(cache, lambda x: x)",
    ),
    Fault(
        "selecting rows of the cache leaves positions as they are",
        "src/locant/hf/cached.py",
        "_rearrange(cache, lambda x: x[rows])",
        "_rearrange(cache, lambda x: x[: len(rows)])",
    ),
    Fault(
        "SQuAD: the label takes in the token after the answer",
        "src/locant/experiments/tasks/squad.py",
        "places[at][0] < end and",
        "places[at][0] <= end and",
    ),
    Fault(
        "SQuAD: the label takes in the token before the answer",
        "src/locant/experiments/tasks/squad.py",
        "places[at][1] > first]",
        "places[at][1] >= first]",
    ),
    Fault(
        "weight decay on the parameters of the scheme",
        "src/locant/experiments/trainer.py",
        'if n in scheme], "weight_decay": 0.0',
        'if n in scheme], "weight_decay": self.preset.decay',
    ),
    Fault(
        "the scheme learns at the rate of the model",
        "src/locant/experiments/trainer.py",
        "self.preset.scheme_rate or self.preset.rate",
        "self.preset.rate",
    ),
    Fault(
        "CoPE counts keys at one position in their order",
        "src/locant/schemes/cope.py",
        "first = torch.searchsorted(k_pos.gather(-1, order), k_pos.contiguous())",
        "first = order.argsort(dim=-1)",
    ),
    Fault(
        "OPT counts from 1",
        "src/locant/hf/counting.py",
        "ids: Tensor = mask.long().cumsum(-1) * mask.long() - 1",
        "ids: Tensor = mask.long().cumsum(-1) * mask.long()",
    ),
    Fault(
        "RoBERTa counts from 1",
        "src/locant/hf/counting.py",
        "real.cumsum(-1) - 1 + past",
        "real.cumsum(-1) + past",
    ),
)


def listed_mutants(root: Path) -> Iterator[Mutant]:
    """The mutants of both lists. ValueError if the text of a fault does not occur exactly once."""
    in_c = (Fault(name, KERNEL, old, new) for name, old, new in C_FAULTS)
    for fault in (*PYTHON_FAULTS, *in_c):
        source = (root / fault.path).read_text()
        if source.count(fault.old) != 1:
            raise ValueError(
                f"{fault.path}: the text of the fault '{fault.name}' occurs {source.count(fault.old)} times, "
                f"expected once: {fault.old!r}. The source has changed; adjust reliability/mutants/listed*.py"
            )
        text = source.replace(fault.old, fault.new)
        line, old, new = changed_lines(source, text)
        function, body = owner_of_line(source, line, fault.path)
        yield Mutant(fault.path, function, line, old, new, text, digest(body), fault.name)
