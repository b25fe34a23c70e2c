"""The fit of an adaptation, kept in its folder until the adaptation is done.

A fit with a time limit depends on the speed of the machine, so a second fit may end elsewhere. An adaptation that
resumes reads the first one, and saves its time.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from locant.adaptation.fitting import Fit, HeadFit
from locant.adaptation.silencing import with_first
from locant.adaptation.training import set_weights
from locant.hf.readout import native
from locant.hf.swapping import exchange
from locant.runs import files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "fitted.safetensors"
"""The weights that the fit has changed or added; heads and notices are in the metadata."""


def keep_fit(folder: Path, found: Fit, original: PreTrainedModel) -> None:
    """Writes a fit into the folder of its adaptation."""
    own = dict(original.named_parameters())
    changed = {
        name: weight.detach().contiguous()
        for name, weight in found.model.named_parameters()
        if name not in own or not weight.equal(own[name])
    }
    record = {"heads": [asdict(head) for head in found.heads], "notices": found.notices}
    with files.replacing(folder / FILE) as temporary:
        save_file(changed, temporary, {"fit": json.dumps(record)})


def kept_fit(folder: Path, model: PreTrainedModel, spec: str) -> Fit | None:
    """Swaps a model to `spec` with the weights of the kept fit, in place; None if the folder has no fit."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            record = json.loads(file.metadata()["fit"])
        heads = [HeadFit(**head) for head in record["heads"]]
    except (SafetensorError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} is damaged ({problem}); delete its folder to adapt again") from None
    with torch.random.fork_rng(devices=[]):  # as the fit itself: it leaves the caller's random numbers alone
        exchange(model, spec if native(model).table is None else with_first(spec))
    set_weights(model, weights)
    return Fit(model, spec, heads, list(record["notices"]))
