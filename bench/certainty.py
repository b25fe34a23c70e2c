"""Which heads' curves are certain in a MiniLM under tisa:kernels=5, and what STS-B loses without the uncertain ones.

    python bench/certainty.py WIKITEXT STS-B [--budget 60steps] [--out FOLDER]

WIKITEXT is the folder of WikiText-2: wiki.train.raw to fit and adapt on, wiki.valid.raw for the certainty. STS-B is the
folder with dev.tsv. Two states of all-MiniLM-L6-v2 are measured: fitted, and adapted.

The rules. A first run was stopped after three sets of heads and looked at; then the choice of the damping and the
centring of bands changed, and random sets went from 10 to 5 and bootstrap samples from 1,000 to 500.
A head's noise is that of its curve (`Band.noise`) by the likelihood "vectors"
with the original; the same by "attention" stands beside it. A head is dropped by setting the amplitudes of its kernels
to 0. K = 24 of the 72 heads are dropped: the most uncertain, the most certain, the ones with the smallest and the
largest curves (`Band.size`), and 5 random sets; also all heads whose noise is 1 or more, and all 72. The loss is the
change of Spearman's correlation on STS-B dev, with a 95 % interval from 500 bootstrap samples of its pairs.

1. Uncertain curves are noise, if the interval of the loss includes 0 or the loss is below 0.002.
2. Certainty finds heads that matter less, if the loss is smaller than for each of the 5 random sets.
3. Certainty knows more than the size of a curve, if the loss is smaller than for the smallest curves.
"""

import lzma
import random
import time
from pathlib import Path

import torch
import transformers
from measuring import RESULTS, command_line, minilm, write_csv
from scipy.stats import spearmanr

import locant
from locant.adaptation import sample
from locant.adaptation.scores import Stsb, _vectors
from locant.analysis.certainty import Band, Certainty, certainty
from locant.experiments.run import quiet
from locant.hf.plan import plan_of
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder

K, RANDOM_SETS, BOOTSTRAP = 24, 5, 500
Head = tuple[int, int]
"""Layer and head, from 1."""


def read(folder: Path, name: str) -> str:
    """Returns a file of WikiText-2, which may be compressed."""
    packed = folder / f"{name}.xz"
    return lzma.open(packed, "rt", encoding="utf-8").read() if packed.exists() else (folder / name).read_text("utf-8")


class Pairs(Stsb):
    """STS-B with the numbers of each pair, for a bootstrap."""

    def cosines(self, model: transformers.PreTrainedModel, tokenizer: object) -> torch.Tensor:
        """Returns the cosine of each pair of sentences."""
        with torch.no_grad():
            first, second = (_vectors(model, tokenizer, column, self.pooling) for column in self.part.texts)
        return (first * second).sum(-1)

    def loss(self, whole: torch.Tensor, dropped: torch.Tensor) -> tuple[float, float, float, float]:
        """Returns the correlation, its difference from that of the whole model, and the interval of the difference."""
        labels = torch.tensor(self.part.labels)

        def difference(rows: torch.Tensor) -> float:
            after, before = (spearmanr(x[rows], labels[rows]).statistic for x in (dropped, whole))
            return float(after - before)

        draw = torch.Generator().manual_seed(0)
        every = torch.arange(len(labels))
        found = sorted(difference(torch.randint(len(labels), (len(labels),), generator=draw)) for _ in range(BOOTSTRAP))
        low, high = found[round(0.025 * BOOTSTRAP)], found[round(0.975 * BOOTSTRAP) - 1]
        return float(spearmanr(dropped, labels).statistic), difference(every), low, high


def by_head(found: Certainty) -> dict[Head, Band]:
    """Returns the band of each head."""
    return {(int(band.place.split()[-1]), band.head): band for band in found.bands}


