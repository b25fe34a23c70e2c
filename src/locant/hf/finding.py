"""`family_of`: how a model handles positions. Known families are listed (`families`); of others it is found by running.

A short run shows which modules attend, and so where the stacks of layers are. The position table of a stack is the
module that returns consecutive rows of a table of its own, the same ones for other tokens. How the model counts tokens
is found from the rows that a padded batch gets. A record that was found is kept on the base model, because once the
model is swapped its own positions are gone.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.counting import COUNTS, by_index
from locant.hf.families import FAMILIES, OUTSIDE, refusal
from locant.hf.family import Family, StartsAt, these_stacks
from locant.hf.finding_rotary import rotary_of
from locant.hf.mechanisms import Bias, Biases, CarriedTable, Mechanism, Nothing
from locant.hf.running import failing_in_words, probe_inputs, probe_length, probe_tokens, run
from locant.hf.seam import through_seam
from locant.hf.watching import Watched, watching

FOUND = "locant_family"
"""Attribute of a base model: the record that was found by running it."""
BIAS = "relative_attention_bias"
"""Name of the tables of biases in T5 and its relatives."""


def family_of(model: PreTrainedModel) -> Family:
    """Returns the record of a model's family, listed or found by running it; otherwise NotImplementedError."""
    kind, base = model.config.model_type, model.base_model
    reason = refusal(model)
    if reason is not None:
        raise NotImplementedError(f"{kind} models cannot be swapped: {reason}")
    if kind in FAMILIES:
        return FAMILIES[kind]
    if FOUND not in base.__dict__:
        base.__dict__[FOUND] = find_family(model)
    found: Family = base.__dict__[FOUND]
    return found


def find_family(model: PreTrainedModel) -> Family:
    """Finds out by running it how a model handles positions."""
    base, kind = model.base_model, model.config.model_type
    with failing_in_words(model, "on a few tokens"):
        tokens = probe_tokens(base, probe_length(base), stride=2)
    with through_seam(model), torch.random.fork_rng(devices=[]):
        with watching(base, record=_has_table) as first, failing_in_words(model, "on a few tokens"):
            run(base, probe_inputs(base, tokens))
        paths = _stacks(base, first)
        if not paths:
            raise NotImplementedError(f"{kind} models cannot be swapped: {OUTSIDE}")
        with watching(base, record=_has_table) as other:
            run(base, probe_inputs(base, tokens.flip(1)))
        found = {path: _mechanism(base, base.get_submodule(path), first, other) for path in paths}
        mechanism = _common(kind, found)
        causal = {path: _is_causal(base, base.get_submodule(path), tokens) for path in paths}
        family = Family(mechanism, stacks=partial(these_stacks, paths), causal=causal)
        return _with_counting(family, base, paths) if isinstance(mechanism, CarriedTable) else family


def _common(kind: str, found: dict[str, Mechanism]) -> Mechanism:
    """The mechanism of all stacks; NotImplementedError if they differ."""
    each, *others = dict.fromkeys(found.values())
    if not others:
        return each
    # Encoder and decoder of unequal depth. A stack of one layer has one table.
    tables = [
        mechanism.paths if isinstance(mechanism, Biases) else (mechanism.path,)
        for mechanism in (each, *others)
        if isinstance(mechanism, (Bias, Biases))
    ]
    if len(tables) == 1 + len(others):
        return Biases(tuple(dict.fromkeys(path for paths in tables for path in paths)))
    kinds = {mechanism.kind for mechanism in found.values()}
    ways = ", ".join(f"{path or 'the model'}: {mechanism.kind}" for path, mechanism in found.items())
    what = f"in different ways ({ways})" if len(kinds) > 1 else f"in the same way ({ways}), with other settings in each"
    raise NotImplementedError(
        f"{kind} models cannot be swapped: positions enter their stacks of layers {what}, and locant treats all stacks "
        f"of a model alike"
    )


# ---- stacks ---------------------------------------------------------------------------------------


