"""BERT with one T5 bias for all layers is MPNet (Song et al. 2020, arXiv 2004.09297).

Both normalize after every sub-layer and add the bias after q·k was scaled. What is left of the absolute positions, and
the row of token type 0, goes into MPNet's position table:

    table[p + 2] = E_p + token type 0              p = 0 … length − 1

Its code fixes three numbers: 32 buckets, distance 128, and 1 as the id of the padding token, from which it counts
positions. So the tokens of a BERT whose padding id is 0 are renumbered: 0 and 1 change places.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MPNetConfig
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from locant.exporting.refusal import CannotExport
from locant.exporting.source import Source
from locant.exporting.stock import Stock, build, same_tokens
from locant.exporting.token_order import Exchange, exchanged
from locant.schemes import Scheme

PADDING = 1
"""Id of the padding token in MPNet's code."""
FIRST_ROW = PADDING + 1
"""Row of its position table for the first token."""
LENGTH = 4096
"""Rows of the position table if nothing else limits it."""
FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "distilbert")
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Ends of the names of classes that MPNet has too."""
RENAMED = (
    (r"\.attention\.self\.query\.", ".attention.attn.q."),
    (r"\.attention\.self\.key\.", ".attention.attn.k."),
    (r"\.attention\.self\.value\.", ".attention.attn.v."),
    (r"\.attention\.output\.dense\.", ".attention.attn.o."),
    (r"\.attention\.output\.LayerNorm\.", ".attention.LayerNorm."),
    # DistilBERT
    (r"^(\w+\.)?transformer\.layer\.", r"\1encoder.layer."),
    (r"\.attention\.q_lin\.", ".attention.attn.q."),
    (r"\.attention\.k_lin\.", ".attention.attn.k."),
    (r"\.attention\.v_lin\.", ".attention.attn.v."),
    (r"\.attention\.out_lin\.", ".attention.attn.o."),
    (r"\.sa_layer_norm\.", ".attention.LayerNorm."),
    (r"\.ffn\.lin1\.", ".intermediate.dense."),
    (r"\.ffn\.lin2\.", ".output.dense."),
    (r"\.output_layer_norm\.", ".output.LayerNorm."),
    (r"^vocab_transform\.", "lm_head.dense."),
    (r"^vocab_layer_norm\.", "lm_head.layer_norm."),
    (r"^vocab_projector\.", "lm_head.decoder."),
    # heads of BERT
    (r"^cls\.predictions\.transform\.dense\.", "lm_head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "lm_head.layer_norm."),
    (r"^cls\.predictions\.decoder\.", "lm_head.decoder."),
    (r"^cls\.predictions\.bias$", "lm_head.bias"),
)
"""Names of weights: patterns, and what MPNet has in their place."""
OF_TOKENS = ("word_embeddings.weight", "lm_head.decoder.weight", "lm_head.decoder.bias", "lm_head.bias")
"""Ends of the names of weights with a row per token."""
POSITIONS = "embeddings.position_embeddings.weight"
BUCKETS = "encoder.relative_attention_bias.weight"


def mpnet(source: Source, length: int | None) -> Stock:
    """Returns a swapped BERT as MPNet; CannotExport if MPNet cannot hold it.

    length   rows of the position table; by default those that the model has, or LENGTH.
    """
    if source.kind not in FAMILIES:
        raise CannotExport(f"MPNet has the layers of BERT; this is {source.kind} (possible: {', '.join(FAMILIES)})")
    stack, config = source.only_stack(), source.config()
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise CannotExport("MPNet is an encoder, and this model is a decoder")
    cls = _class(source)
    longest = min(each for each in (length, source.readable(), LENGTH if length is None else None) if each is not None)
    table = bucket_table(source.layers(), config.num_attention_heads, longest)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    exchange = None if pad == PADDING else Exchange(pad, PADDING)
    weights = _weights(source, config, exchange)
    notices = [f"MPNet's position table has rows for {longest:,} tokens"]
    types = [name for name in weights if name.endswith("token_type_embeddings.weight")]
    type_rows = weights.pop(types[0]) if types else None
    if type_rows is not None and len(type_rows) > 1:
        notices.append("MPNet has no token types: a second segment (token_type_ids 1) is read like the first")
    prefix = "" if cls is transformers.MPNetModel else "mpnet."
    weights[prefix + POSITIONS] = _position_rows(stack.embed, type_rows, longest, weights[_words(weights)])
    weights[prefix + BUCKETS] = table.mT.to(weights[_words(weights)])
    model = build(
        cls, _config(config, longest, cls), _for_head(weights, cls), ("pooler.dense.weight", "pooler.dense.bias")
    )
    tokenizer = source.tokenizer
    if tokenizer is None:
        notices.append("the model has no tokenizer; none was written")
    else:
        tokenizer = exchanged(tokenizer, exchange or Exchange(PADDING, PADDING))
    if exchange is not None:
        notices.append(f"the token ids {pad} and {PADDING} changed places, because MPNet's padding id is {PADDING}")
    return Stock(model, tokenizer, longest, exchange or same_tokens, notices=notices)


def bucket_table(layers: list[Scheme], heads: int, length: int) -> Tensor:
    """Returns the bias [heads, 32] of MPNet that all layers have; CannotExport if they have another one.

    The schemes are asked for their bias at every offset, whatever their class.
    """
    here = next((parameter.device for scheme in layers for parameter in scheme.parameters()), torch.device("cpu"))
    offsets = torch.arange(-length + 1, length, device=here)
    buckets = MPNetEncoder.relative_position_bucket(offsets)
    for scheme in layers:
        used = scheme.terms(offsets[:1]).used()
        if used not in ((), ("bias",)) or scheme.rotates or scheme.has_sides or scheme.has_far:
            raise CannotExport(f"MPNet has a bias by bucket and nothing else, and a layer has {scheme}")
    biases = [_bias(scheme, offsets, heads) for scheme in layers]
    if any(not torch.equal(bias, biases[0]) for bias in biases):
        raise CannotExport(
            "MPNet has one bias for all layers, and the layers of this model have different ones; fit or adapt it with "
            "t5:shared=layers"
        )
    table = biases[0].new_zeros(heads, 32)
    table[:, buckets] = biases[0]
    if not torch.equal(table[:, buckets], biases[0]):
        raise CannotExport(
            f"MPNet has T5's bias with 32 buckets up to distance 128, and {layers[0]} has another value within a "
            f"bucket; fit or adapt the model with t5:shared=layers"
        )
    return table


@torch.no_grad()
def _bias(scheme: Scheme, offsets: Tensor, heads: int) -> Tensor:
    found = scheme.terms(offsets).bias
    return torch.zeros(heads, len(offsets), device=offsets.device) if found is None else found.expand(heads, -1)


def _class(source: Source) -> Any:
    name = type(source.model).__name__
    end = next((end for end in HEADS if name.endswith(end)), None)
    found = getattr(transformers, f"MPNet{end}", None) if end is not None else None
    if found is None:
        raise CannotExport(f"MPNet has no class for the head of {name}; export its base model: model.base_model")
    if source.kind == "distilbert" and end == "ForSequenceClassification":
        raise CannotExport("the classifier of DistilBERT has a ReLU and that of MPNet a tanh; export model.base_model")
    return found


def _weights(source: Source, config: Any, exchange: Exchange | None) -> dict[str, Tensor]:
    found = {}
    prefix = source.model.base_model_prefix
    for name, weight in source.weights().items():
        if name.endswith(("position_embeddings.weight", "position_ids", "token_type_ids")):
            continue
        if "embeddings_project" in name:
            raise CannotExport("the token embeddings are narrower than the layers, and MPNet's are not")
        for pattern, new in RENAMED:
            name = re.sub(pattern, new, name)
        if name.startswith(f"{prefix}."):
            name = f"mpnet.{name.removeprefix(f'{prefix}.')}"
        if exchange is not None and name.endswith(OF_TOKENS):
            weight = exchange.rows(weight)
        found[name] = weight.detach()
    if "lm_head.decoder.bias" in found:  # DistilBERT has no second name for it
        found.setdefault("lm_head.bias", found["lm_head.decoder.bias"])
    return found


def _for_head(weights: dict[str, Tensor], cls: Any) -> dict[str, Tensor]:
    """The weights of a classifier: BERT's pooler and classifier are MPNet's classification head."""
    if not cls.__name__.endswith("SequenceClassification") or "classifier.out_proj.weight" in weights:
        return weights
    moved = {
        "mpnet.pooler.dense.": "classifier.dense.",
        "pre_classifier.": "classifier.dense.",
        "classifier.": "classifier.out_proj.",
    }
    found = {}
    for name, weight in weights.items():
        start = next((start for start in moved if name.startswith(start)), "")
        found[moved.get(start, "") + name.removeprefix(start)] = weight
    return found


def _words(weights: dict[str, Tensor]) -> str:
    return next(name for name in weights if name.endswith("word_embeddings.weight"))


@torch.no_grad()
def _position_rows(embed: Scheme | None, type_rows: Tensor | None, length: int, words: Tensor) -> Tensor:
    """[length + 2, width]: what is added to every token at a position. Padding gets rows that no token uses."""
    rows = words.new_zeros(length + FIRST_ROW, words.shape[1])
    if embed is not None:
        added = embed.embed(torch.arange(length, device=words.device))
        if added is not None:
            rows[FIRST_ROW:] += added
    return rows if type_rows is None else rows + type_rows[0]


def _config(old: Any, length: int, cls: Any) -> Any:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range",
             "tie_word_embeddings", "problem_type", "id2label", "label2id")  # fmt: skip
    distil = old.model_type == "distilbert"
    kept = {name: getattr(old, name) for name in names if getattr(old, name, None) is not None}
    own = {
        "intermediate_size": old.hidden_dim if distil else old.intermediate_size,
        "hidden_act": old.activation if distil else old.hidden_act,
        "hidden_dropout_prob": old.dropout if distil else old.hidden_dropout_prob,
        "attention_probs_dropout_prob": old.attention_dropout if distil else old.attention_probs_dropout_prob,
        "layer_norm_eps": 1e-12 if distil else old.layer_norm_eps,
    }
    return MPNetConfig(
        **kept, **own, max_position_embeddings=length + FIRST_ROW, pad_token_id=PADDING, bos_token_id=None,
        eos_token_id=None, relative_attention_num_buckets=32, architectures=[cls.__name__],
    )  # fmt: skip