def sets_of(vectors: dict[Head, Band], attention: dict[Head, Band]) -> dict[str, list[Head]]:
    """Returns the heads to drop, by the name of the set."""
    heads = sorted(vectors)
    by_vectors = sorted(heads, key=lambda head: -vectors[head].noise)
    by_attention = sorted(heads, key=lambda head: -attention[head].noise)
    by_size = sorted(heads, key=lambda head: vectors[head].size)
    draw = random.Random(0)
    return {
        "most uncertain": by_vectors[:K],
        "most certain": by_vectors[-K:],
        "smallest curves": by_size[:K],
        **{f"random {number}": draw.sample(heads, K) for number in range(1, RANDOM_SETS + 1)},
        "noise of 1 or more": [head for head in heads if vectors[head].noise >= 1],
        "most uncertain, by attention": by_attention[:K],
        "most certain, by attention": by_attention[-K:],
        "largest curves": by_size[-K:],
        "all": heads,
    }


def without(model: transformers.PreTrainedModel, heads: list[Head]) -> list[torch.Tensor]:
    """Sets the amplitudes of some heads to 0, in place; returns all amplitudes as they were."""
    schemes = plan_of(model).stacks[0].schemes
    before = [scheme.amplitude.detach().clone() for scheme in schemes]
    for layer, head in heads:
        schemes[layer - 1].amplitude.data[head - 1] = 0
    return before


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("stsb")
    parser.add_argument("--budget", default="60steps")
    parser.add_argument("--states", nargs="*", default=["fitted", "adapted"], choices=["fitted", "adapted"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet()
    folder = minilm()
    train, held = (read(arguments.wikitext, f"wiki.{part}.raw") for part in ("train", "valid"))
    original = transformers.AutoModel.from_pretrained(folder)
    tokenizer = sample.tokenizer_of(original)
    pairs = Pairs(arguments.stsb, pooling_of(sentence_folder(folder)))
    heads, losses, costs = [], [], []
    for state in arguments.states:
        model = transformers.AutoModel.from_pretrained(folder)
        if state == "fitted":
            locant.fit(model, "tisa:kernels=5", train)
        else:
            locant.adapt(model, "tisa:kernels=5", train, budget=arguments.budget)
        model.eval()
        found = {}
        for kind in ("attention", "vectors"):
            wall, cpu = time.perf_counter(), time.process_time()
            found[kind] = certainty(model, held, tokenizer=tokenizer, original=original, likelihood=kind)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            costs.append({"state": state, "likelihood": kind, "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1),
                          "threads": arguments.threads})  # fmt: skip
            print(f"{state}, {kind}: {wall:.0f} s, {cpu:.0f} CPU s\n{found[kind]}", flush=True)
            there = {(bump.place, bump.head, bump.kernel) for bump in found[kind].bumps if bump.there}
            heads += [
                {"state": state, "likelihood": kind, "layer": layer, "head": head, "size": f"{band.size:.4g}",
                 "noise": f"{band.noise:.4g}", "signal": f"{band.signal:.3f}", "excluded": f"{band.excluded:.3f}",
                 "bumps": sum(1 for place, number, _ in there if (place, number) == (band.place, head)),
                 "doubtful": band.doubtful}
                for (layer, head), band in by_head(found[kind]).items()
            ]  # fmt: skip
        whole = pairs.cosines(model, tokenizer)
        for name, dropped in sets_of(by_head(found["vectors"]), by_head(found["attention"])).items():
            before = without(model, dropped)
            score, loss, low, high = pairs.loss(whole, pairs.cosines(model, tokenizer))
            for scheme, amplitude in zip(plan_of(model).stacks[0].schemes, before, strict=True):
                scheme.amplitude.data.copy_(amplitude)
            losses.append({"state": state, "dropped": name, "heads": len(dropped), "stsb": f"{score:.4f}",
                           "difference": f"{loss:+.4f}", "low": f"{low:+.4f}", "high": f"{high:+.4f}"})  # fmt: skip
            print(" ".join(map(str, losses[-1].values())), flush=True)
            for file, rows in (("heads", heads), ("stsb", losses), ("cost", costs)):
                write_csv(arguments.out / f"certainty-{file}.csv", rows)


if __name__ == "__main__":
    main()
