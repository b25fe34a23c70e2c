"""Wennberg & Henter 2021: position tables are nearly translation-invariant, so attention should be so by construction.

A1, A2   position tables of trained models, measured           position_tables.py
A3, A4   language models with a table, trained here            small_models.py, table_training.py
A5       GLUE: MiniLM, and an ALBERT shape trained here        glue.py, albert_glue.py
A6       positional parameters                                 position_counts.py
A7       TISA past its trained length                          longer_inputs.py
A8       its curves                                            head_kinds.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from locant.papers import albert_glue, glue, head_kinds, longer_inputs, table_training
from locant.papers.albert_glue import AlbertSizes
from locant.papers.claim import Claim, Measured, Paper, Part, Table
from locant.papers.effects import known
from locant.papers.glue import Arm, GlueSizes
from locant.papers.place import Place
from locant.papers.position_counts import count_parameters
from locant.papers.position_tables import heads_found, measure_tables, tables_found
from locant.papers.rules import Criterion, Larger, NotWorse
from locant.papers.small_models import (
    EXTRAPOLATING,
    TISA,
    Shape,
    extrapolation,
    longest_runs,
    masked_models,
    table_models,
)
from locant.papers.steps import Measuring, Step
from locant.papers.table_training import TrainedTable


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiments.

    `small`, in core-seconds: A1 and A2 100; A3 and A4 36 models, 2,100 steps · 4 seeds · (0.08 + 0.16 + 0.24 s) = 4,000
    and 500 for the masked ones; A5 MiniLM 6 arms · 5 seeds · 270 s = 8,100, ALBERT 9 models · 2,000
    steps · 0.35 s = 6,300 and 54 fine-tunings of 45 s = 2,400; A7 and A8 5 arms · 4 seeds · 1,000 steps · 0.18 s =
    3,600. Together 30,000: 4.2 hours on two cores.
    """

    samples: int  # random tables of the control
    # language models of A3, A4, A7 and A8
    task: str  # clm, or mlm: see `language`
    shapes: tuple[Shape, ...]  # of A3 and A4
    budgets: tuple[int, ...]  # training steps in A3 and A4; the longest one is that of A3
    seeds: int
    masked_seeds: int  # masked models that A3 shows beside causal ones
    length: int  # tokens of a sequence
    batch: int  # sequences per step
    vocabulary: int
    rate: float  # peak learning rate
    evaluated: int  # test tokens
    # A7 and A8
    extrapolating: Shape
    extrapolating_steps: int
    longest: int  # longest test inputs, as a multiple of the trained length
    # A5
    glue: GlueSizes
    albert: AlbertSizes
    encoder: str = "minilm"  # the pretrained model of A5, a name of `sources.SOURCES`


class Tables(Claim):
    """Every learned table in the data folder gets its Toeplitz R², and so do random tables with the same row norms.

    The main diagonal is left out: it holds the norms, and it alone makes a random table score high. The interval of a
    table leaves out blocks of neighbouring positions; the bounds of the effect take the worse bound of the control.
    """

    id = "A1"
    says = "Position tables that were learned in pre-training are translation-invariant to a large part."
    place = "the analysis of existing models"
    quantity = "Toeplitz R² of E Eᵀ without its diagonal, minus that of random rows of equal norms (0 to 1)"
    # 0.25 is the lowest R² in our reading of the authors' own heat maps.
    criteria = (
        Criterion("Mean over the tables of R² minus control", Larger(0.25)),
        Criterion("R² of each table minus control", Larger(0.25), share=0.75),
    )
    limits = (
        "The tables are those of models that share recipes and sometimes ancestors, so they are not independent. Rows "
        "of positions that a model never saw in training count as well and lower R². The tables had been measured once "
        "before the thresholds were written down, so this verdict is not blind."
    )
    sources = ("tables",)

    def steps(self, at: Place) -> list[Step]:
        return [TABLES]

    def measure(self, at: Place) -> Measured:
        return tables_found(at.measured(TABLES.name), *(criterion.asks for criterion in self.criteria))


