"""A BERT of a few thousand parameters with its tokenizer, for tests that need a model in a folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(33, 127) if not chr(code).isupper()]


def tokenizer() -> PreTrainedTokenizerFast:
    """Lower-cases words and makes one token of each letter, so a text has more tokens than words."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS, *(f"##{x}" for x in LETTERS)])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=200))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", model_input_names=inputs, **names)


def save(folder: Path, positions: int = 64) -> str:
    """The folder of a model that was never trained, as --model takes it."""
    torch.manual_seed(0)
    tokens = tokenizer()
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=positions, pad_token_id=0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)
