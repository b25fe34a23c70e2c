"""Exchanges two tokens of a tokenizer: MPNet's code has 1 as the id of the padding token, whatever its config says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from locant.exporting.refusal import CannotExport

TEXTS = ("A cat sat on the mat.", "words, numbers 1024 & ünïcödé", "")
"""Texts whose tokens must be the same, exchanged, before and after."""


@dataclass(frozen=True)
class Exchange:
    """Exchanges the token ids a and b."""

    a: int
    b: int

    def __call__(self, ids: Tensor) -> Tensor:
        return torch.where(ids == self.a, self.b, torch.where(ids == self.b, self.a, ids))

    def number(self, token: int) -> int:
        """Returns the new id of a token."""
        return {self.a: self.b, self.b: self.a}.get(token, token)

    def rows(self, weight: Tensor) -> Tensor:
        """Returns a table or vector with one row per token in the new order."""
        order = torch.arange(len(weight), device=weight.device)
        return weight[self(order)].clone()


def exchanged(tokenizer: Any, exchange: Exchange) -> Any:
    """Returns a tokenizer with two tokens exchanged, without token types; CannotExport if it cannot be changed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CannotExport(
            f"the tokenizer {type(tokenizer).__name__} is not one of the tokenizers library, so the id of its padding "
            f"token cannot be changed"
        )
    data = json.loads(backend.to_str())
    _exchange_vocabulary(data["model"], exchange)
    for token in data.get("added_tokens") or []:
        token["id"] = exchange.number(token["id"])
    data["added_tokens"] = sorted(data.get("added_tokens") or [], key=lambda token: token["id"])
    if data.get("padding"):
        data["padding"]["pad_id"] = exchange.number(data["padding"]["pad_id"])
    data["post_processor"] = _exchange_ids(data.get("post_processor"), exchange)
    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        clean_up_tokenization_spaces=getattr(tokenizer, "clean_up_tokenization_spaces", False),
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
    )
    for text in TEXTS:
        expected = [exchange.number(token) for token in tokenizer(text)["input_ids"]]
        if found(text)["input_ids"] != expected:
            raise CannotExport(
                f"the tokenizer {type(tokenizer).__name__} reads {text!r} otherwise after the id of its padding token "
                f"was changed"
            )
    return found


def _exchange_vocabulary(model: dict[str, Any], exchange: Exchange) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):  # WordPiece, BPE: ids by token
        renamed = {token: exchange.number(number) for token, number in vocabulary.items()}
        model["vocab"] = dict(sorted(renamed.items(), key=lambda item: item[1]))
    elif isinstance(vocabulary, list):  # Unigram: tokens and scores in the order of their ids
        size = len(vocabulary)
        if exchange.a < size and exchange.b < size:
            vocabulary[exchange.a], vocabulary[exchange.b] = vocabulary[exchange.b], vocabulary[exchange.a]
        if isinstance(model.get("unk_id"), int):
            model["unk_id"] = exchange.number(model["unk_id"])


def _exchange_ids(part: Any, exchange: Exchange) -> Any:
    """The post-processor with new ids: lists under "ids", and pairs of token and id under "cls" and "sep"."""
    if isinstance(part, list):
        return [_exchange_ids(each, exchange) for each in part]
    if not isinstance(part, dict):
        return part
    found = {}
    for key, value in part.items():
        if key == "ids" and isinstance(value, list):
            found[key] = [exchange.number(each) for each in value]
        elif key in ("cls", "sep") and isinstance(value, list) and len(value) == 2:
            found[key] = [value[0], exchange.number(value[1])]
        else:
            found[key] = _exchange_ids(value, exchange)
    return found