class Heads(Claim):
    """The logits that the first layer computes from the table alone, E W_Q W_Kᵀ Eᵀ, get their R² per head.

    The control sends random tables with the same row norms through the same weights. As in the paper there is no layer
    norm; a column of the table has R² with it. The interval is over heads.
    """

    id = "A2"
    says = "The effect of these tables on the attention of the first layer is translation-invariant as well."
    place = "the analysis of existing models"
    quantity = "Toeplitz R² of E W_Q W_Kᵀ Eᵀ per head, minus that of random rows of equal norms (0 to 1)"
    # The same threshold as for the tables: the effect of a table should be no less invariant than the table itself.
    criteria = (
        Criterion("Mean over all heads of R² minus control", Larger(0.25)),
        Criterion("Mean over the heads of each model of R² minus control", Larger(0.25), share=2 / 3),
    )
    limits = (
        "Few models, and the first layer only: deeper layers receive no bare table. The real input of the layer is the "
        "norm of a sum of token and position; its mixed terms are not measured. As in A1, the heads had been measured "
        "once before the thresholds were written down."
    )
    sources = ("tables",)

    def steps(self, at: Place) -> list[Step]:
        return [TABLES]

    def measure(self, at: Place) -> Measured:
        return heads_found(at.measured(TABLES.name), *(criterion.asks for criterion in self.criteria))


TABLES = Measuring("tisa-tables", measure_tables, lambda at: at.size.samples * 12 * 36 * 2e8)
COUNTS = Measuring("tisa-counts", count_parameters, lambda at: 1e11)


class RisesInTraining(Claim):
    """Language models with a fresh table log R² a hundred times while they train. A fresh table is noise.

    The rise is the mean over the last tenth of the logged steps minus that over the first tenth, with an interval over
    models (shapes and seeds). The trend is Spearman's correlation of R² with the step. Where the models are causal, a
    few masked ones are shown beside them; they decide nothing.
    """

    id = "A3"
    says = "Translation invariance of the position table rises during training."
    place = "the analysis of existing models"
    quantity = "change of R² of E Eᵀ without its diagonal, from the first tenth of training to the last (0 to 1)"
    # A random table of n positions has R² = 2/n, 0.03 for 64: a rise below 0.05 could hardly be seen in its heat map.
    criteria = (
        Criterion("R² at the end minus R² at the start", Larger(0.05)),
        Criterion("Rank correlation of R² with the step", Larger(0.5)),
    )
    limits = (
        "Models of at most a few million parameters, on a text of two million words, and causal ones in the smaller "
        "presets. The paper looks at finished masked models of a hundred times the size. Short trials of masked models "
        "showed no rise; causal ones were chosen because an earlier comparison had shown one, so this verdict is not "
        "blind. The masked runs that are shown are the check."
    )
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        longest = [step for (_, steps), step in table_models(at).items() if steps == max(at.size.budgets)]
        return [*longest, *masked_models(at)]

    def measure(self, at: Place) -> Measured:
        beside = [
            (f"masked, {at.size.extrapolating.name}", run) for step in masked_models(at) for run in step.results(at)
        ]
        return table_training.rise(longest_runs(at), beside, *(criterion.asks for criterion in self.criteria))


class GoesWithPerformance(Claim):
    """Models of several sizes, budgets and seeds: do those with a more invariant table have a lower test loss?

    The correlation over all models decides, because the claim is about finished models that differ in everything. It
    would also be positive if both only followed training time, so a second table, which decides nothing, has the
    correlation inside groups of one size and one budget, and a third that along the steps of each longest run.
    """

    id = "A4"
    says = "Models whose position table is more translation-invariant perform better."
    place = "the analysis of existing models"
    quantity = "Spearman's correlation of R² with minus the test loss over models (−1 to 1)"
    # 0.3 explains a tenth of the variance of the ranks. A bootstrap over fewer than six groups has no honest interval.
    criteria = (Criterion("Rank correlation of R² with minus the loss, over models", Larger(0.3, seeds=6)),)
    limits = (
        "A correlation, not a cause: size and budget move both. Performance is the test loss of language "
        "modelling; the paper compares scores on downstream tasks."
    )
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        return list(table_models(at).values())

    def measure(self, at: Place) -> Measured:
        models = [
            TrainedTable(shape.name, steps, run.run.seed, table_training.start_and_end(run)[1], score)
            for (shape, steps), training in table_models(at).items()
            for run in training.results(at)
            if (score := run.score("loss")) is not None
        ]
        return table_training.performance(models, longest_runs(at), self.criteria[0].asks)


WITH_TISA = tuple(Arm(f"native+tisa:kernels={kernels}") for kernels in (1, 3, 5))
ALONE, ALONE_FITTED = Arm(TISA), Arm(TISA, fitted=True)
ARMS = (glue.NATIVE, *WITH_TISA, ALONE, ALONE_FITTED)