def _stacks(base: nn.Module, watched: Watched) -> list[str]:
    """The innermost models that contain self-attention modules, by name, in the order in which they ran."""
    names = {module: name for name, module in base.named_modules()}
    models = [name for name, module in base.named_modules() if isinstance(module, PreTrainedModel)]
    found = []
    for call in watched.calls:
        if call.module in names and call.query.shape[2] == call.key.shape[2]:
            around = [name for name in models if not name or names[call.module].startswith(f"{name}.")]
            found.append(max(around, key=len))
    return list(dict.fromkeys(found))


# ---- how positions enter --------------------------------------------------------------------------


def _mechanism(base: nn.Module, stack: nn.Module, first: Watched, other: Watched) -> Mechanism:
    """How positions enter one stack."""
    tables, rotary = _tables(stack, first, other), rotary_of(base, stack)
    if len(tables) + (rotary is not None) > 1:
        paths = ", ".join([*(table.path for table in tables), *(() if rotary is None else rotary.paths)])
        raise NotImplementedError(
            f"{type(stack).__name__} cannot be swapped: positions enter it in several ways at once ({paths})"
        )
    if rotary is not None:
        return rotary
    if tables:
        return tables[0]
    embeddings = [name for name, module in stack.named_modules() if isinstance(module, nn.Embedding)]
    biases = [name for name in embeddings if name.endswith(BIAS)]
    if biases:
        return Bias(biases[0]) if len(biases) == 1 else Biases(tuple(biases))
    return Nothing()


def _two_dimensional(module: nn.Module) -> dict[str, Tensor]:
    """The tables that a module itself has: parameters, buffers and attributes [rows, width]."""
    own = {**module._parameters, **module._buffers, **vars(module)}
    return {
        name: value
        for name, value in own.items()
        if isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point() and len(value) > 1
    }


def _has_table(module: nn.Module) -> bool:
    return not list(module.children()) and bool(_two_dimensional(module))


def _tables(stack: nn.Module, first: Watched, other: Watched) -> list[CarriedTable]:
    """The position tables of a stack: modules that return the same consecutive rows for other tokens."""
    names = {module: name for name, module in stack.named_modules()}
    found: dict[str, CarriedTable] = {}
    again = {module: output for module, _, _, output in other.returned}
    for module, _, _, output in first.returned:
        if module not in names or module not in again:
            continue
        here, there = _embedding(output), _embedding(again[module])
        if here is None or there is None or not torch.equal(here, there):
            continue
        for attribute, table in _two_dimensional(module).items():
            row = _first_row(here, table)
            if row is not None:
                outputs = len(output) if isinstance(output, tuple) else 1
                path = names[module]
                found[path] = CarriedTable(path, row=row, attribute=attribute, outputs=outputs)
    return list(found.values())


def _embedding(output: Any) -> Tensor | None:
    """The vectors [tokens, width] that a module returned for one sequence; None if it returned something else."""
    value = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return None
    rows = value.reshape(-1, value.shape[-1])
    return rows if len(rows) > 1 else None


def _first_row(vectors: Tensor, table: Tensor) -> int | None:
    """The row of the first vector if the vectors are consecutive rows of a table; otherwise None."""
    count = len(vectors)
    if table.shape[1] != vectors.shape[1] or len(table) < count or torch.equal(vectors[0], vectors[-1]):
        return None
    same = (table.to(vectors) == vectors[0]).all(1).nonzero().flatten().tolist()
    return next((row for row in same if torch.equal(table[row : row + count].to(vectors), vectors)), None)


def _is_causal(base: nn.Module, stack: nn.Module, tokens: Tensor) -> bool:
    """Whether another last token leaves the states of earlier tokens of a stack as they are."""
    inputs = probe_inputs(base, tokens)
    before = _states(base, stack, inputs)
    for name in ("decoder_input_ids", "input_ids"):
        given = inputs.get(name)
        if given is not None and given.shape[1] == before.shape[1]:  # those of this stack; the lengths are unequal
            other = given.clone()
            other[:, -1] = given[:, 0]
            after = _states(base, stack, {**inputs, name: other})
            return bool((before - after)[:, :-1].abs().max() <= 1e-6 * before.abs().max())
    raise NotImplementedError(
        f"{type(stack).__name__} cannot be swapped: it returns {before.shape[1]} states for {tokens.shape[1]} tokens"
    )


