"""Does the position table of a model become translation-invariant as it learns? (Wennberg & Henter 2021.)

    python bench/invariance.py [--seeds 3] [--steps 480]

Small BERTs and GPT-2s with a learned table are trained on a text in which most tokens repeat the token three places
before. At every logging step: R² of E Eᵀ, with and without its main diagonal, and the loss. Written to
bench/results/invariance.csv.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from measuring import RESULTS, command_line, write_csv
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from locant.analysis.invariance import InvarianceCallback

BACK, LENGTH, VOCABULARY, MASK = 3, 24, 20, 2


def text(count: int, seed: int) -> torch.Tensor:
    """Sequences in which nine tokens of ten repeat the one three places before."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    new = torch.rand(count, LENGTH, generator=generator) < 0.1
    for place in range(BACK, LENGTH):
        ids[:, place] = torch.where(new[:, place], ids[:, place], ids[:, place - BACK])
    return ids


def causal() -> tuple[GPT2LMHeadModel, list[dict[str, torch.Tensor]]]:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), [{"input_ids": row, "labels": row} for row in text(2000, 1)]


def masked() -> tuple[BertForMaskedLM, list[dict[str, torch.Tensor]]]:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = text(4000, 1)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    rows = zip(ids.where(~hidden, MASK), ids.where(hidden, -100), strict=True)
    return BertForMaskedLM(config), [{"input_ids": seen, "labels": wanted} for seen, wanted in rows]


def train(kind: str, seed: int, steps: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    model, rows = {"gpt2": causal, "bert": masked}[kind]()
    callback = InvarianceCallback()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, logging_steps=steps // 8, learning_rate=3e-3, report_to=[], seed=seed,
            use_cpu=True, save_strategy="no", disable_tqdm=True, per_device_train_batch_size=32,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
    losses = {row["step"]: round(row["loss"], 4) for row in trainer.state.log_history if "loss" in row}
    return [{"loss": losses.get(record["step"]), **record} for record in callback.records]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=480)
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    found = []
    for kind in ("gpt2", "bert"):
        for seed in range(chosen.seeds):
            for record in train(kind, seed, chosen.steps):
                row = {"model": kind, "seed": seed, "step": record["step"], "loss": record["loss"]}
                row |= {name: round(record[f"invariance/{name}"], 4) for name in ("gram", "off_diagonal", "cosine")}
                row |= {name: round(record[f"invariance/{name}"], 4) for name in ("head_1", "head_2")}
                print(row)
                found.append(row)
    write_csv(RESULTS / "invariance.csv", found)


if __name__ == "__main__":
    main()
