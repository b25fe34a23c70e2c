"""The arms of a comparison: models that differ in their position scheme alone.

    native                   the model with its own positions
    native+tisa:kernels=5    its own positions and a scheme beside them
    tisa:kernels=5           a scheme in their place

All arms of one seed start from the same weights, wherever shapes agree: the model is made with its own positions
first, from the seed, and the scheme takes their place after that.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from locant.experiments.preset import Preset
from locant.experiments.tasks import Task
from locant.experiments.tasks.task import Setting, longest, too_long

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NATIVE = "native"


def specs(text: str) -> list[str]:
    """`tisa,huang4:clip=64,heads=own,nope` as three: a comma is part of a scheme where an option follows it."""
    found: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            raise ValueError(f"--schemes {text!r} has an empty place between two commas")
        if found and re.match(r"[a-z_0-9]+\s*=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    for spec in found:
        parts = re.split(r"[+/]", spec)
        if not all(part.strip() for part in parts) or parts.count(NATIVE) > 1:
            raise ValueError(f"--schemes: {spec!r} has an empty place or native twice")
    twice = {spec for spec in found if found.count(spec) > 1}
    if twice:
        raise ValueError(f"--schemes has {', '.join(sorted(twice))} twice")
    return found


def build(task: Task, setting: Setting, model: str, spec: str, seed: int) -> PreTrainedModel:
    """The model of one run, at its start."""
    import locant

    torch.manual_seed(seed)
    if model in SHAPES:
        made = _from_scratch(task, setting, model)
    else:
        import transformers

        made = locant.load(model, getattr(transformers, task.auto), **task.head(setting))
        settle(made, setting.tokenizer)
    torch.manual_seed(seed)
    kept, _, rest = spec.partition("+")
    if spec == NATIVE:
        return made
    if kept.strip() == NATIVE:
        return locant.swap(made, _with_length(rest, made), keep_native=True)
    return locant.swap(made, _with_length(spec, made))


def check(task: Task, setting: Setting, model: str, spec: str) -> None:
    """Whether an arm can be made and reads what it is trained on: before anything is trained."""
    preset, tokens = setting.preset, task.positions(setting.preset)
    try:
        made = build(task, setting, model, spec, seed=0)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as problem:
        raise ValueError(f"{spec}: {problem}") from None
    reason = too_long(made, tokens)
    if reason:
        limit = longest(made) or 0
        shorter = (length for length in range(preset.length, 0, -1))
        fitting = next((x for x in shorter if task.positions(replace(preset, length=x)) <= limit), None)
        hint = f", or a shorter length, as --preset quick:length={fitting}" if fitting else ""
        raise ValueError(f"{spec} cannot be trained at {tokens} tokens: {reason}. Choose another scheme{hint}")
    if task.auto == "AutoModelForCausalLM" and not _is_causal(made):
        raise ValueError(f"{model} reads what it should foretell, and {task.name} needs a causal model: gpt2 or llama")


def _is_causal(model: PreTrainedModel) -> bool:
    from locant.hf.facts import is_causal

    return is_causal(model, torch.tensor([[1, 2]]))


def _with_length(spec: str, model: Any) -> str:
    """A learned table is as long as the inputs it is trained on: what it never saw it cannot know."""
    length = longest(model) or getattr(model.config, "max_position_embeddings", None)
    return re.sub(r"\blearned\b(?!:)", f"learned:length={length}", spec) if length else spec


def settle(model: PreTrainedModel, tokenizer: Any) -> None:
    """Makes a pretrained model fit for its tokenizer: classification needs to know what padding is."""
    config: Any = model.config
    if getattr(config, "pad_token_id", None) is None and tokenizer.pad_token_id is not None:
        config.pad_token_id = tokenizer.pad_token_id


def _from_scratch(task: Task, setting: Setting, shape: str) -> PreTrainedModel:
    import transformers

    end = setting.tokenizer.eos_token_id
    tokens = {"pad_token_id": setting.tokenizer.pad_token_id, "bos_token_id": end, "eos_token_id": end}
    positions = task.positions(setting.preset)
    config = SHAPES[shape](setting.preset, positions, vocab_size=len(setting.tokenizer), **tokens, **task.head(setting))
    return getattr(transformers, task.auto).from_config(config)  # type: ignore[no-any-return]


def _gpt2(p: Preset, positions: int, **rest: Any) -> PreTrainedConfig:
    from transformers import GPT2Config

    return GPT2Config(
        **rest, n_positions=positions, n_embd=p.width, n_layer=p.layers, n_head=p.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def _llama(p: Preset, positions: int, **rest: Any) -> PreTrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        **rest, max_position_embeddings=positions, hidden_size=p.width, num_hidden_layers=p.layers,
        num_attention_heads=p.heads, intermediate_size=-(-8 * p.width // 24) * 8, tie_word_embeddings=True,
    )  # fmt: skip


def _bert(p: Preset, positions: int, **rest: Any) -> PreTrainedConfig:
    from transformers import BertConfig

    return BertConfig(
        **rest, max_position_embeddings=positions, hidden_size=p.width, num_hidden_layers=p.layers,
        num_attention_heads=p.heads, intermediate_size=4 * p.width, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _albert(p: Preset, positions: int, **rest: Any) -> PreTrainedConfig:
    from transformers import AlbertConfig

    return AlbertConfig(
        **rest, max_position_embeddings=positions, hidden_size=p.width, num_hidden_layers=p.layers,
        num_attention_heads=p.heads, intermediate_size=4 * p.width, embedding_size=min(128, p.width),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


SHAPES = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "albert": _albert}
"""Models made from scratch, small by their config. Without dropout: a short run never sees a text twice."""
