"""A swapped model as a program: torch.export (model.pt2) or ONNX (model.onnx), for any batch and length.

Such a program is made of ordinary operators and needs no locant. It takes input_ids and attention_mask and returns
logits, or the last hidden states of a model without a head. It is opened and compared with the model, at three lengths
and with padding on both sides, before the export counts as done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.exporting.proof import LENGTHS, outputs, token_batches
from locant.exporting.refusal import CannotExport
from locant.exporting.source import Source
from locant.hf.facts import has_decoder, limits
from locant.hf.modes import evaluating

TOLERANCE = {"torch": 1e-5, "onnx": 1e-4}
"""Largest difference from the model, relative to the size of the outputs."""
FILES = {"torch": "model.pt2", "onnx": "model.onnx"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LONGEST = 32_768
"""Tokens that a program takes if the model takes any number."""
LARGEST_BATCH = 1024
INPUTS = ("input_ids", "attention_mask")
ONE_FILE = 1_500_000_000
"""Bytes of weights above which an ONNX file needs a second file beside it; the format allows 2 GB."""

Run = Callable[[Tensor, Tensor], Tensor]
"""Runs a program on tokens and mask [B, L]."""


class Outputs(nn.Module):
    """A model that takes tokens and a mask, and returns one tensor."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.others = {"use_cache": False} if "use_cache" in signature(type(model).forward).parameters else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns logits or the last hidden states."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.others)
        tensor: Tensor = found.logits if "logits" in found else found.last_hidden_state
        return tensor


def write(source: Source, folder: Path, to: str, length: int | None) -> tuple[float, int]:
    """Writes a program and checks it; returns the largest difference from the model, and the longest input."""
    model = source.model
    if has_decoder(model):
        raise CannotExport(f"{type(model).__name__} has a decoder, which takes inputs of its own; export its encoder")
    missing = [name for name in PACKAGES if find_spec(name) is None] if to == "onnx" else []
    if missing:
        raise ImportError(f"an export to ONNX needs {', '.join(missing)}; install them: pip install 'locant[onnx]'")
    known = (length, limits(model).positions, LONGEST if length is None else None)
    longest = min(each for each in known if each is not None)
    path = folder / FILES[to]
    example = tuple(x[:2] for x in token_batches(model, longest, (9,))[1])
    sizes = {0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH), 1: torch.export.Dim("length", min=1, max=longest)}
    try:
        with evaluating(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (_to_torch if to == "torch" else _to_onnx)(Outputs(model), example, (sizes, sizes), path)
    except Exception as problem:  # any: tracers raise many classes
        line = str(problem).strip().splitlines()[0] if str(problem).strip() else ""
        raise CannotExport(
            f"{type(model).__name__} with these schemes cannot be traced: {type(problem).__name__}: {line[:300]}"
        ) from problem
    return _check(model, _opened(path, to), to, longest), longest


def _to_torch(module: nn.Module, example: tuple[Tensor, ...], sizes: Any, path: Path) -> None:
    named, shapes = dict(zip(INPUTS, example, strict=True)), dict(zip(INPUTS, sizes, strict=True))
    torch.export.save(torch.export.export(module, (), named, dynamic_shapes=shapes), path)


def _to_onnx(module: nn.Module, example: tuple[Tensor, ...], sizes: Any, path: Path) -> None:
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    torch.onnx.export(
        module, example, path, dynamo=True, dynamic_shapes=sizes, input_names=list(INPUTS), output_names=["output"],
        external_data=weights > ONE_FILE, verbose=False,
    )  # fmt: skip


def _opened(path: Path, to: str) -> Run:
    if to == "torch":
        program = torch.export.load(path).module()
        return lambda ids, mask: program(input_ids=ids, attention_mask=mask)
    session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        given = dict(zip(INPUTS, (ids.cpu().numpy(), mask.cpu().numpy()), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run


@torch.no_grad()
def _check(model: PreTrainedModel, run: Run, to: str, longest: int) -> float:
    largest, size = 0.0, 0.0
    with evaluating(model):
        for ids, mask in token_batches(model, longest, LENGTHS):
            expected, found = outputs(model, ids, mask), run(ids, mask).to(model.device)
            if found.ndim >= 2 and found.shape[:2] == mask.shape:
                expected, found = expected[mask.bool()], found[mask.bool()]
            largest = max(largest, float((expected - found).abs().max()))
            size = max(size, float(expected.abs().max()))
    difference = largest / max(size, 1e-30)
    if not difference <= TOLERANCE[to]:
        raise CannotExport(
            f"the program computes something else than the model: its outputs differ by {difference:.1e} of their "
            f"size, and at most {TOLERANCE[to]:.0e} is allowed"
        )
    return difference
