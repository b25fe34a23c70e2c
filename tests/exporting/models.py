"""Swapped models to export, and what a process without locant computes with an exported folder."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import locant
from tests.hf_models import make, spread

FRESH = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "locant":
            raise ImportError("locant is not installed here")

sys.meta_path.insert(0, Blocked())
import torch, transformers

found = []
for folder, auto, given in json.loads(sys.argv[1]):
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(**{name: torch.tensor(value) for name, value in given.items()})
    found.append([type(model).__name__, (out.logits if "logits" in out else out.last_hidden_state).tolist()])
assert not any(name.split(".")[0] == "locant" for name in sys.modules)
print("RESULT" + json.dumps(found))
"""
"""A program that opens folders with transformers, where locant cannot be imported."""


def swapped(kind, spec, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", locant.hf.WordOrderWarning)
        return spread(locant.swap(make(kind, **options), spec))


def without_locant(*runs: tuple[Path, str, dict]) -> list[tuple[str, torch.Tensor]]:
    """Returns the class and the outputs of models that a process without locant opened: (folder, Auto class, batch)."""
    given = [
        (str(folder), auto, {name: value.tolist() for name, value in batch.items()}) for folder, auto, batch in runs
    ]
    run = subprocess.run([sys.executable, "-c", FRESH, json.dumps(given)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [(name, torch.tensor(found)) for name, found in json.loads(run.stdout.partition("RESULT")[2])]


def padded(side: str, length: int = 20, pad: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens of which the second sequence has six fewer, padded on one side."""
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 6) if side == "left" else slice(length - 6, length)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def differ(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference at tokens that are not padding, by the size of the outputs."""
    first, second = first.detach()[mask.bool()], second.detach()[mask.bool()]
    return float((first - second).abs().max() / first.abs().max())
