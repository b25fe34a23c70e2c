"""Folders of tiny sentence-transformers models, as SentenceTransformer itself writes them."""

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from tests import bert

WIDTH = 16
SPREAD = 10
"""Factor on the weights: with those of an untrained model, all texts have nearly the same vector."""
TEXTS = ["a cat sat on the mat", "the mat was sat on", "w7"]


def save(folder: Path, pooling="mean", *, dense: bool = False, max_seq_length: int = 24) -> str:
    """A BERT with a pooling, a dense layer if wanted, and vectors of length 1."""
    plain = bert.save(folder.parent / f"{folder.name}-plain")
    model = BertModel.from_pretrained(plain)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= SPREAD if weight.ndim > 1 else 1
    model.save_pretrained(plain)
    return _save(plain, folder, pooling, dense, max_seq_length)


def save_causal(folder: Path) -> str:
    """A Llama with a head, whose last token is the vector of a text. SentenceTransformer opens it without the head."""
    torch.manual_seed(0)
    plain, tokens = folder.parent / f"{folder.name}-plain", bert.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    whole = LlamaForCausalLM(config)
    LlamaModel.save_pretrained(whole.model, plain)
    tokens.save_pretrained(plain)
    _save(str(plain), folder, "lasttoken", False, 24)
    whole.save_pretrained(folder)
    return str(folder)


def _save(plain: str, folder: Path, pooling, dense: bool, max_seq_length: int) -> str:
    torch.manual_seed(1)
    width = WIDTH * (1 if isinstance(pooling, str) else len(pooling))
    modules = [Transformer(plain, max_seq_length=max_seq_length), Pooling(WIDTH, pooling)]
    modules += [Dense(width, 8)] if dense else []
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(str(folder))
    return str(folder)


def opened(folder) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def kinds(model: SentenceTransformer) -> list[str]:
    return [type(module).__name__ for module in model]
