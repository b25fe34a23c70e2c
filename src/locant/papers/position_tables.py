"""Position tables of trained models: found in files, and measured for translation invariance.

A table comes from DATA/tables/*.safetensors, whose keys are MODEL.position_embeddings or have another name that models
use for such a table (`locant.hf.bare_tables`), or from a model in DATA/models. A file may also have the query and key
weights of the first layer. Two kinds of keys are not learned absolute tables: `sinusoidal` is a positive control,
because E Eᵀ is Toeplitz by construction, and `relative_attention_bias` is left out, because it has no E.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.experiments.statistics import Estimate, estimate
from locant.papers.claim import Measured, Part, Table
from locant.papers.place import Place
from locant.runs.untrusted import first_line

LEARNED, FIXED = "learned", "sinusoidal"
HEADS = {"all-MiniLM-L6-v2": 12, "all-mpnet-base-v2": 12, "kykim-albert-kor-base": 12}
"""Attention heads of models whose weights are in a file without their config. Other models have heads of size 64."""
LONGEST_CONTROL = 512
"""Positions of a sinusoidal table that are measured: as many as the learned tables have."""
LARGEST_MAP = 64
"""Rows and columns of a heat map at most."""


@dataclass(frozen=True)
class PositionTable:
    """The table of one stack of a model, and the weights of its first attention layer if they are known."""

    name: str
    kind: str  # LEARNED or FIXED
    table: Tensor  # [positions, width], position 0 first
    w_q: Tensor | None = None  # [heads · head_dim, width of the table]
    w_k: Tensor | None = None
    heads: int = 0
    norm: tuple[Tensor, Tensor] | None = None  # weight and bias of the layer norm of the embeddings


def find_tables(at: Place) -> tuple[list[PositionTable], dict[str, str]]:
    """Returns the tables of the data folder, and what is left out with the reason. A table that is there twice counts
    once."""
    found: list[PositionTable] = []
    left_out: dict[str, str] = {}
    assert at.data is not None
    for path in sorted(at.source("tables").glob("*.safetensors")):
        found += _of_file(path, left_out)
    for folder in sorted((at.data / "models").glob("*")):
        if not (folder / "config.json").exists():
            continue
        try:
            several = list(_of_model(folder))
        except (ValueError, OSError, NotImplementedError, RuntimeError) as problem:
            left_out[folder.name] = first_line(problem)
            continue
        if not several:
            left_out[folder.name] = "the model has no table of absolute positions"
        for one in several:
            same = [other.name for other in found if _equal(one.table, other.table)]
            if same:
                left_out[f"models/{one.name}"] = f"the same table as {same[0]}"
            else:
                found.append(one)
    return found, left_out


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())


def _of_file(path: Path, left_out: dict[str, str]) -> Iterator[PositionTable]:
    from safetensors.torch import load_file

    from locant.hf.bare_tables import bare_tables

    tensors = load_file(path)
    for key in sorted(tensors):
        if "relative_attention_bias" in key:
            left_out[key] = "a bias per bucket of offsets; there is no table of absolute positions"
    try:
        found = bare_tables(path)
    except ValueError as problem:
        left_out[path.name] = first_line(problem)
        return
    for each in found:
        table = each.positions.float()
        if FIXED in each.name:
            yield PositionTable(each.name, FIXED, table[:LONGEST_CONTROL])
            continue
        name = _model_of(each.name)
        rest = {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        yield _with_weights(name, table, rest)


def _model_of(key: str) -> str:
    """The model in front of the name of a table: `whisper-tiny.decoder` of whisper-tiny.decoder.position_embeddings."""
    from locant.hf.bare_tables import TABLE

    parts = key.split(".")
    before = parts[: next(at for at, part in enumerate(parts) if TABLE.search(part))]
    return ".".join(part for part in before if part != "embeddings") or key


def _with_weights(name: str, table: Tensor, tensors: dict[str, Tensor]) -> PositionTable:
    """Adds the weights of the first layer. ALBERT's go through the map from the embeddings to the hidden size."""
    q, k = (_ending(tensors, *endings) for endings in (("query.weight", ".q.weight"), ("key.weight", ".k.weight")))
    if q is None or k is None:
        return PositionTable(name, LEARNED, table)
    project = _ending(tensors, "embedding_hidden_mapping_in.weight")
    heads = HEADS.get(name, max(1, q.shape[0] // 64))
    if project is not None and q.shape[1] != table.shape[1]:
        q, k = q.double() @ project.double(), k.double() @ project.double()
    weight, bias = (_ending(tensors, f"embeddings.LayerNorm.{part}") for part in ("weight", "bias"))
    norm = None if weight is None or bias is None else (weight, bias)
    return PositionTable(name, LEARNED, table, q, k, heads, norm)


def _ending(tensors: dict[str, Tensor], *endings: str) -> Tensor | None:
    return next((tensors[key] for key in sorted(tensors) if key.endswith(endings)), None)


def _of_model(folder: Path) -> Iterator[PositionTable]:
    from locant.analysis.invariance import stacks
    from locant.hf import load

    for stack in stacks(load(str(folder)).base_model):  # type: ignore[arg-type]
        if stack.table is None:
            continue
        name = f"{folder.name}.{stack.name}" if stack.name else folder.name
        w_q, w_k = stack.head_weights() or (None, None)
        kind = LEARNED if stack.spec.startswith("learned") else FIXED
        yield PositionTable(name, kind, stack.table().detach(), w_q, w_k, stack.attentions[0].n_heads)


def measure_tables(at: Place) -> dict[str, Any]:
    """Returns R² of every table and of every head that is known, with controls of equal row norms."""
    found, left_out = find_tables(at)
    return {
        "tables": [_of_one(each, at.size.samples) for each in found],
        "heads": [row for each in found for row in _heads(each, at.size.samples)],
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out.items()],
    }


def _of_one(each: PositionTable, samples: int) -> dict[str, Any]:
    from locant.analysis.invariance import of_table

    r2 = of_table(each.table, samples=samples)
    rows = each.table.double()
    step = -(-rows.shape[0] // LARGEST_MAP)
    # A Toeplitz matrix stays one if every n-th position is kept. Position 0 is an outlier that would hide the others.
    shown = rows[1::step] / rows[1:].norm(dim=-1).median()
    return {
        "name": each.name,
        "kind": each.kind,
        "positions": rows.shape[0],
        "width": rows.shape[1],
        "off_diagonal": r2.off_diagonal,
        "interval": list(r2.off_diagonal_interval),
        "control": [r2.off_diagonal_control.mean, r2.off_diagonal_control.low, r2.off_diagonal_control.high],
        "gram": r2.gram,
        "gram_control": r2.gram_control.mean,
        "shown": list(range(1, rows.shape[0], step)),
        "map": [[float(f"{value:.4g}") for value in row] for row in (shown @ shown.mT).tolist()],
    }


def _heads(each: PositionTable, samples: int) -> list[dict[str, Any]]:
    """R² of F̂ per head: without the layer norm, as the paper computes it, and with it where it is known."""
    from locant.analysis.invariance import of_heads

    if each.w_q is None or each.w_k is None or each.kind != LEARNED:
        return []
    plain = of_heads(each.table, each.w_q, each.w_k, each.heads, samples=samples)
    normed: list[float | None] = [None] * len(plain)
    if each.norm is not None:
        weight, bias = (part.double() for part in each.norm)

        def norm(rows: Tensor) -> Tensor:
            return F.layer_norm(rows, rows.shape[-1:], weight, bias)

        normed = [head.r2 for head in of_heads(each.table, each.w_q, each.w_k, each.heads, norm=norm, samples=0)]
    return [
        {"name": each.name, "head": head.head, "r2": head.r2, "control": head.control.mean, "normed": other}
        for head, other in zip(plain, normed, strict=True)
    ]


def table_effect(row: dict[str, Any]) -> Estimate:
    """Returns R² minus the control. `count` is the number of blocks of positions that the interval is made from."""
    (low, high), (mean, least, most) = row["interval"], row["control"]
    blocks = round(math.sqrt(row["positions"] - 1))
    return Estimate(row["off_diagonal"] - mean, low - most, high - least, blocks)


def tables_found(measured: Mapping[str, Any], overall: str, each: str) -> Measured:
    """Returns the effects of the tables: of all together, and of each."""
    learned = [row for row in measured["tables"] if row["kind"] == LEARNED]
    effects = {row["name"]: table_effect(row) for row in learned}
    parts = [Part(overall, "all tables", estimate([effect.mean for effect in effects.values()]))]
    parts += [Part(each, name, effect) for name, effect in effects.items()]
    header = ("table", "kind", "positions", "width", "R²", "low", "high", "control", "R² with diagonal",
              "control with diagonal")  # fmt: skip
    rows = [
        (row["name"], row["kind"], row["positions"], row["width"], row["off_diagonal"], *row["interval"],
         row["control"][0], row["gram"], row["gram_control"])
        for row in measured["tables"]
    ]  # fmt: skip
    maps = [
        (row["name"], row["shown"][i], row["shown"][j], value)
        for row in measured["tables"]
        for i, line in enumerate(row["map"])
        for j, value in enumerate(line)
    ]
    fixed = [row for row in measured["tables"] if row["kind"] != LEARNED]
    return Measured(
        parts,
        {
            "r2": Table(header, rows),
            "maps": Table(("table", "row", "column", "value"), maps),
            "left out": Table(("name", "reason"), [(row["name"], row["reason"]) for row in measured["left_out"]]),
        },
        [
            f"{len(learned)} learned tables have a mean R² of {parts[0].effect.mean:.2f} above random tables.",
            *(f"Positive control: {row['name']} has R² {row['off_diagonal']:.3f}." for row in fixed),
        ],
    )


def heads_found(measured: Mapping[str, Any], overall: str, each: str) -> Measured:
    """Returns the effects of the heads: of all together, and of each model."""
    gaps: dict[str, list[float]] = {}
    for row in measured["heads"]:
        gaps.setdefault(row["name"], []).append(row["r2"] - row["control"])
    parts = [Part(overall, "all heads", estimate([gap for own in gaps.values() for gap in own]))]
    parts += [Part(each, name, estimate(own)) for name, own in gaps.items()]
    header = ("model", "head", "R²", "control", "R² with layer norm")
    rows = [(row["name"], row["head"], row["r2"], row["control"], row["normed"]) for row in measured["heads"]]
    sentences = [
        f"{name}: mean R² {part.effect.mean:.2f} above the control over {part.effect.count} heads."
        for name, part in zip(gaps, parts[1:], strict=True)
    ]
    return Measured(parts, {"heads": Table(header, rows)}, sentences)