class ImprovesGlue(Claim):
    """Fine-tuning on GLUE with the table, with TISA beside the table, and with TISA in its place.

    The pretrained encoder (MiniLM; BERT-base at the preset paper) is a finished model, so TISA is new to it, as in the
    paper's experiment. The ALBERT shape is pretrained here from scratch with each arm. The arm that decides is the
    table with TISA of five kernels; it was chosen beforehand. The gain of a seed is averaged over the tasks first, so
    that no task counts more because it is noisier.
    """

    id = "A5"
    says = "TISA improves a pretrained model of the BERT family on GLUE, beside the position table and in its place."
    place = "the GLUE experiment"
    quantity = "gain over the model with its table, mean over the tasks (points of the GLUE score)"
    # Half a point is about the gain for which GLUE papers report a new method. TISA alone may lose a point at most.
    criteria = (
        Criterion("Pretrained encoder: table and TISA(5) against the table", Larger(0.5)),
        Criterion("ALBERT shape: table and TISA(5) against the table", Larger(0.5)),
        Criterion("ALBERT shape: TISA(5) alone against the table", NotWorse(1.0)),
        glue.enough_learned("Pretrained encoder: number of tasks that it learned with the table, minus 1"),
        glue.enough_learned("ALBERT shape: number of tasks that it learned with the table, minus 1"),
    )
    limits = (
        "Not the paper's model, ALBERT-base-v2. The pretrained encoder is fine-tuned on a part of each task, and the "
        "ALBERT shape is a thousandth of the size and saw a few million tokens."
    )
    sources = ("encoder", "wikitext", "books", "glue:CoLA", "glue:SST-2", "glue:MRPC", "glue:STS-B", "glue:RTE")

    def steps(self, at: Place) -> list[Step]:
        return [*glue.steps_of(at.size.glue, ARMS), *albert_glue.steps_of(at.size.albert)]

    def measure(self, at: Place) -> Measured:
        encoder = {arm.label: glue.scores(at, at.size.glue, arm) for arm in ARMS}
        albert = albert_glue.scores(at, at.size.albert)
        learned = (
            glue.learned_tasks(at, at.size.glue, encoder[glue.NATIVE.label]),
            glue.learned_tasks(at, at.size.albert.glue, albert[albert_glue.TABLE]),
        )
        return albert_glue.glue_gains(encoder, albert, learned, [criterion.asks for criterion in self.criteria])


class FewerParameters(Claim):
    """Counts: both base models are built, and TISA is put in the place of their table.

    ALBERT shares its layers, so TISA's kernels are shared as well; in BERT every layer has its own.
    """

    id = "A6"
    says = "TISA has orders of magnitude fewer positional parameters than a position table."
    place = "the description of the method and the GLUE experiment"
    quantity = "decimal logarithm of the parameters of the table over those of TISA"
    # "Orders" is a plural: two of them, a factor of 100.
    criteria = (Criterion("Orders of magnitude between table and TISA", Larger(2.0, seeds=1)),)
    limits = "A count says nothing about quality, and position tables are a small part of a model."

    def steps(self, at: Place) -> list[Step]:
        return [COUNTS]

    def measure(self, at: Place) -> Measured:
        found = at.measured(COUNTS.name)["rows"]
        ordered = sorted(found, key=lambda row: -row["kernels"])  # the headline has five kernels, as in A5
        parts = [
            Part(self.criteria[0].asks, f"{row['model']}, {row['kernels']} kernels",
                 known(math.log10(row["table"] / row["tisa"])))
            for row in ordered
        ]  # fmt: skip
        header = ("model", "kernels", "table", "TISA", "table / TISA")
        rows = [(row["model"], row["kernels"], row["table"], row["tisa"], row["table"] / row["tisa"]) for row in found]
        return Measured(
            parts,
            {"parameters": Table(header, rows)},
            [f"{row['model']}, {row['kernels']} kernels: {row['tisa']:,} against {row['table']:,}." for row in found],
        )


class AnyLength(Claim):
    """Language models are trained at one length and read the same test text in windows of up to eight times it.

    TISA must lose nothing there. A model that ignores positions loses nothing either, so TISA must also beat the model
    without positions at the trained length. The table cannot read longer inputs; other schemes are context.
    """

    id = "A7"
    says = "TISA is inductive: it reads sequences longer than those of its training."
    place = "the comparison of position schemes by their properties"
    quantity = "test loss at the trained length minus that at longer ones, per seed (nats per token)"
    # 0.05 nats are 5 % of perplexity; what 2 % of the training budget changes in such short runs.
    criteria = (
        Criterion("Loss at the trained length minus loss at longer lengths", NotWorse(0.05)),
        Criterion("Loss without positions minus loss with TISA, at the trained length", Larger(0.05)),
    )
    limits = (
        "Small models, short training and up to eight times the length. The test text is the same at every length, so "
        "the test shows that nothing breaks; not that distant context is used."
    )
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        return [extrapolation(at, scheme) for scheme in EXTRAPOLATING]

    def measure(self, at: Place) -> Measured:
        steps = {scheme: extrapolation(at, scheme) for scheme in EXTRAPOLATING}
        lengths = [at.size.length * 2**n for n in range(at.size.longest.bit_length())]
        scores = {
            length: {scheme: step.scores(at, length=length)[scheme] for scheme, step in steps.items()}
            for length in lengths
        }
        refused = {row["length"] for run in steps["native"].results(at) for row in run.tests if row["refused"]}
        found = longer_inputs.by_length(scores, [criterion.asks for criterion in self.criteria])
        said = f"The table cannot read {', '.join(map(str, sorted(refused)))} tokens." if refused else ""
        return Measured(found.parts, found.tables, [*found.sentences, *([said] if said else [])])


