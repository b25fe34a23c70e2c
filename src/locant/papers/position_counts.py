"""Positional parameters of the base models: those of a position table, and those of TISA in its place.

The models are built by transformers and swapped by this library, so the counts are of real parameters. What does not
concern positions is as small as possible: the vocabulary, and the feed-forward layers.
"""

from __future__ import annotations

from typing import Any

from locant.papers.place import Place
from locant.schemes import Scheme

KERNELS = (1, 3, 5)
SMALL: dict[str, Any] = {"vocab_size": 8, "intermediate_size": 8}


def count_parameters(at: Place) -> dict[str, Any]:
    """Returns the positional parameters of ALBERT-base and BERT-base: of the table, and of TISA(S)."""
    from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

    from locant.hf.swapping import exchange

    albert = AlbertConfig(hidden_size=768, num_attention_heads=12, num_hidden_layers=12, embedding_size=128, **SMALL)
    rows = []
    for name, model in (("ALBERT-base", AlbertModel(albert)), ("BERT-base", BertModel(BertConfig(**SMALL)))):
        table = model.embeddings.position_embeddings.weight
        for kernels in KERNELS:
            swapped = exchange(model, f"tisa:kernels={kernels}")
            schemes = {part for part in swapped.modules() if isinstance(part, Scheme)}
            own = {id(p): p.numel() for scheme in schemes for p in scheme.parameters()}
            rows.append({"model": name, "kernels": kernels, "table": table.numel(), "tisa": sum(own.values())})
            exchange(model, "native")
    return {"rows": rows}
