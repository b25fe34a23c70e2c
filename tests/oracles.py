"""Reference attention, one (batch row, head, query, key) at a time, written from the papers' equations.

Everything is float64 numpy with explicit loops: slow, and meant to be read. Nothing here is shared with the code under
test. Convention: the offset is r = key position - query position, and positions are arbitrary integers.

A scheme is a function (head, i, j) -> logit of query i against key j, before masking. Schemes with a value term also
have an entry in VALUES; schemes that add a vector to the token embeddings have a plain logit and one in EMBEDDINGS.
A sum of schemes is a list of `Part`s: `sum_logit` composes it from ROTATIONS, GAINS and what the others add.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Params = dict[str, Array]
Options = dict[str, Any]


@dataclass
class Head:
    """What one head of one batch row sees."""

    h: int
    n_heads: int
    q: Array  # [Lq, D]
    k: Array  # [Lk, D]
    v: Array  # [Lk, Dv]
    q_pos: Array  # [Lq] integers
    k_pos: Array  # [Lk] integers
    visible: Array  # [Lq, Lk] booleans
    scale: float
    params: Params
    options: Options

    def offset(self, i: int, j: int) -> int:
        """r = pos_j - pos_i."""
        return int(self.k_pos[j]) - int(self.q_pos[i])

    def row(self, name: str) -> Array:
        """This head's entry of a parameter whose leading axis is 1 (shared by the heads) or n_heads."""
        table = self.params[name]
        return np.asarray(table[0] if len(table) == 1 else table[self.h])


def dot(x: Array, y: Array) -> float:
    """sum_t x_t y_t."""
    return float(sum(x[t] * y[t] for t in range(len(x))))


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def clipped(r: int, clip: int) -> int:
    """Row of a table over the offsets -clip..clip: max(-clip, min(r, clip)) + clip."""
    return max(-clip, min(r, clip)) + clip


# --- no position, absolute positions ---------------------------------------------------------------------------------