def _states(base: nn.Module, stack: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The states [B, L, width] that a stack returns."""
    with watching(base, record=lambda module: module is stack) as watched:
        run(base, inputs)
    output = watched.returned[0][3]
    found: Tensor = next(x for x in (output if isinstance(output, tuple) else output.values()) if isinstance(x, Tensor))
    return found.float()


# ---- counting -------------------------------------------------------------------------------------


def _with_counting(family: Family, base: nn.Module, paths: list[str]) -> Family:
    """Completes the record of a model with a table: how it counts, and what number position_ids start at."""
    mechanism = family.mechanism
    assert isinstance(mechanism, CarriedTable)
    stacks = [base.get_submodule(path) for path in paths]
    counts = [name for name in COUNTS if all(_counts_so(base, stack, mechanism, name) for stack in stacks)]
    if not counts:
        raise NotImplementedError(
            f"{base.config.model_type} models cannot be swapped: locant does not know how "  # type: ignore[union-attr]
            f"{' and '.join(type(stack).__name__ for stack in stacks)} number padded tokens (tried {', '.join(COUNTS)})"
        )
    return replace(family, count=COUNTS[counts[0]], shift=_shift(base, stacks[0], mechanism))


def _rows(base: nn.Module, stack: nn.Module, mechanism: CarriedTable, inputs: dict[str, Any]) -> Tensor:
    """The vectors [B or 1, L, width] that the table of a stack returns for some inputs."""
    table = stack.get_submodule(mechanism.path)
    with watching(base, record=lambda module: module is table) as watched:
        run(base, inputs)
    output = watched.returned[0][3]
    found: Tensor = output[0] if mechanism.outputs > 1 else output
    return found if found.ndim == 3 else found[None]


def _counts_so(base: nn.Module, stack: nn.Module, mechanism: CarriedTable, name: str) -> bool:
    """Whether a stack numbers the tokens of a padded batch by a rule."""
    tokens = probe_tokens(base, max(probe_length(base), 4), stride=2).repeat(3, 1)
    mask = torch.ones_like(tokens)
    padding = getattr(base.config, "pad_token_id", None)
    mask[1, :2] = 0
    mask[2, -1] = 0
    if padding is not None:
        tokens = torch.where(mask == 0, padding, tokens)
        tokens[2, 1] = padding  # visible, inside the sequence
    inputs = probe_inputs(base, tokens, attention_mask=mask)
    of_decoder = inputs.get("decoder_input_ids")
    if of_decoder is not None:  # the first of the same tokens
        inputs["decoder_attention_mask"] = mask[:, : of_decoder.shape[1]]
    found = _rows(base, stack, mechanism, inputs)
    if of_decoder is not None and found.shape[1] == of_decoder.shape[1]:
        tokens, mask = tokens[:, : found.shape[1]], mask[:, : found.shape[1]]
    if found.shape[1] != tokens.shape[1]:
        return False
    given = {"input_ids": tokens, "attention_mask": mask}
    counted = COUNTS[name](stack, given, 0) if padding is not None or name != "by_token" else None
    if counted is None:
        if name != by_index.__name__:
            return False
        counted = torch.arange(tokens.shape[1], device=tokens.device)[None]
    table = mechanism.table(stack).to(found)
    expected = table[(counted.clamp(min=0) + mechanism.row)]
    shown = (counted >= 0) & (mask == 1)
    return bool(((found - expected).abs().amax(-1).expand(shown.shape)[shown] == 0).all())


def _shift(base: nn.Module, stack: nn.Module, mechanism: CarriedTable) -> StartsAt:
    """The number that the caller's position_ids start at, from the row that position 0 gets."""
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return StartsAt(0)
    tokens = probe_tokens(base, probe_length(base), stride=2)
    ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    vectors = _rows(base, stack, mechanism, probe_inputs(base, tokens, position_ids=ids))[0]
    row = _first_row(vectors, mechanism.table(stack))
    if row is None:
        raise NotImplementedError(
            f"{type(base).__name__} cannot be swapped: with position_ids 0, 1, 2, … its table of positions returns "
            f"other rows than consecutive ones"
        )
    return StartsAt(mechanism.row - row)
