"""Models of llama2.c (github.com/karpathy/llama2.c) as models of transformers: the format of stories15M.bin.

    header     7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (< 0: own output weights), seq_len
    weights    float32, layer by layer within each kind: embeddings, norms and projections, the last norm, two tables of
               rotary cosines and sines (unused), and the output weights if they are not the embeddings
    tokenizer  int32 longest token; of each token a float32 score, its length and its bytes

Rotary pairs are neighbours there and half a head apart in transformers, so the rows of wq and wk are permuted.
"""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from locant.runs import text_source
from locant.runs.new_folder import undone_on_failure

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HEADER = struct.Struct("7i")
FIRST_BYTE = 3
"""Token of byte 0. Before the 256 bytes stand the unknown token, the start and the end."""
LONGEST_TOKEN = 1000
"""Bytes of the longest token; those of llama2.c have up to 27."""


def load(path: Path | str, tokenizer: Path | str) -> tuple[LlamaForCausalLM, Any]:
    """Returns a model and its tokenizer, read from files that may be compressed as .xz."""
    model, words = load_model(Path(path)), load_tokenizer(Path(tokenizer))
    if len(words) != model.config.vocab_size:
        raise ValueError(
            f"{path} has {model.config.vocab_size:,} tokens, {tokenizer} {len(words):,}: two models' files"
        )
    return model, words


def load_model(path: Path) -> LlamaForCausalLM:
    """Returns the model in a file of llama2.c, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = text_source.read_bytes(path)
    if len(data) < HEADER.size:
        raise ValueError(f"{path} is not a model of llama2.c: it has {len(data)} bytes")
    dim, hidden, layers, heads, kv_heads, vocabulary, length = HEADER.unpack_from(data)
    even = min(heads, kv_heads) > 0 and dim % (2 * heads) == 0 and heads % kv_heads == 0
    if min(dim, hidden, layers, length) < 1 or vocabulary == 0 or not even:
        raise ValueError(f"{path} is not a model of llama2.c: its header is {HEADER.unpack_from(data)}")
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    size, kv = dim // heads, dim // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocabulary, dim), "input_layernorm": (layers, dim), "q_proj": (layers, dim, dim),
        "k_proj": (layers, kv, dim), "v_proj": (layers, kv, dim), "o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim), "gate_proj": (layers, hidden, dim),
        "down_proj": (layers, dim, hidden), "up_proj": (layers, hidden, dim), "norm": (dim,),
        "cosines": (length, size // 2), "sines": (length, size // 2), "lm_head": (0 if tied else vocabulary, dim),
    }  # fmt: skip
    expected = HEADER.size + 4 * sum(map(math.prod, shapes.values()))
    if len(data) != expected:
        raise ValueError(f"{path} has {len(data):,} bytes; its header implies {expected:,}")
    at, read = HEADER.size, {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        read[name] = torch.from_numpy(np.frombuffer(data, np.float32, count, at).reshape(shape).copy())
        at += 4 * count
    read["q_proj"], read["k_proj"] = _halves(read["q_proj"], heads), _halves(read["k_proj"], kv_heads)
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.eval()
    state = {"model.embed_tokens.weight": read["embed_tokens"], "model.norm.weight": read["norm"]}
    state["lm_head.weight"] = read["embed_tokens"] if tied else read["lm_head"]
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{layer}.{name}.weight"] = read[name][layer]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"model.layers.{layer}.self_attn.{name}.weight"] = read[name][layer]
        for name in ("gate_proj", "up_proj", "down_proj"):
            state[f"model.layers.{layer}.mlp.{name}.weight"] = read[name][layer]
    model.load_state_dict(state)
    return model


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [layers, heads · size, dim]: from (x0 y0 x1 y1 …) in each head to (x0 x1 … y0 y1 …)."""
    layers, rows, dim = weight.shape
    return weight.view(layers, heads, rows // heads // 2, 2, dim).transpose(2, 3).reshape(layers, rows, dim)


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer in a file of llama2.c."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    data, at, pieces = text_source.read_bytes(path), 4, []
    while at + 8 <= len(data):
        score, count = struct.unpack_from("fi", data, at)
        if not 0 <= count <= LONGEST_TOKEN:
            break
        pieces.append((data[at + 8 : at + 8 + count], score))
        at += 8 + count
    if at != len(data) or len(pieces) < FIRST_BYTE + 256:
        raise ValueError(f"{path} is not a tokenizer of llama2.c: it ends or is wrong after {len(pieces):,} tokens")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    try:
        names += [piece.decode("utf-8").replace(" ", "▁") for piece, _ in pieces[len(names) :]]
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} has a token that is not text in UTF-8: {problem}") from None
    vocabulary = {name: number for number, name in enumerate(names)}
    # Byte-pair merges: every split of a piece into two other pieces, the pieces with the highest score first.
    order = sorted(range(FIRST_BYTE + 256, len(names)), key=lambda number: -pieces[number][1])
    merges = [
        (names[number][:cut], names[number][cut:])
        for number in order
        for cut in range(1, len(names[number]))
        if names[number][:cut] in vocabulary and names[number][cut:] in vocabulary
    ]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def main(model: str, tokenizer: str, out: str) -> None:
    """Writes a folder that transformers and locant open."""
    made, words = load(model, tokenizer)
    with undone_on_failure(Path(out)):
        made.save_pretrained(out)
        words.save_pretrained(out)
    print(f"written: {out}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("python -m locant.hf.llama2c MODEL.bin TOKENIZER.bin FOLDER")
    main(*sys.argv[1:])
