"""Chi et al. 2023: a causal model without position embeddings knows positions from the variance of its attention.

Token m averages m values, and the average of more values has less variance. B1 asks whether the position can be read
from a random model at all, B2 whether the variance is the predicted one, B3 whether training leaves it, B4 whether
bidirectional models lack it. B5 is the table of the companion paper, Haviv et al. 2022 (arXiv 2203.16634): models
without positions compete where attention is causal, and fail where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from locant.experiments.statistics import estimate
from locant.papers.claim import Claim, Measured, Paper, Part, Table
from locant.papers.effects import gain
from locant.papers.place import Place
from locant.papers.random_models import RandomShape
from locant.papers.rules import Absent, Criterion, Larger, NotWorse, Reached
from locant.papers.steps import Step
from locant.papers.traces import Probing
from locant.papers.variance_steps import (
    BASELINE,
    CAUSAL,
    MASKED,
    NOPE,
    TRACED,
    adapting,
    bigram_step,
    comparing,
    losses,
    reading,
    tracing,
    training,
    twins,
)
from locant.papers.variance_tables import (
    after_training,
    curves_by_layer,
    difference_table,
    loss_table,
    over_seeds,
    probe_table,
    row_of,
    skill,
    slope_row,
    slopes,
    theory_tables,
)

SMALLEST_SLOPE = 0.05
"""Theory gives the last of the paper's twelve random layers a slope of −0.06. A weaker one is no sign of the effect."""
SMALLEST_READING = 0.1
"""A probe must remove a tenth of the error of the constant guess. Probes on shuffled positions stay within 2 %."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one preset.

    `small`, in core-seconds (a step of a 4 × 192 model with 16 × 128 tokens takes 0.66 s):
        clm 5 schemes × 3 seeds × 1,500 steps         14,900
        mlm 4 schemes × 3 seeds × 900 steps            7,100
        5 random models, 2 × 300 probe steps of 0.6 s  1,800
        5 random models of 6 × 768 beside theory         400
        33 probed trained models, 300 steps of 0.25 s  2,500
        stories15M, 120 steps of 5 s, and its probes   1,100     in all 27,800
    """

    models: int  # random models, each with its own seed
    random: RandomShape  # of the probed random models
    theory: RandomShape  # of the random models that are compared with theory
    probing: Probing
    sequences: int  # of random tokens, for the variance of a random model
    windows: int  # of text, for the variance of a trained model
    seeds: int  # of trained models
    layers: int  # of trained models
    heads: int
    width: int
    length: int
    batch: int
    vocabulary: int
    rate: float
    causal_steps: int
    masked_steps: int
    evaluated: int  # test tokens; 0 for all
    kept: int  # models kept on the way
    adapt_steps: int  # of stories15M to `nope`; 0 to leave it out
    adapt_length: int = 256  # of its sequences, in the adaptation and in the measurement


class RandomModelsKnowPosition(Claim):
    """Probes learn to predict a token's position from the hidden states of random causal models without positions.

    Nothing is trained but the probes, and every batch has fresh random tokens, so a probe can use nothing but what the
    architecture writes into the states. The criterion takes the last layer: it was chosen beforehand, and it is the
    one that the signal must survive to. Every value is another random model. The twin has the same weights and sees
    all tokens from all positions; if its probes succeed too, something other than causal attention gives the position
    away.
    """

    id = "B1"
    says = "A random, frozen causal transformer without position embeddings encodes the positions of its tokens."
    place = "the probing experiment with randomly initialised models"
    quantity = "1 − error / error of the constant guess, of a probe after the last layer; one value per random model"
    READS = "What the probe after the last layer reads from causal models"
    TWIN = "What it reads from the bidirectional twins"
    criteria = (Criterion(READS, Larger(SMALLEST_READING, seeds=5)), Criterion(TWIN, Absent(0.05, seeds=5)))
    limits = (
        "The probes are small and briefly trained: a better one may read more. At sizes below those of the paper σ is "
        "larger, so that q, k, v and logits have the paper's variances."
    )

    def steps(self, at: Place) -> list[Step]:
        return list(reading(at))

    def measure(self, at: Place) -> Measured:
        found = [at.measured(step.name) for step in reading(at)]
        last = at.size.random.layers
        own, twin = ([skill(each[name], last) for each in found] for name in ("probes", "twin"))
        tables = {
            "probes": probe_table(
                {"causal": [each["probes"] for each in found], "bidirectional twin": [each["twin"] for each in found]}
            )
        }
        parts = [Part(self.READS, "causal", estimate(own)), Part(self.TWIN, "bidirectional", estimate(twin))]
        sentence = (
            f"After the last layer a probe removes {estimate(own).mean:.0%} of the error of the constant guess in "
            f"causal models and {estimate(twin).mean:.0%} in their bidirectional twins (means over {len(own)} models)."
        )
        return Measured(parts, tables, [sentence])


