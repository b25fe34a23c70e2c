"""What is exported: a model, its schemes by layer, its tokenizer, and its folder of sentence-transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from locant.analysis.text import usable
from locant.exporting.refusal import CannotExport
from locant.hf.facts import limits
from locant.hf.loading import SCHEME, load
from locant.hf.plan import Plan, StackPlan, current_schemes, plan_of
from locant.hf.sentence_folder import SentenceFolder, sentence_folder
from locant.schemes import Scheme


@dataclass(frozen=True)
class Source:
    """A model that is to be exported."""

    model: PreTrainedModel
    tokenizer: Any | None
    folder: SentenceFolder | None  # if it is a model of sentence-transformers

    @property
    def plan(self) -> Plan | None:
        """Its plan; None if it is not swapped."""
        return plan_of(self.model)

    @property
    def kind(self) -> str:
        """The model type of its own config."""
        return str(self.model.config.model_type)

    def only_stack(self) -> StackPlan:
        """Returns the stack of a swapped model that has one and gave up its own positions; CannotExport otherwise."""
        plan = self.plan
        if plan is None:
            raise CannotExport("it has its own positions; to='original' saves it as it is")
        if plan.keep_native:
            raise CannotExport("it keeps its own positions beside the scheme, and no stock architecture has both")
        if len(plan.stacks) != 1:
            raise CannotExport(f"it has {len(plan.stacks)} stacks of layers, an encoder and a decoder")
        return plan.stacks[0]

    def layers(self) -> list[Scheme]:
        """Returns the scheme of every layer."""
        return current_schemes(self.model, self.only_stack())

    def config(self) -> Any:
        """Returns a copy of the config, as it was before the swap."""
        config = copy.deepcopy(self.model.config)
        plan = self.plan
        if plan is not None:
            config.__dict__.pop("locant", None)
            if "max_position_embeddings" in plan.before:
                config.max_position_embeddings = plan.before["max_position_embeddings"]
        config._attn_implementation_internal = None
        return config

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights but those of the schemes."""
        return {name: weight for name, weight in self.model.state_dict().items() if not SCHEME.search(name)}

    def readable(self) -> int | None:
        """Returns how many tokens the model can read; None: any number."""
        return limits(self.model).positions


def source_of(model: PreTrainedModel | str | Path, tokenizer: Any = None) -> Source:
    """Opens a model by its folder or hub name, or takes an open one; its tokenizer comes from the same place."""
    if isinstance(model, (str, Path)):
        folder = sentence_folder(str(model))
        name = str(model) if folder is None else folder.transformer
        opened: Any = load(name)
        if folder is not None and "Pooling" in folder.kinds:
            opened = opened.base_model  # SentenceTransformer opens no head either
        return Source(opened.eval(), tokenizer or _tokenizer(name), folder)
    if not isinstance(model, PreTrainedModel):
        hint = "; export its transformer: model[0].auto_model" if type(model).__name__ == "SentenceTransformer" else ""
        raise TypeError(f"export takes a model of transformers or its folder, got {type(model).__name__}{hint}")
    name = model.name_or_path or ""
    return Source(model, tokenizer or _tokenizer(name), sentence_folder(name))


def _tokenizer(name: str) -> Any | None:
    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if name else None
    except (OSError, ValueError, KeyError):  # it has none
        return None
    return found if found is not None and usable(found) else None