class InterpretableCurves(Claim):
    """Every head of the trained TISA models of A7 gets a label from its curve alone: local, global or between.

    The claim is that one can read off what a head does, and that heads differ: some attend near the query, others
    everywhere. So both kinds must occur. The control is the curves at initialisation, with the same seeds.
    """

    id = "A8"
    says = "The learned curves are interpretable: some heads are local, others global."
    place = "the discussion of the learned curves"
    quantity = "share of heads of the rarer kind, local or global, minus that at initialisation (0 to 1)"
    # A tenth of the heads: fewer than that are one head of twelve, which can be an accident.
    criteria = (Criterion("Share of the rarer kind, trained minus initial", Larger(0.1)),)
    limits = (
        "A label describes the bias, not the attention: content can outweigh it. Whether a person finds the curves "
        "readable is not measured."
    )
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        return [extrapolation(at, TISA), self._curves(at)]

    def _curves(self, at: Place) -> Measuring:
        runs = tuple(extrapolation(at, TISA).model_of(TISA, seed) for seed in range(at.size.seeds))
        work = head_kinds.TrainedCurves(runs, at.size.task == "clm")
        return Measuring("tisa-curves", work, work.cost)

    def measure(self, at: Place) -> Measured:
        shape, causal = at.size.extrapolating, at.size.task == "clm"
        found = at.measured(self._curves(at).name)["models"]
        trained = {seed: [head_kinds.HeadCurve(**head) for head in heads] for seed, heads in enumerate(found)}
        initial = {
            seed: head_kinds.initial_heads(TISA, shape.layers, shape.heads, -min(heads[0].r), seed, causal=causal)
            for seed, heads in trained.items()
        }
        return head_kinds.head_labels(trained, initial, self.criteria[0].asks)


SMALL_SHAPES = (Shape(2, 2, 64), Shape(3, 4, 96), Shape(4, 4, 128))

PAPER = Paper(
    "tisa",
    "The Case for Translation-Invariant Self-Attention in Transformer-Based Language Models",
    "Wennberg & Henter 2021, arXiv 2106.01950",
    claims=(
        Tables(), Heads(), RisesInTraining(), GoesWithPerformance(), ImprovesGlue(), FewerParameters(), AnyLength(),
        InterpretableCurves(),
    ),
    sizes={
        "quick": Sizes(
            samples=5, task="clm", shapes=SMALL_SHAPES[:2], budgets=(40, 120, 360), seeds=2, masked_seeds=0, length=64,
            batch=16, vocabulary=2048, rate=2e-3, evaluated=16_384,
            extrapolating=SMALL_SHAPES[1], extrapolating_steps=240, longest=8,
            glue=glue.GLUE_SIZES["quick"], albert=albert_glue.SIZES["quick"],
        ),
        "small": Sizes(
            samples=20, task="clm", shapes=SMALL_SHAPES, budgets=(150, 450, 1500), seeds=4, masked_seeds=2, length=64,
            batch=16, vocabulary=2048, rate=2e-3, evaluated=65_536,
            extrapolating=SMALL_SHAPES[1], extrapolating_steps=1000, longest=8,
            glue=glue.GLUE_SIZES["small"], albert=albert_glue.SIZES["small"],
        ),
        # BERT: 12 layers of 768, length 512; the paper itself trains no model from scratch.
        "paper": Sizes(
            samples=50, task="mlm", masked_seeds=0, shapes=(Shape(6, 6, 384), Shape(12, 12, 768)),
            budgets=(10_000, 30_000, 100_000), seeds=3,
            length=512, batch=32, vocabulary=30_000, rate=2e-4, evaluated=200_000, extrapolating=Shape(12, 12, 768),
            extrapolating_steps=50_000, longest=8, glue=glue.GLUE_SIZES["paper"], albert=albert_glue.SIZES["paper"],
            encoder="bert",
        ),
    },
)  # fmt: skip