class VarianceFallsAsPredicted(Claim):
    """The variance after every step of a layer of random models, beside the paper's theory and our corrected one.

    The paper's formulas hold for the first layer, where tokens are independent. There the attention output must fall
    like 1/m (slope −1), and each step must have the predicted size. 15 % is what the paper's approximations leave out:
    exp(s²) = 10 % for weights that are not uniform and s²·m/d = 6 % for overlapping tokens; a missing factor such as 2
    or the number of heads would be far outside. The corrected theory has both terms and the correlation of tokens, and
    must describe the attention output of every layer within 10 %: random models differ from each other by 5 %.
    """

    id = "B2"
    says = "The variance of the attention output shrinks with the position m, as 1/m in the first layer."
    place = "the theoretical analysis of a layer, and its simulation"
    quantity = (
        "slope of log variance against log m; theory / measured − 1, mean over m = 1, 2, 4, …; one value per model"
    )
    SLOPE = "Slope of the first layer's attention output, plus 1"
    PLAIN = "Error of the paper's theory at each step of the first layer, up to the residual"
    CORRECTED = "Error of the corrected theory for the attention output of each layer"
    criteria = (
        Criterion(SLOPE, Absent(0.05)),
        Criterion(PLAIN, Absent(0.15)),
        Criterion(CORRECTED, Absent(0.10)),
    )
    limits = "It is the paper's initialisation, N(0, σ²) for every matrix. Other initialisations have other sizes."

    def steps(self, at: Place) -> list[Step]:
        return list(comparing(at))

    def measure(self, at: Place) -> Measured:
        from locant.analysis.steps import ATTENTION, RESIDUAL, STEPS

        found = [at.measured(step.name) for step in comparing(at)]
        by_step = {(row["layer"], row["step"]): [row_of(each, row) for each in found] for row in found[0]["rows"]}
        early = STEPS[: STEPS.index(RESIDUAL) + 1]
        attention = {layer: rows for (layer, step), rows in by_step.items() if step == ATTENTION}
        parts = [Part(self.SLOPE, "layer 1", estimate([row["slope"] + 1 for row in attention[1]]))]
        parts += [
            Part(self.PLAIN, step, estimate([row["plain error"] for row in by_step[1, step]]))
            for step in early
            if (1, step) in by_step
        ]
        parts += [
            Part(self.CORRECTED, f"layer {layer}", estimate([row["corrected error"] for row in rows]))
            for layer, rows in attention.items()
        ]
        return Measured(parts, theory_tables(by_step, attention, found[0]["positions"]), self._sentences(parts))

    def _sentences(self, parts: list[Part]) -> list[str]:
        worst = {asks: max((part for part in parts if part.asks == asks), key=lambda part: abs(part.effect.mean))
                 for asks in (self.PLAIN, self.CORRECTED)}  # fmt: skip
        return [
            f"The slope of the first layer is {parts[0].effect.mean - 1:.3f}.",
            f"The paper's theory is off most at {worst[self.PLAIN].name} of the first layer, by "
            f"{worst[self.PLAIN].effect.mean:+.1%}; the corrected one at the attention output of "
            f"{worst[self.CORRECTED].name}, by {worst[self.CORRECTED].effect.mean:+.1%}.",
        ]


