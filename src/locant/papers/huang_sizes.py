"""The arms and the sizes of the experiments on Huang et al. 2020."""

from __future__ import annotations

from dataclasses import dataclass

from locant.papers import glue
from locant.papers.glue import GlueSizes
from locant.papers.squad import SquadSizes

ABSOLUTE = "absolute"
BEST = "huang4"
WORDS = {
    ABSOLUTE: "absolute (the model's own)",
    "sinusoidal": "sinusoidal",
    "shaw": "Shaw",
    "xl": "XLNet",
    "huang1": "method 1",
    "huang2": "method 2",
    "huang3": "method 3",
    BEST: "method 4",
}
"""Arms by name, and what a reader calls them."""
CLIPPED = ("shaw", "huang1", "huang2", "huang3", BEST)
"""Arms whose table ends at a clip."""
SINES = "sinusoidal:amplitude=0.035"
"""Sines as long as the rows of MiniLM's position table, whose root mean square is 0.025. With amplitude 1 they would be
13 times as long as the token embeddings."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiments. `small` takes about five hours on two cores, by this arithmetic (seconds of two cores):

    SQuAD      A run of 300 steps takes 300 · 0.9 s of one core, its test of 300 questions at four lengths about 80 s.
               The original and 10 warm arms with 4 seeds are 44 runs, 7 cold arms with 3 seeds are 21: 11,400 s.
    GLUE       A seed costs 270 s of one core: 4 methods with 4 seeds, and the original with 5, which A5 shares:
               2,800 s.
    adapting   Fit 45 s, agreement in four states 30 s, 5 s a step: 12 arms and seeds of 30 steps and 4 of
               90 take 4,800 s on one core, about 3,700 s on two. With fewer steps an adaptation is worse than its fit.
    retrieval  60 meetings of 4,096 tokens and their queries, 110 to 130 s a model on one core: 15 models take about
               1,500 s.
    """

    squad: SquadSizes
    glue: GlueSizes
    glue_seeds: int  # of each method; the original has those of `glue`
    arms: tuple[str, ...]  # that are trained, besides the original; names of WORDS
    clip: int  # largest offset with a row of its own
    clips: tuple[int, ...]  # further clips of method 4 (C3)
    budget: int  # steps of adaptation of warm arms: the small budget of C5
    longer: tuple[int, ...]  # further budgets of C5
    adapted_seeds: int  # adaptations of method 4 with the small budget
    meetings: int  # of the retrieval test, evenly spaced over its 197; 0 for all
    chunks: int  # most chunks that it reads of a meeting, evenly spaced; 0 for all
    chunk: int = 256  # tokens that it reads at once
    encoder: str = "minilm"  # the pretrained model, a name of `sources.SOURCES`

    @property
    def methods(self) -> tuple[str, ...]:
        """The arms that are methods of the paper."""
        return tuple(arm for arm in self.arms if arm.startswith("huang"))

    def spec(self, arm: str) -> str:
        """Returns the scheme of an arm."""
        if arm == "sinusoidal":
            return SINES
        return f"{arm}:clip={self.clip}" if arm in CLIPPED else arm

    @property
    def variants(self) -> dict[str, str]:
        """Method 4 with other clips, and with a table per head: name -> scheme."""
        clips = {f"clip {clip}": f"{BEST}:clip={clip}" for clip in self.clips}
        return {**clips, "own tables": f"{BEST}:clip={self.clip},heads=own"}


ALL = tuple(name for name in WORDS if name != ABSOLUTE)
SIZES = {
    "quick": Sizes(
        squad=SquadSizes(seeds=2, cold_seeds=1, steps=12, batch=8, rate=2e-4, length=64, longest=4, also=192,
                         questions=30),
        glue=glue.GLUE_SIZES["quick"], glue_seeds=2, arms=("shaw", BEST), clip=64, clips=(8,), budget=2, longer=(),
        adapted_seeds=2, meetings=12, chunks=4,
    ),
    "small": Sizes(
        squad=SquadSizes(seeds=4, cold_seeds=3, steps=300, batch=16, rate=4e-4, length=128, longest=4, also=384,
                         questions=300),
        glue=glue.GLUE_SIZES["small"], glue_seeds=4, arms=ALL, clip=64, clips=(8, 128), budget=30, longer=(90,),
        adapted_seeds=3, meetings=60, chunks=16,
    ),
    # Fine-tuning as the paper: 3e-5, batch 48, two epochs. Warm starts instead of its pre-training.
    "paper": Sizes(
        squad=SquadSizes(seeds=5, cold_seeds=5, steps=3650, batch=48, rate=3e-5, length=128, longest=4, also=384,
                         questions=0),
        glue=glue.GLUE_SIZES["paper"], glue_seeds=5, arms=ALL, clip=64, clips=(8, 16, 32, 128), budget=500,
        longer=(2000, 10_000), adapted_seeds=5, meetings=0, chunks=0, encoder="bert",
    ),
}  # fmt: skip