def plain(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j."""
    return head.scale * dot(head.q[i], head.k[j])


def learned_embedding(params: Params, options: Options, d_model: int, p: int) -> Array:
    """e_p = table[p], for 0 <= p < length."""
    if p < 0:
        raise IndexError(f"no row for position {p}")
    return np.asarray(params["table"][p])


def first_embedding(params: Params, options: Options, d_model: int, p: int) -> Array:
    """e_0 = first, e_p = rest for every other p."""
    return np.asarray(params["first"] if p == 0 else params["rest"])


def sinusoidal_embedding(params: Params, options: Options, d_model: int, p: int) -> Array:
    """e_{p,2t} = amplitude sin(p theta^(-2t/d)), e_{p,2t+1} = amplitude cos(p theta^(-2t/d))  (Vaswani et al. 2017)."""
    e = np.zeros(d_model)
    for c in range(d_model):
        angle = p * options["theta"] ** (-2 * (c // 2) / d_model)
        e[c] = options["amplitude"] * (math.sin(angle) if c % 2 == 0 else math.cos(angle))
    return e


# --- relative vectors and gains --------------------------------------------------------------------------------------


def shaw(head: Head, i: int, j: int) -> float:
    """scale * q_i.(k_j + aK_r)  (Shaw et al. 2018)."""
    a = head.row("table")[clipped(head.offset(i, j), head.options["clip"])]
    return head.scale * dot(head.q[i], head.k[j] + a)


def shaw_value(head: Head, i: int, j: int) -> Array:
    """out_i = sum_j w_ij (v_j + aV_r): this is aV_r."""
    if not head.options["values"]:
        return np.zeros(head.v.shape[1])
    return np.asarray(head.row("value_table")[clipped(head.offset(i, j), head.options["clip"])])


def huang1(head: Head, i: int, j: int) -> float:
    """scale * (q_i.k_j) a_|r|  (Huang et al. 2020, method 1)."""
    a = head.row("table")[min(abs(head.offset(i, j)), head.options["clip"])]
    return head.scale * dot(head.q[i], head.k[j]) * float(a)


def huang2(head: Head, i: int, j: int) -> float:
    """scale * (q_i.k_j) a_r  (method 2)."""
    a = head.row("table")[clipped(head.offset(i, j), head.options["clip"])]
    return head.scale * dot(head.q[i], head.k[j]) * float(a)


def huang3(head: Head, i: int, j: int) -> float:
    """scale * sum_t q_it k_jt a_rt  (method 3)."""
    a = head.row("table")[clipped(head.offset(i, j), head.options["clip"])]
    return head.scale * dot(head.q[i] * head.k[j], a)


def huang4(head: Head, i: int, j: int) -> float:
    """scale * (q_i.k_j + q_i.a_r + k_j.a_r)  (method 4)."""
    a = head.row("table")[clipped(head.offset(i, j), head.options["clip"])]
    return head.scale * (dot(head.q[i], head.k[j]) + dot(head.q[i], a) + dot(head.k[j], a))


def xl(head: Head, i: int, j: int) -> float:
    """scale * ((q_i + u).k_j + (q_i + v).(W s(i - j))), s = [sin, cos]  (Dai et al. 2019)."""
    w, u, v = head.row("project"), head.row("content_bias"), head.row("position_bias")
    d_model = w.shape[1]
    angles = [-head.offset(i, j) * head.options["theta"] ** (-2 * t / d_model) for t in range(d_model // 2)]
    s = np.array([math.sin(x) for x in angles] + [math.cos(x) for x in angles])
    projected = np.array([dot(w[c], s) for c in range(len(w))])
    return head.scale * (dot(head.q[i] + u, head.k[j]) + dot(head.q[i] + v, projected))


def deberta_bucket(x: int, buckets: int, max_distance: int) -> int:
    """x if |x| <= m else sign(x) (ceil(ln(|x|/m) / ln((M-1)/m) (m-1)) + m), m = B//2, in float32  (He et al. 2021)."""
    mid = buckets // 2
    if abs(x) <= mid:
        return x
    ratio = np.log(np.float32(abs(x)) / np.float32(mid)) / np.log(np.float32((max_distance - 1) / mid))
    return int(math.copysign(np.ceil(ratio * np.float32(mid - 1)) + mid, x))


def deberta(head: Head, i: int, j: int) -> float:
    """scale * (q_i.k_j + q_i.K_b + k_j.Q_b), b = clamp(bucket(i - j) + B, 0, 2B - 1)  (He et al. 2021).

    Without logarithms the bucket is i - j. One of the two products may be left out."""
    buckets, products = head.options["buckets"], head.options["products"]
    b = -head.offset(i, j)
    if head.options["spacing"] == "log":
        b = deberta_bucket(b, buckets, head.options["max_distance"])
    b = max(0, min(b + buckets, 2 * buckets - 1))
    logit = dot(head.q[i], head.k[j])
    if products in ("both", "c2p"):
        logit += dot(head.q[i], head.row("key_table")[b])
    if products in ("both", "p2c"):
        logit += dot(head.k[j], head.row("query_table")[b])
    return head.scale * logit


# --- biases ----------------------------------------------------------------------------------------------------------


def tisa(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + sum_s a_s exp(-|b_s| (r - c_s)^2)  (Wennberg and Henter 2021)."""
    r = head.offset(i, j)
    kernels = zip(head.row("amplitude"), head.row("sharpness"), head.row("offset"), strict=True)
    return plain(head, i, j) + sum(float(a) * math.exp(-abs(b) * (r - c) ** 2) for a, b, c in kernels)


def tisa2_slope(h: int, n_heads: int, options: Options) -> float:
    """first (last/first)^(h/(A-1)), first, last = -ln(1e-8) / (field/2), for the A = H - free heads; 0 for the rest."""
    active = n_heads - options["free"]
    if h >= active:
        return 0.0
    first = -math.log(1e-8) / (options["min_field"] / 2)
    last = -math.log(1e-8) / (options["max_field"] / 2)
    return float(first if active == 1 else first * (last / first) ** (h / (active - 1)))


def tisa2(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + ln(1e-8 + |bias| + sum_s |a_s| sigmoid(sign(a_s) (r - c_s)/b_s)) - slope |r|."""
    r = head.offset(i, j)
    field = 1e-8 + abs(float(head.row("bias")))
    if head.h < head.n_heads - head.options["free"]:
        for a, b, c in zip(head.row("amplitude"), head.row("sharpness"), head.row("offset"), strict=True):
            field += abs(float(a)) * sigmoid(float(np.sign(a) * (r - c) / b))
    return plain(head, i, j) + math.log(field) - tisa2_slope(head.h, head.n_heads, head.options) * abs(r)


def t5_bucket(r: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """n if n < half else min(half + floor(ln(n/half) / ln(max/half) (side - half)), side - 1)  (Raffel et al. 2020)."""
    if bidirectional:
        side, first, n = buckets // 2, buckets // 2 if r > 0 else 0, abs(r)
    else:
        side, first, n = buckets, 0, max(-r, 0)
    half = side // 2
    if n < half:
        return first + n
    # float32, as published: at n = 2 half, 4 half... the exact value is an integer and rounding decides
    ratio = np.log(np.float32(n) / np.float32(half)) / np.float32(math.log(max_distance / half))
    return first + min(half + int(ratio * np.float32(side - half)), side - 1)


def t5(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + table[bucket(r)]."""
    o = head.options
    bucket = t5_bucket(head.offset(i, j), o["buckets"], o["max_distance"], o["bidirectional"])
    return plain(head, i, j) + float(head.row("table")[bucket])


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8h/H), h = 1..H, for H a power of two; else those of the power below, then every other one of the next."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)][: n_heads - power]


def toeplitz(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + table[r], r clipped  (Liu et al. 2021, in one dimension)."""
    return plain(head, i, j) + float(head.row("table")[clipped(head.offset(i, j), head.options["clip"])])


def bfloat16(x: float) -> float:
    """x with 8 significant bits, ties to even."""
    if x == 0:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def alibi(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j - m_h |r|  (Press et al. 2022); Falcon: scale * (q_i.k_j + m_h p_j) with rounded products."""
    learned = head.options["slopes"] == "learned"
    slope = float(head.params["slope"][head.h]) if learned else alibi_slopes(head.n_heads)[head.h]
    bias = -slope * abs(head.offset(i, j))
    if head.options["rounding"] == "bfloat16":
        bias = bfloat16(bfloat16(slope) * bfloat16(float(head.k_pos[j])))
    return plain(head, i, j) + bias * (head.scale if head.options["scaled"] else 1.0)


def kerple(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j - p ln(1 + a|r|), or - a|r|^p; p and a by their absolute value, and in the second case p > 2
    stands for 4 - p  (Chi et al. 2022)."""
    p, a = abs(float(head.row("p"))), abs(float(head.row("a")))
    distance = abs(head.offset(i, j))
    if head.options["kind"] == "log":
        return plain(head, i, j) - p * math.log(1 + a * distance)
    if head.options["kind"] == "power":
        return plain(head, i, j) - a * (math.pow(distance, 4 - p if p > 2 else p) if distance else 0.0)
    raise ValueError(f"unknown kind {head.options['kind']!r}")


def sandwich(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + H/(8(h+1)) sum_{t < width/2} cos(r theta^(-2t/width)), h from 0  (Chi et al. 2023)."""
    width, theta, r = head.options["width"], head.options["theta"], head.offset(i, j)
    total = sum(math.cos(r * theta ** (-2 * t / width)) for t in range(width // 2))
    return plain(head, i, j) + total / (8 * (head.h + 1) / head.n_heads)


def fire(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + MLP(ln(c|r| + 1) / ln(c max(T, i, 1) + 1))_h  (Li et al. 2024)."""
    params = head.params
    c = abs(float(params["c"])) + 1e-6
    threshold = abs(float(params["threshold"])) * head.options["length"]
    x = math.log(c * abs(head.offset(i, j)) + 1) / math.log(c * max(threshold, float(head.q_pos[i]), 1.0) + 1)
    hidden = np.maximum(params["hidden.weight"][:, 0] * x + params["hidden.bias"], 0.0)
    return plain(head, i, j) + dot(params["out.weight"][head.h], hidden) + float(params["out.bias"][head.h])


# --- rotations -------------------------------------------------------------------------------------------------------


def pair(t: int, d: int, layout: str) -> tuple[int, int]:
    """The two coordinates that frequency t rotates: (t, t + d/2), or (2t, 2t + 1)."""
    if layout not in ("half", "interleaved"):
        raise ValueError(f"unknown layout {layout!r}")
    return (t, t + d // 2) if layout == "half" else (2 * t, 2 * t + 1)


def rotated(x: Array, p: int, freqs: list[float], layout: str) -> Array:
    """(x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos) at angle p freq_t, for every pair; the rest stays."""
    y = np.array(x)
    for t, freq in enumerate(freqs):
        a, b = pair(t, 2 * len(freqs), layout)
        y[a] = x[a] * math.cos(p * freq) - x[b] * math.sin(p * freq)
        y[b] = x[a] * math.sin(p * freq) + x[b] * math.cos(p * freq)
    return y


def frequencies(theta: float, d: int) -> list[float]:
    """theta^(-2t/d)  (Su et al. 2021)."""
    return [float(theta) ** (-2 * t / d) for t in range(d // 2)]


def yarn_frequencies(d: int, o: Options) -> list[float]:
    """f_t (1 - ramp_t) + (f_t/factor) ramp_t, ramp from 0 at beta_fast turns to 1 at beta_slow  (Peng et al. 2023)."""

    def index(turns: float) -> float:
        """The t (a real number) whose pair makes this many turns over the original length."""
        return d * math.log(o["original"] / (2 * math.pi * turns)) / (2 * math.log(o["theta"]))

    low, high = index(o["beta_fast"]), index(o["beta_slow"])
    if o["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if high == low:
        high += 0.001
    result = []
    for t, freq in enumerate(frequencies(o["theta"], d)):
        ramp = max(0.0, min((t - low) / (high - low), 1.0))
        result.append(freq * (1 - ramp) + freq / o["factor"] * ramp)
    return result


def llama3_frequencies(d: int, o: Options) -> list[float]:
    """f_t above `high` turns over the original length, f_t/factor below `low`, linear in turns between  (Llama 3.1)."""
    result = []
    for freq in frequencies(o["theta"], d):
        turns = o["original"] * freq / (2 * math.pi)
        if turns > o["high"]:
            keep = 1.0
        elif turns < o["low"]:
            keep = 0.0
        else:
            keep = (turns - o["low"]) / (o["high"] - o["low"])
        result.append(freq * keep + freq / o["factor"] * (1 - keep))
    return result


def rope_frequencies(d: int, o: Options, largest: int, params: Params) -> list[float]:
    """Frequencies of d rotary dimensions under the chosen scaling; `largest` is the row's largest position."""
    scaling, theta, factor = o["scaling"], o["theta"], o["factor"]
    if scaling == "none":
        return frequencies(theta, d)
    if scaling == "linear":
        return [freq / factor for freq in frequencies(theta, d)]
    if scaling == "ntk":
        return frequencies(theta * factor ** (d / (d - 2)), d)
    if scaling == "dynamic":
        n = max(largest + 1, o["original"])
        return frequencies(theta * (factor * n / o["original"] - (factor - 1)) ** (d / (d - 2)), d)
    if scaling == "yarn":
        return yarn_frequencies(d, o)
    if scaling == "llama3":
        return llama3_frequencies(d, o)
    if scaling == "table":
        return [float(number) / 2**60 for number in params["speeds"][0]]
    if scaling == "longrope":
        return [float(number) / 2**60 for number in params["speeds"][1 if largest + 1 > o["original"] else 0]]
    raise ValueError(f"unknown scaling {scaling!r}")


def rope_magnitude(o: Options) -> float:
    """The factor on cos and sin: the option; without it 0.1 ln(factor) + 1 for YaRN, and 1 for other scalings."""
    if o["attention_factor"] is not None:
        return float(o["attention_factor"])
    return 0.1 * math.log(o["factor"]) + 1 if o["scaling"] == "yarn" and o["factor"] > 1 else 1.0


def rope_rotated(head: Head, x: Array, p: int) -> Array:
    """R_p x, on int(D partial) dimensions from `first` on."""
    o = head.options
    d, begin = int(len(x) * o["partial"]), o["first"]
    largest = max(int(head.q_pos.max()), int(head.k_pos.max()))
    y = np.array(x)
    y[begin : begin + d] = rotated(x[begin : begin + d], p, rope_frequencies(d, o, largest, head.params), o["layout"])
    y[begin : begin + d] *= rope_magnitude(o)
    return y


def rope(head: Head, i: int, j: int) -> float:
    """scale * (R_i q_i).(R_j k_j), the rotation on the leading int(D partial) dimensions  (Su et al. 2021)."""
    q, k = rope_rotated(head, head.q[i], int(head.q_pos[i])), rope_rotated(head, head.k[j], int(head.k_pos[j]))
    return head.scale * dot(q, k)


def xpos(head: Head, i: int, j: int) -> float:
    """scale * sum_t zeta_t^((i-j)/base) (pair t of (R_i q_i).(R_j k_j)), zeta_t = (2t/d + g)/(1 + g)  (Sun 2022)."""
    o, d = head.options, head.q.shape[1]
    freqs = frequencies(o["theta"], d)
    q = rotated(head.q[i], int(head.q_pos[i]), freqs, o["layout"])
    k = rotated(head.k[j], int(head.k_pos[j]), freqs, o["layout"])
    total = 0.0
    for t in range(d // 2):
        a, b = pair(t, d, o["layout"])
        zeta = (2 * t / d + o["gamma"]) / (1 + o["gamma"])
        total += zeta ** (-head.offset(i, j) / o["base"]) * float(q[a] * k[a] + q[b] * k[b])
    return head.scale * total


def xpos_turned(head: Head, x: Array, p: int, sign: int) -> Array:
    """zeta^(sign (p - m)/base) R_p x; m, the middle of the row's positions, cancels between a query and a key."""
    o, d = head.options, len(x)
    y = rotated(x, p, frequencies(o["theta"], d), o["layout"])
    everywhere = [int(pos) for pos in (*head.q_pos, *head.k_pos)]
    middle = (min(everywhere) + max(everywhere)) / 2
    for t in range(d // 2):
        for c in pair(t, d, o["layout"]):
            y[c] *= ((2 * t / d + o["gamma"]) / (1 + o["gamma"])) ** (sign * (p - middle) / o["base"])
    return y


# --- contextual positions --------------------------------------------------------------------------------------------


def cope(head: Head, i: int, j: int) -> float:
    """scale * q_i.k_j + q_i.e[p], p = sum_{t at or after j} sigmoid(scale * q_i.k_t), e interpolated  (CoPE 2024)."""
    table = head.row("table")
    p = 0.0
    for t in range(len(head.k)):
        if head.visible[i, t] and head.k_pos[t] >= head.k_pos[j]:
            p += sigmoid(plain(head, i, t))
    p = min(p, len(table) - 1.0)
    below = math.floor(p)
    above = min(below + 1, len(table) - 1)
    z_below, z_above = dot(head.q[i], table[below]), dot(head.q[i], table[above])
    return plain(head, i, j) + (1 - (p - below)) * z_below + (p - below) * z_above


ORACLES: dict[str, Callable[[Head, int, int], float]] = {
    "nope": plain,
    "learned": plain,
    "sinusoidal": plain,
    "first": plain,
    "shaw": shaw,
    "huang1": huang1,
    "huang2": huang2,
    "huang3": huang3,
    "huang4": huang4,
    "tisa": tisa,
    "tisa2": tisa2,
    "t5": t5,
    "toeplitz": toeplitz,
    "alibi": alibi,
    "rope": rope,
    "xpos": xpos,
    "kerple": kerple,
    "sandwich": sandwich,
    "xl": xl,
    "deberta": deberta,
    "fire": fire,
    "cope": cope,
}

VALUES: dict[str, Callable[[Head, int, int], Array]] = {"shaw": shaw_value}

EMBEDDINGS: dict[str, Callable[[Params, Options, int, int], Array]] = {
    "learned": learned_embedding,
    "sinusoidal": sinusoidal_embedding,
    "first": first_embedding,
}


# --- sums ------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One scheme of a sum."""

    name: str
    params: Params
    options: Options


ROTATIONS: dict[str, Callable[[Head, Array, int, int], Array]] = {
    "rope": lambda head, x, p, sign: rope_rotated(head, x, p),
    "xpos": xpos_turned,
}
"""(head, x, position, sign) -> x as the content product takes it; the sign is 1 for a query and -1 for a key."""


def gain_row(head: Head, i: int, j: int) -> Array:
    """a_r, a number or a vector, of Huang's methods 2 and 3."""
    return np.asarray(head.row("table")[clipped(head.offset(i, j), head.options["clip"])])


GAINS: dict[str, Callable[[Head, int, int], Array]] = {
    "huang1": lambda head, i, j: np.asarray(head.row("table")[min(abs(head.offset(i, j)), head.options["clip"])]),
    "huang2": gain_row,
    "huang3": gain_row,
}
"""(head, i, j) -> the factor on the coordinates of the content product."""


def sum_logit(heads: list[tuple[str, Head]], i: int, j: int) -> float:
    """scale * sum_t (R q_i)_t (R k_j)_t gain_t + what the other parts add, R and the gains those of all parts.

    Rotations apply in the order of the parts. What a part adds depends on the unrotated q and k.
    """
    _, first = heads[0]
    q, k, gain = first.q[i], first.k[j], np.ones(first.q.shape[1])
    total = 0.0
    for name, head in heads:
        if name in ROTATIONS:
            q = ROTATIONS[name](head, q, int(head.q_pos[i]), 1)
            k = ROTATIONS[name](head, k, int(head.k_pos[j]), -1)
        elif name in GAINS:
            gain = gain * GAINS[name](head, i, j)
        else:
            total += ORACLES[name](head, i, j) - plain(head, i, j)
    return first.scale * dot(q * gain, k) + total


def attention_of_sum(
    parts: list[Part],
    q: Array,
    k: Array,
    v: Array,
    q_pos: Array,
    k_pos: Array,
    visible: Array,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """`attention` of a sum of schemes: gains multiply, everything else adds."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    parts = [Part(n, {key: np.asarray(x, dtype=np.float64) for key, x in p.items()}, o) for n, p, o in parts]

    def of_head(head: Head) -> tuple[Logit, Value | None]:
        heads = [(name, replace(head, params=params, options=options)) for name, params, options in parts]
        values = [(name, part) for name, part in heads if name in VALUES]

        def value(i: int, j: int) -> Array:
            return np.asarray(sum(VALUES[name](part, i, j) for name, part in values))

        return (lambda i, j: sum_logit(heads, i, j)), (value if values else None)

    return over_heads(of_head, q, k, v, q_pos, k_pos, visible, scale, softcap, sinks)


# --- attention -------------------------------------------------------------------------------------------------------


Logit = Callable[[int, int], float]
Value = Callable[[int, int], Array]


def attention(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    q_pos: Array,
    k_pos: Array,
    visible: Array,
    scale: float,
    params: Params,
    options: Options,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """out_i = sum_j w_ij (v_j + u_ij), w_i = softmax of the logits over the visible j (all 0 when there is none).

    With a softcap c the logits are c tanh(l / c)  (Gemma 2). With sinks s [H] the softmax of head h has one more term,
    w_ij = exp(l_ij) / (exp(s_h) + sum_j exp(l_ij))  (gpt-oss).

    q [B, H, Lq, D]; k, v [B, Hkv, Lk, *], query head h reading kv head h // (H / Hkv); q_pos [B, Lq]; k_pos [B, Lk];
    visible [B, H, Lq, Lk]. Returns out [B, H, Lq, Dv] and weights [B, H, Lq, Lk].
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    params = {key: np.asarray(value, dtype=np.float64) for key, value in params.items()}

    def of_head(head: Head) -> tuple[Logit, Value | None]:
        head = replace(head, params=params, options=options)
        value = (lambda i, j: VALUES[name](head, i, j)) if name in VALUES else None
        return (lambda i, j: ORACLES[name](head, i, j)), value

    return over_heads(of_head, q, k, v, q_pos, k_pos, visible, scale, softcap, sinks)


def over_heads(
    of_head: Callable[[Head], tuple[Logit, Value | None]],
    q: Array,
    k: Array,
    v: Array,
    q_pos: Array,
    k_pos: Array,
    visible: Array,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """Output and weights; `of_head` returns the logit of a pair, and the vector added to its value or None."""
    (n_batch, n_heads, n_q, _), n_kv, n_k = q.shape, k.shape[1], k.shape[2]
    if n_heads % n_kv:
        raise ValueError(f"{n_heads} query heads are not a multiple of {n_kv} key heads")
    out = np.zeros((n_batch, n_heads, n_q, v.shape[3]))
    weights = np.zeros((n_batch, n_heads, n_q, n_k))
    for b in range(n_batch):
        for h in range(n_heads):
            g = h // (n_heads // n_kv)
            head = Head(h, n_heads, q[b, h], k[b, g], v[b, g], q_pos[b], k_pos[b], visible[b, h], scale, {}, {})
            logit, added = of_head(head)
            for i in range(n_q):
                seen = [j for j in range(n_k) if visible[b, h, i, j]]
                logits = {j: logit(i, j) for j in seen}
                if softcap is not None:
                    logits = {j: softcap * math.tanh(x / softcap) for j, x in logits.items()}
                sink = [] if sinks is None else [float(sinks[h])]
                top = max([*logits.values(), *sink], default=0.0)
                total = sum(math.exp(x - top) for x in [*logits.values(), *sink])
                for j in seen:
                    weights[b, h, i, j] = math.exp(logits[j] - top) / total
                    value = head.v[j] + added(i, j) if added is not None else head.v[j]
                    out[b, h, i] += weights[b, h, i, j] * value
    return out, weights
