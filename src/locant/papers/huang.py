"""Huang, Liang, Xu & Xiang 2020, "Improve Transformer Models with Better Relative Position Embeddings".

The paper pretrains BERT with each method. We start from a pretrained model of 22 million parameters instead: its table
of absolute positions is replaced by each method, the method is fitted to the original attention, and the model is
distilled from its original for a few steps (a warm start). The same arms without these two are the cold start.

Every arm reads inputs of all tested lengths. Tables over offsets end at a clip, and all offsets beyond it share the
last row; XLNet's vectors and sinusoids have no last position; the table of the original has 512 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from locant.experiments.statistics import estimate
from locant.papers import absolute, glue, squad
from locant.papers.claim import Claim, Measured, Paper, Part, Table
from locant.papers.effects import known
from locant.papers.glue import ENCODER, TEXT, slug
from locant.papers.huang_numbers import (
    Kept,
    against_original,
    kept_of_original,
    kept_past_training,
    method_four_against_others,
    pictures,
    small_tables,
    spell,
)
from locant.papers.huang_sizes import ABSOLUTE, BEST, SIZES, Sizes
from locant.papers.offsets import Offsets, Tables
from locant.papers.place import Place
from locant.papers.retrieval import Retrieval
from locant.papers.rules import Criterion, Exact, Larger, NotWorse
from locant.papers.similarity import Similarity
from locant.papers.steps import Measuring, Step, Training, made, source

# ---- SQuAD ----------------------------------------------------------------------------------------


def of_arm(at: Place, arm: str) -> Training:
    """Returns the fine-tuning of the original, or that of a warm arm."""
    size: Sizes = at.size
    return squad.native(size.squad) if arm == ABSOLUTE else squad.warm(size.squad, size.spec(arm), size.budget)


def cold_arm(at: Place, arm: str) -> Training:
    """Returns the fine-tuning of a cold arm."""
    return squad.cold(at.size.squad, at.size.spec(arm))


class MethodFourIsBest(Claim):
    """Fine-tunes every arm on SQuAD v1.1 at one length and compares F1 and exact match, paired by seed.

    The comparison with absolute embeddings and with Shaw's decides, between warm arms: the paper compares models that
    were pretrained with their positions, and a warm start is the nearest to that. The smallest effect is half of what
    the authors' checkpoints show: method 4 has 2.0 F1 more than absolute embeddings and 1.0 more than Shaw's keys.
    Sinusoidal, XLNet's, methods 1 to 3 and all cold arms are reported.
    """

    id = "C1"
    says = "On SQuAD, method 4 is better than absolute embeddings and than all other relative ones"
    place = "the SQuAD experiment"
    quantity = "F1 of method 4 minus F1 of another arm, in points, both fine-tuned at the same length"
    over_absolute = "F1 of method 4 minus that of absolute embeddings, warm start"
    over_shaw = "F1 of method 4 minus that of Shaw, warm start"
    criteria = (Criterion(over_absolute, Larger(1.0)), Criterion(over_shaw, Larger(0.5)))
    limits = (
        "The arms start from a model pretrained with absolute positions; the others imitate it, so absolute embeddings "
        "have the advantage. All seeds of a warm arm start from one adapted model. At the small sizes F1 is far below "
        "that of a trained BERT, on a part of the training set."
    )
    sources = ("squad", "encoder", "wikitext")

    def steps(self, at: Place) -> list[Step]:
        size: Sizes = at.size
        warm = squad.warm_steps(size.squad, tuple(size.spec(arm) for arm in size.arms), size.budget)
        return [squad.native(size.squad), *warm, *(cold_arm(at, arm) for arm in size.arms)]

    def measure(self, at: Place) -> Measured:
        size: Sizes = at.size
        found = {
            metric: {arm: squad.only(squad.scores(at, of_arm(at, arm), metric)) for arm in (ABSOLUTE, *size.arms)}
            for metric in ("f1", "exact_match")
        }
        cold = {
            metric: {arm: squad.only(squad.scores(at, cold_arm(at, arm), metric)) for arm in size.arms}
            for metric in found
        }
        return method_four_against_others(found, cold, {ABSOLUTE: self.over_absolute, "shaw": self.over_shaw})


class RobustPastTheTrainedLength(Claim):
    """Tests the models of C1 on windows of 2, 3 and 4 times the trained length.

    A longer window holds more of the paragraph, so F1 can also rise. Therefore the share of F1 that method 4 keeps is
    compared with the share that absolute embeddings keep, on the same questions; it may be at most 5 % lower. And
    method 4 itself may lose at most 5 % of its F1.
    """

    id = "C2"
    says = "Method 4 stays robust on inputs longer than those it was fine-tuned on"
    place = "the experiment on sequences longer than in training"
    quantity = "F1 at 2 and 4 times the trained length, divided by F1 at the trained length if that is at least 10"
    against = "Share of F1 that method 4 keeps minus the share that absolute embeddings keep"
    alone = "Share of F1 that method 4 keeps, minus 1"
    criteria = (Criterion(against, NotWorse(0.05)), Criterion(alone, NotWorse(0.05)))
    limits = (
        "Longer is relative to the fine-tuning alone: the pretrained table has 512 trained rows, and the warm arms "
        "were adapted at up to 256 tokens. Paragraphs of SQuAD are short: about one test input in eight has more than "
        "256 tokens."
    )
    sources = MethodFourIsBest.sources

    def steps(self, at: Place) -> list[Step]:
        return MethodFourIsBest().steps(at)

    def measure(self, at: Place) -> Measured:
        lengths = squad.lengths(at, of_arm(at, ABSOLUTE))
        found = {
            arm: {length: squad.only(squad.scores(at, of_arm(at, arm), length=length)) for length in lengths}
            for arm in (ABSOLUTE, *at.size.arms)
        }
        return kept_past_training(found, against=self.against, alone=self.alone)


class ClipAndSharing(Claim):
    """Fine-tunes method 4 with a short and a long clip, and with a table for every head, each adapted first.

    The paper varies both. Their use is a small table, so we ask whether the small tables are worse: the shortest clip
    against the longest, and one table for all heads against one for each. A loss of 1 F1, half of the advantage that
    the authors' checkpoints show over absolute embeddings, would matter.
    """

    id = "C3"
    says = "Method 4 needs neither a long clipping distance nor a table for every head"
    place = "the comparison of clipping distances and of sharing"
    quantity = "F1 of a small table minus F1 of a large one, in points, if both are at least 10; parameters of both"
    short = "F1 with the shortest clip minus F1 with the longest"
    shared = "F1 with one table for all heads minus F1 with one for each"
    criteria = (Criterion(short, NotWorse(1.0)), Criterion(shared, NotWorse(1.0)))
    limits = (
        "The order in the paper's own table is not known to us; this tests what makes a small table worth having. "
        "Layers do not share tables here. The inputs of fine-tuning are short, so a clip beyond them cannot help."
    )
    sources = MethodFourIsBest.sources

    def steps(self, at: Place) -> list[Step]:
        size: Sizes = at.size
        specs = (size.spec(BEST), *size.variants.values())
        return squad.warm_steps(size.squad, specs, size.budget)

    def measure(self, at: Place) -> Measured:
        size: Sizes = at.size
        specs = {f"clip {size.clip}": size.spec(BEST), **size.variants}
        trainings = {name: squad.warm(size.squad, spec, size.budget) for name, spec in specs.items()}
        found = {name: squad.only(squad.scores(at, training)) for name, training in trainings.items()}
        counts = {name: squad.parameters(at, training) for name, training in trainings.items()}
        return small_tables(found, counts, size.clip, short=self.short, shared=self.shared)


# ---- GLUE -----------------------------------------------------------------------------------------


class CompetitiveOnGlue(Claim):
    """Fine-tunes the fitted methods and the original on tasks of GLUE; the gains are paired by seed.

    Competitive means: over the tasks, method 4 loses less than 1 point on average, about the spread between seeds of
    such tasks. Methods 1 to 3 and the single tasks are reported. Models that learned nothing are all competitive, so
    only tasks count that the original learned, and there must be two of them.
    """

    id = "C4"
    says = "On GLUE the relative methods are competitive with absolute embeddings"
    place = "the GLUE experiment"
    quantity = "Score of a method minus that of the original, averaged over the tasks that it learned, in points"
    over = "Mean score of method 4 minus that of the original"
    learned = "Number of tasks that the original learned, minus 1"
    criteria = (Criterion(over, NotWorse(1.0)), glue.enough_learned(learned))
    limits = (
        "Some of GLUE's tasks, with short inputs that depend little on positions. The model was pretrained with "
        "absolute positions, and the methods are fitted to it without training."
    )
    sources = ("encoder", "wikitext", "glue:CoLA", "glue:SST-2", "glue:MRPC", "glue:STS-B", "glue:RTE")

    def steps(self, at: Place) -> list[Step]:
        size: Sizes = at.size
        found: list[Step] = [glue.guessing(task, size.glue) for task in size.glue.tasks]
        found += [glue.training(task, glue.NATIVE, size.glue) for task in size.glue.tasks]
        for method in size.methods:
            arm = glue.Arm(size.spec(method), fitted=True)
            found.append(glue.fitting(arm.scheme))
            found += [glue.training(task, arm, size.glue, seeds=size.glue_seeds) for task in size.glue.tasks]
        return found

    def measure(self, at: Place) -> Measured:
        size: Sizes = at.size
        original = glue.scores(at, size.glue, glue.NATIVE)
        found = {m: glue.scores(at, size.glue, glue.Arm(size.spec(m), fitted=True)) for m in size.methods}
        tasks = glue.learned_tasks(at, size.glue, original)
        result = against_original(found, original, tasks, over=self.over)
        return replace(result, parts=[*result.parts, glue.learned_part(self.learned, tasks)])


# ---- a pretrained model ---------------------------------------------------------------------------


class NearDropIn(Claim):
    """Gives the pretrained model each method, with growing budgets, and measures what it keeps of two scores.

    STS-B compares short sentences, which need few positions. Retrieval reads 256 tokens at once and is the harder test;
    its texts are never trained on. The criteria are for method 4 after the small budget: 97 % of STS-B and 90 % of
    retrieval. Below that a user would notice. We read a part of the meetings, and of each a part of its chunks, both
    evenly spaced: every model reads the same ones, and the score is a ratio to the original's on the same texts.
    """

    id = "C5"
    says = "Method 4 is nearly a drop-in replacement in a pretrained model, after little more training"
    place = "the experiment that starts from a large pretrained model"
    quantity = "Score after adaptation divided by that of the original, on STS-B and on the retrieval of meetings"
    sts = "Share of the STS-B score that method 4 keeps after the small budget, minus 0.97"
    retrieval = "Share of the retrieval score that method 4 keeps after the small budget, minus 0.9"
    criteria = (Criterion(sts, Larger(0.0)), Criterion(retrieval, Larger(0.0)))
    limits = (
        "A small sentence encoder in place of BERT-large, distilled from its original on prose instead of pretrained "
        "further, and no score on SQuAD. The seeds are those of the fit and of the adaptation; the tests are fixed."
    )
    sources = ("encoder", "wikitext", "glue:STS-B", "qmsum")

    def steps(self, at: Place) -> list[Step]:
        found: list[Step] = [_similarity(at, None), _retrieval(at, None)]
        for model in _models(at):
            found += [model.step, _similarity(at, model), _retrieval(at, model)]
        return found

    def measure(self, at: Place) -> Measured:
        size: Sizes = at.size
        scored = (("STS-B", _similarity, "correlation"), ("retrieval", _retrieval, "ndcg"))
        rows = []
        for model in _models(at):
            for test, step, number in scored:
                found, original = (at.measured(step(at, each).name)[number] for each in (model, None))
                rows.append(Kept(model.method, model.budget, model.seed, test, found, original))
        asks = {"STS-B": (self.sts, 0.97), "retrieval": (self.retrieval, 0.9)}
        return kept_of_original(rows, size.budget, asks)


@dataclass(frozen=True)
class Swapped:
    """A model with another scheme: its method, steps of adaptation and seed."""

    method: str
    spec: str
    budget: int
    seed: int

    @property
    def step(self) -> Step:
        """The step that makes it."""
        return squad.adapted(self.spec, self.budget, self.seed)

    @property
    def name(self) -> str:
        """Its name in those of steps."""
        return f"{slug(self.spec)}-{self.budget}steps-s{self.seed}"


def _models(at: Place) -> list[Swapped]:
    """All methods with all budgets and seed 0, and method 4 with the small budget and further seeds."""
    size: Sizes = at.size
    budgets = (size.budget, 0, *size.longer)
    every = [Swapped(method, size.spec(method), steps, 0) for method in size.methods for steps in budgets]
    return [*every, *(Swapped(BEST, size.spec(BEST), size.budget, seed) for seed in range(1, size.adapted_seeds))]


def _similarity(at: Place, model: Swapped | None) -> Measuring:
    """STS-B of a model; of the original if it is None."""
    name, read = ("original", ENCODER) if model is None else (model.name, made(model.step.name))
    task = Similarity(read, ENCODER, source("glue:STS-B"))
    return Measuring(f"huang-similarity-{name}", task, task.cost)


def _retrieval(at: Place, model: Swapped | None) -> Measuring:
    """Retrieval of meetings, in the same way."""
    size: Sizes = at.size
    name, read = ("original", ENCODER) if model is None else (model.name, made(model.step.name))
    task = Retrieval(read, ENCODER, source("qmsum"), size.meetings, size.chunk, size.chunks)
    return Measuring(f"huang-retrieval-{name}", task, task.cost)


# ---- what method 4 is, and what it learns ---------------------------------------------------------


class GeneralisesAbsolute(Claim):
    """Computes attention with method 4 and with absolute embeddings from the same random numbers, in double precision.

    Three identities hold. Method 4 is attention over q + a and k + a minus a·a, with a vector per pair in place of one
    per position: this is the paper's sense. With coordinates of their own for q·p_j and k·p_i and a table over pairs
    (here: a table over offsets for each query) it is absolute attention itself. With one table over offsets it is
    absolute attention if all rows are equal. The derivation is in absolute.py. The controls change one term each and
    must differ.
    """

    id = "C6"
    says = "Method 4 generalises absolute position embeddings: with a vector per pair it contains them"
    place = "the definition of method 4"
    quantity = "Largest difference between two attention outputs that should be equal"
    same = "Largest difference of method 4 to the attention that it should equal"
    control = "Largest difference of controls that should differ"
    criteria = (Criterion(same, Exact(1e-12)), Criterion(control, Larger(0.01, seeds=1)))
    limits = (
        "One table over offsets, as method 4 is trained, does not contain absolute embeddings whose rows differ: it "
        "matches the row of one query at a time, and the control with one table for all queries fails. Nor does it "
        "without coordinates of their own for the two terms: one vector cannot be p_j for the query and p_i for the "
        "key."
    )

    def steps(self, at: Place) -> list[Step]:
        return []

    def measure(self, at: Place) -> Measured:
        x = absolute.Inputs.random()
        found = {
            "absolute embeddings, a table for each query": (self.same, absolute.by_query(x)),
            "(q + a)·(k + a) − a·a": (self.same, absolute.as_written(x)),
            "one table, absolute rows all equal": (self.same, absolute.equal_rows(x)),
            "control: a·a not taken away": (self.control, absolute.as_written(x, minus_square=False)),
            "control: the table of the first query for all": (self.control, absolute.by_query(x, table_of=0)),
        }
        parts = [Part(asks, name, known(value)) for name, (asks, value) in found.items()]
        table = Table(("case", "largest difference"), [(name, value) for name, (_, value) in found.items()])
        sentences = [f"{name}: {value:.2g}." for name, (_, value) in found.items()]
        return Measured(parts, {"differences": table}, sentences)


class LearnedOffsets(Claim):
    """Draws the paper's figures from models that were adapted to method 4, and asks what they must show.

    The figures show weights by offset and attention near the diagonal. If method 4 learns positions, near offsets have
    vectors that differ from the far ones more than in its random start (the contrast of offsets.py, 1 in a random
    table; 0.5 more is half again as large). And the first layer attends to near tokens more than equal weights would;
    a tenth of the weight is an effect that one can see in the figure. Each seed is a fit and an adaptation of its own.
    """

    id = "C7"
    says = "The learned vectors depend on the offset, and attention is concentrated near the diagonal"
    place = "the figures of embeddings and attention weights"
    quantity = "Contrast between vectors at near and far offsets; share of attention on near tokens above equal weights"
    learned = "Contrast of the first layer's vectors after training minus before"
    near = "Share of the first layer's attention within 8 tokens, minus that of equal weights"
    criteria = (Criterion(learned, Larger(0.5)), Criterion(near, Larger(0.1)))
    limits = (
        "The models imitate one original, so its own preference for near tokens is part of the result; the seeds "
        "differ in the fit and the training, not in the original. The paper gives no numbers for its figures."
    )
    sources = ("encoder", "wikitext")

    def steps(self, at: Place) -> list[Step]:
        size: Sizes = at.size
        found: list[Step] = []
        for seed in range(size.adapted_seeds):
            found += [squad.adapted(size.spec(BEST), size.budget, seed), _offsets(at, seed)]
        return [*found, glue.fitting(size.spec("huang2")), _tables(at)]

    def measure(self, at: Place) -> Measured:
        found = [at.measured(_offsets(at, seed).name) for seed in range(at.size.adapted_seeds)]
        contrasts = [x["contrast"]["trained"] - x["contrast"]["initial"] for x in found]
        parts = [
            Part(self.learned, "first layer", estimate(contrasts)),
            Part(self.near, "first layer, mean of the heads", estimate([x["nearness"] for x in found])),
        ]
        sentences = [f"{part.asks}: {spell(part.effect)}." for part in parts]
        return Measured(parts, pictures(found[0], at.measured(_tables(at).name)), sentences)


def _offsets(at: Place, seed: int) -> Measuring:
    size: Sizes = at.size
    spec = size.spec(BEST)
    task = Offsets(made(squad.adapted(spec, size.budget, seed).name), ENCODER, TEXT, spec, seed)
    return Measuring(f"huang-offsets-s{seed}", task, task.cost)


def _tables(at: Place) -> Measuring:
    task = Tables(ENCODER, made(glue.fitting(at.size.spec("huang2")).name))
    return Measuring("huang-tables", task, task.cost)


PAPER = Paper(
    "huang",
    "Improve Transformer Models with Better Relative Position Embeddings",
    "Huang, Liang, Xu & Xiang 2020, arXiv 2009.13658",
    (
        MethodFourIsBest(), RobustPastTheTrainedLength(), ClipAndSharing(), CompetitiveOnGlue(), NearDropIn(),
        GeneralisesAbsolute(), LearnedOffsets(),
    ),
    SIZES,
)  # fmt: skip
