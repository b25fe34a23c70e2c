"""Draws cases. A case depends on the seed and its index alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from reliability.fuzz.case import Case
from reliability.fuzz.inputs import LAYOUTS, MASK_KINDS, POSITIONS, REPEATING, SINKS, in_step
from reliability.fuzz.refusals import EXPECTED, widens
from reliability.fuzz.specs import NEEDS_EVEN_HEADS, NEW, Size, add_maps, draw_names, spell

IMPLS = {"fused": 40, "auto": 27, "sdpa": 17, "eager": 15, "flex": 1}
"""How often each back end is drawn. FlexAttention takes a third of a second a call on a CPU, so it is rare."""
DTYPES = {"float32": 55, "bfloat16": 20, "float16": 8, "float64": 17}
CONTEXTS = {
    "plain": 62, "no_grad": 15, "inference": 6, "autocast": 6, "thread": 3, "vmap": 3, "vjp": 2.5, "jvp": 2.5,
}  # fmt: skip
"""`plain` is a call with gradients enabled, in the main thread."""
BEFORE = {
    "nothing": 60, "same": 8, "shorter": 8, "steps": 8, "copy": 6, "data": 5, "rest": 5,
}  # fmt: skip
MASKS = ("BK", "QK", "1K", "B11K", "11QK", "B1QK", "BHQK", "1H1K", "BH1K", "1HQK", "1111", "BHQ1", "B1Q1")
POS_SHAPES = ("L", "1L", "BL", "expanded", "strided", "reversed")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")

RARE = 0.05  # chance of anything that most calls do not do


def draw(seed: int, index: int, new: bool = False) -> Case:
    """Case number `index` of a seed; with `new`, of those that have a scheme of 2025–26 or a map."""
    attempt = 0
    while True:
        case = _draw(Random(f"{seed}/{index}/{attempt}" if attempt else f"{seed}/{index}"))
        if not new or "@" in case.spec or any(name in NEW for name in case.scheme_names):
            return case
        attempt += 1


def _draw(rng: Random) -> Case:
    case = _sizes(rng)
    case = replace(case, **_scheme(rng, case), data=rng.getrandbits(48))
    case = replace(case, **_dtypes(rng), **_layouts(rng), **_mask(rng), **_positions(rng, case), **_options(rng, case))
    case = replace(case, **_context(rng, case))
    for _ in range(8):  # a back end that cannot compute the case is mostly drawn again
        case = replace(case, impl=_weighted(rng, IMPLS))
        if case.impl == "flex" and rng.random() > RARE:  # forward only on CPUs
            case = replace(case, context="no_grad", wanted="", need_weights=False, dropout=0.0)
        if not any(expected.applies(case) for expected in EXPECTED) or rng.random() < RARE:
            break
    return _consistent(case)


def _weighted(rng: Random, weights: dict[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _length(rng: Random) -> int:
    share = rng.random()
    if share < 0.93:
        return rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 20, 24])
    if share < 0.985:
        return rng.choice([31, 32, 33, 47, 48, 49, 63, 64, 65])
    return rng.choice([127, 128, 129, 130, 191, 255, 256, 257, 300])


def _sizes(rng: Random) -> Case:
    lk = _length(rng)
    lq = lk if rng.random() < 0.5 else 1 if rng.random() < 0.3 else _length(rng)
    small = max(lq, lk) > 100
    d = rng.choice([1, 2, 3, 4, 8] if small else [1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 17, 24, 32, 33])
    dv = d if rng.random() < 0.7 else rng.choice([1, 2, 3, 8, 9, 16, 20])
    if rng.random() < 0.005:
        lq = 0
    return Case(
        b=0 if rng.random() < 0.005 else rng.choice([1, 1, 2] if small else [1, 1, 2, 2, 3, 4]),
        kv=rng.choice([1, 2] if small else [1, 1, 2, 2, 3, 4]),
        groups=rng.choice([1, 1, 1, 2] if small else [1, 1, 1, 2, 3]),
        lq=lq,
        lk=lk,
        d=d,
        dv=dv,
    )


def _scheme(rng: Random, case: Case) -> dict[str, object]:
    names = draw_names(rng)
    even = case.d % 2 and any(name in NEEDS_EVEN_HEADS for name in names)
    d = case.d + 1 if even else case.d
    size = Size(case.h, d, case.groups)
    spec = "+".join(add_maps([spell(name, rng, size) for name in names], rng))
    own_values = "values=true" in spec and rng.random() > RARE  # Shaw's value vectors have the head size
    return {"spec": spec, "d": d, "dv": d if own_values or case.dv == case.d else case.dv}


def _dtypes(rng: Random) -> dict[str, object]:
    dtype = _weighted(rng, DTYPES)
    own = dtype if rng.random() < 0.5 else "float32"
    return {"dtype": dtype, "parameters": own if rng.random() < 0.8 else _weighted(rng, DTYPES)}


def _layouts(rng: Random) -> dict[str, object]:
    def layout() -> str:
        return "plain" if rng.random() < 0.4 else rng.choice(list(LAYOUTS))

    return {name: layout() for name in ("q_layout", "k_layout", "v_layout", "grad_layout")}


def _mask(rng: Random) -> dict[str, object]:
    if rng.random() < 0.45:
        return {}
    return {
        "mask": rng.choice(MASKS),
        "mask_kind": rng.choice(list(MASK_KINDS)),
        "mask_layout": rng.choice(["plain", "plain", "expanded", "strided", "transposed"]),
    }


def _positions(rng: Random, case: Case) -> dict[str, object]:
    if rng.random() < 0.35 and (case.lq <= case.lk or rng.random() < RARE):
        return {}
    given = rng.choice(["both", "both", "both", "q", "k"])
    if (given == "q" and case.lq != case.lk) or (given == "k" and case.lq > case.lk):
        given = given if rng.random() < RARE else "both"
    return {
        "positions": rng.choice(list(POSITIONS)),
        "given": given,
        "pos_shape": rng.choice(POS_SHAPES),
        "pos_dtype": rng.choice(INTEGERS),
    }


def _options(rng: Random, case: Case) -> dict[str, object]:
    return {
        "causal": rng.random() < (1 - RARE if case.causal_only else 0.45),
        "scale": None if rng.random() < 0.7 else rng.choice([0.1, 0.35, 1.0, -0.5, 0.0, 2.0]),
        "need_weights": rng.random() < 0.1,
        "dropout": rng.choice([0.1, 0.5, 0.9]) if rng.random() < 0.06 else 0.0,
        "softcap": rng.choice([0.3, 1.0, 2.0, 5.0, 30.0, 50.0]) if rng.random() < 0.2 else None,
        "sinks": rng.choice(list(SINKS)) if rng.random() < 0.2 else "none",
        "size": rng.choice([1.0, 1.0, 1.0, 0.2, 3.0]),
        "slices": rng.random() < RARE,
        "window": _window(rng) if rng.random() < 0.2 else None,
        "additive": rng.choice(["BHQK", "11QK", "B11K", "1H1K"]) if rng.random() < 0.1 else "none",
    }


def _window(rng: Random) -> tuple[int | None, int | None]:
    """Narrow, wide, or open on a side."""
    left, right = (rng.choice([None, 0, 1, 3, 20, 127, 128, 200]) for _ in range(2))
    return left, right


def _context(rng: Random, case: Case) -> dict[str, object]:
    context, before = _weighted(rng, CONTEXTS), _weighted(rng, BEFORE)
    if before != "nothing" and rng.random() < 0.5:  # tables are cached while gradients are disabled
        context = "no_grad"
    wanted = "qkvpsx" if rng.random() < 0.7 else "".join(x for x in "qkvpsx" if rng.random() < 0.5)
    states = "pair"
    if case.reads and (in_step(case) or rng.random() < RARE):  # one tensor is for queries that are the last keys
        states = rng.choice(["pair", "keys"] if "k" in case.reads else ["pair", "keys", "queries"])
    return {"context": context, "wanted": wanted, "before": before, "states": states}


def _consistent(case: Case) -> Case:
    """The case without choices that do not go together."""
    if case.context in ("no_grad", "inference"):
        case = replace(case, wanted="")
    if case.context == "vmap" and widens(case, "float64"):  # positions cannot be read there, so it is not refused
        case = replace(case, context="plain")
    if case.context == "vmap" and case.reads:  # the order of tokens, and whether x fits, are not known there
        case = replace(case, context="plain")
    if case.causal_only and not case.causal:  # whether a mask is causal is not known beforehand
        case = replace(case, mask="none", context="plain" if case.context == "vmap" else case.context)
    if not case.reads:
        case = replace(case, wanted=case.wanted.replace("x", ""))
    if case.sinks == "none":
        case = replace(case, wanted=case.wanted.replace("s", ""))
    if case.context == "vmap":  # which would need a rule for every shape
        case = replace(case, additive="none")
    if case.context in ("vmap", "vjp", "jvp"):
        trained = "p" if "p" in case.wanted else ""  # parameters that require gradients, as those of a model do
        case = replace(case, wanted=trained, dropout=0.0, before="nothing")
    if case.context == "jvp":
        layouts = {name: getattr(case, name) for name in ("q_layout", "k_layout", "v_layout")}
        case = replace(case, **{name: "plain" for name, layout in layouts.items() if layout in REPEATING})
    if case.context == "thread" or case.lq == 0 or case.b == 0:
        case = replace(case, dropout=0.0)
    if "values=true" in case.spec and (case.impl == "auto" or case.slices):  # what is dropped cannot be observed
        case = replace(case, dropout=0.0)
    return case
