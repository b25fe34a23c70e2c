"""The arms of a comparison: models that differ in their position scheme alone.

    native                   the model with its own positions
    native+tisa:kernels=5    its own positions, and a scheme added to them
    tisa:kernels=5           a scheme in their place

All arms of one seed have the same initial weights wherever shapes agree. We create the model from the seed with its own
positions, and then swap the scheme in.

Functions import transformers and `locant.hf`, which loads it: it takes seconds, and the command must start sooner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locant import imports, notation
from locant.experiments.presets import Preset
from locant.experiments.tasks import Task
from locant.experiments.tasks.task import Setting, longest, too_long

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NATIVE = "native"


def specs(text: str) -> list[str]:
    """Splits `tisa,huang4:clip=64,heads=own,nope` into three specs. A comma before an option belongs to its scheme."""
    found = notation.split(text)
    for spec in found:
        parts = re.split(r"[+/]", spec)
        if not all(part.strip() for part in parts) or parts.count(NATIVE) > 1:
            raise ValueError(f"the scheme {spec!r} has an empty part, or names native twice; write native+SCHEME")
    twice = {spec for spec in found if found.count(spec) > 1}
    if twice:
        raise ValueError(f"the schemes have {', '.join(sorted(twice))} twice")
    return found


def build(task: Task, setting: Setting, model: str, spec: str, seed: int) -> PreTrainedModel:
    """Returns the model of one run before training."""
    from locant.hf.swapping import exchange

    torch.manual_seed(seed)
    if is_own(model):
        made, whole = _own(task, setting, model, spec)
        if whole:
            return made
    else:
        made = _from_scratch(task, setting, model) if model in SHAPES else _pretrained(task, setting, model)
    torch.manual_seed(seed)
    kept, _, rest = spec.partition("+")
    if spec == NATIVE:
        return made
    if kept.strip() == NATIVE:
        return exchange(made, _with_length(rest, made), keep_native=True)
    return exchange(made, _with_length(spec, made))


def check(task: Task, setting: Setting, model: str, spec: str) -> None:
    """Raises ValueError where an arm cannot be built, or cannot read its training inputs."""
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
        hint = f", or a preset with length={fitting}" if fitting else ""
        raise ValueError(f"{spec} cannot be trained at {tokens} tokens: {reason}. Choose another scheme{hint}")
    if task.auto == "AutoModelForCausalLM" and not _is_causal(made):
        raise ValueError(
            f"{model} is not causal, so it could read the tokens it must predict; use gpt2 or llama for {task.name}"
        )


def check_all(task: Task, setting: Setting, model: str, specs: Iterable[str]) -> None:
    """Checks several arms of one model."""
    for spec in specs:
        check(task, setting, model, spec)


def is_own(model: str) -> bool:
    """Whether a model is a function of the user's own, `module:function`."""
    return model not in SHAPES and imports.is_reference(model) and not Path(model).exists()


def _own(task: Task, setting: Setting, model: str, spec: str) -> tuple[PreTrainedModel, bool]:
    """Returns what a function of the user's own builds, and whether it has the scheme already."""
    from locant.experiments.own_model import Wanted, finish

    build, _ = imports.find(model, load_module=False)
    positions = task.positions(setting.preset)
    wanted = Wanted(setting.preset, len(setting.tokenizer), positions, task.auto, _special_tokens(setting),
                    task.head(setting), _learned(_without_native(spec), positions))  # fmt: skip
    made = build(wanted)
    module = finish(made, wanted)
    if module is not None and NATIVE in spec:
        raise ValueError(f"{model} is a module of your own, which has no native positions; name a scheme")
    return (made, False) if module is None else (module, True)


def _without_native(spec: str) -> str:
    """A spec that can be built; `native` alone becomes nope, and is refused or not used later."""
    kept, _, rest = spec.partition("+")
    return (rest or "nope") if kept.strip() == NATIVE else spec


def _is_causal(model: PreTrainedModel) -> bool:
    own: Any = model
    if hasattr(own, "reads_later_tokens"):
        return not own.reads_later_tokens()
    from locant.hf.facts import is_causal

    return is_causal(model, torch.tensor([[1, 2]]))


def _with_length(spec: str, model: Any) -> str:
    """Gives a learned table the length of the training inputs: rows beyond it would never be trained."""
    return _learned(spec, longest(model) or getattr(model.config, "max_position_embeddings", None))


def _learned(spec: str, length: int | None) -> str:
    return re.sub(r"(?<!=)\blearned\b(?![:=])", f"learned:length={length}", spec) if length else spec


def _pretrained(task: Task, setting: Setting, model: str) -> PreTrainedModel:
    import transformers

    from locant.hf import load

    made: PreTrainedModel = load(model, getattr(transformers, task.auto), **task.head(setting))
    _set_padding(made, setting.tokenizer)
    return made


def _set_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Copies the padding token of the tokenizer to a config that has none: classification needs it."""
    config: Any = model.config
    if getattr(config, "pad_token_id", None) is None and tokenizer.pad_token_id is not None:
        config.pad_token_id = tokenizer.pad_token_id


def _from_scratch(task: Task, setting: Setting, shape: str) -> PreTrainedModel:
    import transformers

    tokens = _special_tokens(setting)
    positions = task.positions(setting.preset)
    config = SHAPES[shape](setting.preset, positions, vocab_size=len(setting.tokenizer), **tokens, **task.head(setting))
    return getattr(transformers, task.auto).from_config(config)  # type: ignore[no-any-return]


def _special_tokens(setting: Setting) -> dict[str, Any]:
    end = setting.tokenizer.eos_token_id
    return {"pad_token_id": setting.tokenizer.pad_token_id, "bos_token_id": end, "eos_token_id": end}


GELU = "gelu_pytorch_tanh"
"""The activation of GPT-2 and ALBERT (`gelu_new`) as one operation of PyTorch: a training step takes a sixth less."""


def _gpt2(p: Preset, positions: int, **rest: Any) -> PreTrainedConfig:
    from transformers import GPT2Config

    return GPT2Config(
        **rest, n_positions=positions, n_embd=p.width, n_layer=p.layers, n_head=p.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function=GELU,
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
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act=GELU,
    )  # fmt: skip


SHAPES = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "albert": _albert}
"""Models made from scratch with a small config. They have no dropout: a short run reads no text twice."""