class TrainingLeavesTheFall(Claim):
    """The variance by position of causal models without positions, before, during and after training on WikiText-2.

    Windows begin anywhere in the text, so positions do not differ in their words. The models must have learned more
    than neighbours: their loss must be below that of a smoothed bigram model on the same tokens, or the claim is
    neither confirmed nor contradicted. After training, the variance of the attention output must fall with position on
    average over the layers, and in three of four layers; and a probe of the middle layer must still read the position
    (later layers turn to the next token). `rope` and `learned` are measured beside it, and so is stories15M, a rotary
    model trained by others, before and after it was adapted to no positions.
    """

    id = "B3"
    says = "The variance of the attention output still falls with position after the model has been trained."
    place = "the check on pre-trained models without positions"
    quantity = "minus the slope of log variance against log position, trained `nope` models, one value per seed"
    MEAN = "Fall of the variance after training, mean over the layers"
    LAYERS = "Fall of the variance after training, in each layer"
    PROBE = "What a probe of the middle layer reads after training"
    LEARNED = "Loss of bigrams minus that of the model"
    criteria = (
        Criterion(MEAN, Larger(SMALLEST_SLOPE)),
        Criterion(LAYERS, Larger(SMALLEST_SLOPE), share=0.75),
        Criterion(PROBE, Larger(SMALLEST_READING)),
        Criterion(LEARNED, Reached()),
    )
    limits = (
        "Small models and short training. That the variance falls does not show that the model uses it; models with "
        "positions are causal too, and theirs may fall at the first positions. Stories15M is one model, without an "
        "interval."
    )
    sources = ("wikitext", "stories")

    def steps(self, at: Place) -> list[Step]:
        traced = [step for each in TRACED for step in (training(at, "clm", each), *tracing(at, "clm", each))]
        others = [training(at, "clm", scheme) for scheme in CAUSAL if scheme not in TRACED]
        return [*traced, bigram_step(at), *others, *adapting(at)]

    def measure(self, at: Place) -> Measured:
        points = {
            scheme: [at.measured(step.name)["points"] for step in tracing(at, "clm", scheme)] for scheme in TRACED
        }
        causal = losses(at, "clm")
        bigram = at.measured(bigram_step(at).name)["loss"]
        stories = at.measured("variance-stories") if at.size.adapt_steps else {}
        ends = [each[-1] for each in points[NOPE]]
        falls = [[-slope for slope in slopes(each["variance"])] for each in ends]
        middle = max(1, at.size.layers // 2)
        parts = [Part(self.MEAN, "mean over the layers", estimate([sum(each) / len(each) for each in falls]))]
        parts += [Part(self.LAYERS, f"layer {n}", each) for n, each in enumerate(over_seeds(falls), 1)]
        parts.append(Part(self.PROBE, f"layer {middle}", estimate([skill(each["probes"], middle) for each in ends])))
        parts.append(Part(self.LEARNED, NOPE, estimate([bigram - loss for loss in causal[NOPE].values()])))
        tables, sentences = after_training(points, stories, causal, bigram)
        return Measured(parts, tables, sentences)


class BidirectionalModelsLackIt(Claim):
    """Bidirectional models without positions: the twins of the random models, and masked models after training.

    Every token averages all tokens, so no position can differ. The slope of every layer must lie within 0.03, half of
    what theory gives the weakest layer of a causal model, and a probe after the last layer must read nothing.
    """

    id = "B4"
    says = "Bidirectional attention without positions has no such signal: the variance is the same at all positions."
    place = "the comparison with bidirectional attention"
    quantity = "slope of log variance against log position in each layer; 1 − error / constant of the probe"
    SLOPE = "Slope of the attention output's variance in each layer"
    PROBE = "What a probe after the last layer reads"
    criteria = (Criterion(SLOPE, Absent(SMALLEST_SLOPE * 0.6)), Criterion(PROBE, Absent(0.05)))
    limits = "An absence within margins: it excludes effects of the size found in causal models, not smaller ones."
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        return [*reading(at), *twins(at), training(at, "mlm", NOPE), *tracing(at, "mlm", NOPE)]

    def measure(self, at: Place) -> Measured:
        random = [at.measured(step.name) for step in reading(at)]
        both = [at.measured(step.name) for step in twins(at)]
        trained = [at.measured(step.name)["points"][-1] for step in tracing(at, "mlm", NOPE)]
        groups = {
            "random": [each["bidirectional"] for each in both],
            "trained": [each["variance"] for each in trained],
        }
        probes = {"random": [each["twin"] for each in random], "trained": [each["probes"] for each in trained]}
        parts, rows = [], []
        for name, group in groups.items():
            for layer, found in enumerate(over_seeds([slopes(each) for each in group]), 1):
                parts.append(Part(self.SLOPE, f"{name}, layer {layer}", found))
                rows.append(slope_row(name, layer, found))
        for name, probed in probes.items():
            last = int(probed[0][-1]["layer"])
            parts.append(Part(self.PROBE, f"{name}, layer {last}", estimate([skill(each, last) for each in probed])))
        causal = [each["causal"] for each in both]
        rows += [slope_row("random, causal", n, each) for n, each in
                 enumerate(over_seeds([slopes(each) for each in causal]), 1)]  # fmt: skip
        tables = {
            "slopes": Table(("model", "layer", "slope", "low", "high"), rows),
            "variance": curves_by_layer({**groups, "random, causal": causal}),
            "probes random": probe_table({"random, bidirectional": probes["random"]}),
            "probes trained": probe_table({"trained, bidirectional": probes["trained"]}),
        }
        steepest = max((part for part in parts if part.asks == self.SLOPE), key=lambda part: abs(part.effect.mean))
        sentence = f"The steepest slope of a bidirectional layer is {steepest.effect.mean:+.4f} ({steepest.name})."
        return Measured(parts, tables, [sentence])


class ModelsWithoutPositionsCompete(Claim):
    """The companion's table at a smaller size: the same models with several schemes, causal and masked.

    Its causal models without positions lose 0.027 nats to a learned table on WikiText-103 (perplexity 20.97 against
    20.42) and 0.004 on the Pile; the best scheme there, ALiBi, is 0.062 ahead of them on WikiText-103. The margin of
    0.05 is about twice the first and below the last: a model that loses more than this does not compete. Its masked
    models without positions lose 3.6 nats. Here they must lose 0.25, five times the causal margin, to two of the three
    schemes at least: a scheme that a short training makes no use of shows nothing about masked models.
    """

    id = "B5"
    says = "Causal models without positions are competitive; masked models need positions."
    place = "the language models of the companion paper, Haviv et al. 2022"
    quantity = "difference of the test loss in nats per token, paired by seed"
    CLOSE = "Causal: loss of learned positions minus that of none"
    NEEDED = "Masked: loss of no positions minus that of each scheme"
    LEARNED = "Loss of bigrams minus that of the best models"
    criteria = (
        Criterion(CLOSE, NotWorse(0.05)),
        Criterion(NEEDED, Larger(0.25), share=0.6),
        Criterion(LEARNED, Reached()),
    )
    limits = (
        "Small models, short texts, few steps. A learned table learns slowly, so short training favours no positions; "
        "masked models begin to use context late, so short training hides what they lose. Models that are not better "
        "than bigrams show nothing; this condition was added after a first run at `quick`, where they were not."
    )
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        causal, masked = ([training(at, task, scheme) for scheme in schemes]
                          for task, schemes in (("clm", CAUSAL), ("mlm", MASKED)))  # fmt: skip
        return [*causal, bigram_step(at), *masked]

    def measure(self, at: Place) -> Measured:
        causal, masked = (losses(at, task) for task in ("clm", "mlm"))
        bigram = at.measured(bigram_step(at).name)["loss"]
        close = gain(causal[NOPE], causal[BASELINE], higher_is_better=False)
        parts = [Part(self.CLOSE, f"{NOPE} against {BASELINE}", close)]
        parts += [
            Part(self.NEEDED, f"{scheme} against {NOPE}", gain(masked[scheme], masked[NOPE], higher_is_better=False))
            for scheme in MASKED
            if scheme != NOPE
        ]
        parts += [
            Part(
                self.LEARNED,
                name,
                estimate([bigram - min(scores[scheme][seed] for scheme in scores) for seed in seeds]),
            )
            for name, scores in (("causal", causal), ("masked", masked))
            for seeds in [scores[NOPE]]
        ]
        tables = {
            "losses": loss_table({"clm": causal, "mlm": masked}, bigram),
            "causal differences": difference_table(causal, BASELINE),
            "masked differences": difference_table(masked, NOPE),
        }
        best = min(estimate(list(values.values())).mean for values in causal.values())
        lost = ", ".join(f"{part.effect.mean:+.3f} nats ({part.name})" for part in parts if part.asks == self.NEEDED)
        sentences = [
            f"Causal: the loss without positions is {-close.mean:+.3f} nats from that with learned ones.",
            f"Smoothed bigrams have a loss of {bigram:.3f}; the best causal models have {best:.3f}.",
            f"Masked: models without positions lose {lost}.",
        ]
        return Measured(parts, tables, sentences)


PAPER = Paper(
    "variance",
    "Latent Positional Information is in the Self-Attention Variance of Transformer Language Models Without Positional "
    "Embeddings",
    "Chi et al. 2023, arXiv 2305.13571",
    (
        RandomModelsKnowPosition(),
        VarianceFallsAsPredicted(),
        TrainingLeavesTheFall(),
        BidirectionalModelsLackIt(),
        ModelsWithoutPositionsCompete(),
    ),
    {
        "quick": Sizes(
            models=5, random=RandomShape(3, 4, 96, 64, 10_000), theory=RandomShape(3, 4, 256, 128, 20_000),
            probing=Probing(batch=16, steps=120, tests=4, seeds=1), sequences=48, windows=256,
            seeds=3, layers=3, heads=4, width=64, length=64, batch=16, vocabulary=1024, rate=3e-3,
            causal_steps=300, masked_steps=200, evaluated=32_768, kept=2, adapt_steps=10, adapt_length=64,
        ),
        "small": Sizes(
            models=5, random=RandomShape(6, 4, 256, 128), theory=RandomShape(6, 12, 768, 512),
            probing=Probing(batch=16, steps=300, tests=8, seeds=1), sequences=24, windows=1024,
            seeds=3, layers=4, heads=4, width=192, length=128, batch=16, vocabulary=2048, rate=2e-3,
            causal_steps=1500, masked_steps=900, evaluated=131_072, kept=3, adapt_steps=120, adapt_length=128,
        ),
        "paper": Sizes(
            models=5, random=RandomShape(12, 12, 768, 512), theory=RandomShape(12, 12, 768, 512),
            probing=Probing(batch=32, steps=2000, tests=16, seeds=5), sequences=64, windows=2048,
            seeds=5, layers=12, heads=12, width=768, length=512, batch=32, vocabulary=50_257, rate=6e-4,
            causal_steps=50_000, masked_steps=50_000, evaluated=0, kept=5, adapt_steps=2000,
        ),
    },
)  # fmt: skip
