"""Reference logits of recent position schemes, one (batch row, head, query, key) at a time, written from the formulas.

Everything is float64 numpy with explicit loops: slow, and meant to be read. Nothing here is shared with the code under
test. The conventions hold for every function:

- q [B, H, Lq, D], k [B, H, Lk, D] and v [B, H, Lk, Dv] have the same number of heads. The hidden state x is [B, L, W].
- `q_pos` and `k_pos` are lists of Lq and Lk positions, shared by the batch rows. In the formulas, i and j are the
  position of the query and of the key, and the offset is r = j - i.
- Parameters are arrays whose leading axis is the head, unless stated otherwise.
- A scheme returns logits [B, H, Lq, Lk] of all pairs. `attention` masks them and returns the output and the weights.

The general form, of which most schemes are special cases, is

    logit_ij = tau_i (scale ((R_i q_i)^T G_r (R_j k_j) + p_i.a_r + t_j.c_r + s_r) + b_r + d_j)

Each scheme below is written directly from its own formula. The tests compare it with the general form.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Positions = Sequence[float]
OfOffset = Callable[[int, float], Any]
"""(head, r) -> a number, a vector or a matrix."""


# --- building blocks -------------------------------------------------------------------------------------------------


def dot(x: Array, y: Array) -> float:
    """sum_t x_t y_t."""
    if len(x) != len(y):
        raise ValueError(f"got vectors of {len(x)} and {len(y)} numbers; expected the same length")
    return float(sum(x[t] * y[t] for t in range(len(x))))


def softplus(x: float) -> float:
    """ln(1 + e^x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_sigmoid(x: float) -> float:
    """ln(1 / (1 + e^-x)) = -softplus(-x)."""
    return -softplus(-x)


def sign(x: float) -> int:
    """-1, 0 or 1."""
    return (x > 0) - (x < 0)


def pairs(q: Array, k: Array, q_pos: Positions, k_pos: Positions) -> Iterator[tuple[int, int, int, int]]:
    """Every (b, h, m, n): batch row, head, index of the query, index of the key."""
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(f"got batch and heads {q.shape[:2]} for q and {k.shape[:2]} for k; expected the same")
    if len(q_pos) != q.shape[2] or len(k_pos) != k.shape[2]:
        raise ValueError(
            f"got {len(q_pos)} and {len(k_pos)} positions for {q.shape[2]} queries and {k.shape[2]} keys; "
            "pass one for each"
        )
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for m in range(q.shape[2]):
                for n in range(k.shape[2]):
                    yield b, h, m, n


def empty(q: Array, k: Array) -> Array:
    """Logits [B, H, Lq, Lk] to be filled; a pair that is forgotten stays NaN."""
    return np.full((q.shape[0], q.shape[1], q.shape[2], k.shape[2]), np.nan)


def projected(x: Array, weight: Array) -> Array:
    """Side vectors W_h x_l, [B, H, L, P], of the hidden state x [B, L, W] and the matrices `weight` [H, P, W]."""
    (n_batch, length, _), (n_heads, width, _) = x.shape, weight.shape
    result = np.zeros((n_batch, n_heads, length, width))
    for b in range(n_batch):
        for h in range(n_heads):
            for at in range(length):
                for c in range(width):
                    result[b, h, at, c] = dot(weight[h, c], x[b, at])
    return result


def frequencies(d: int, theta: float = 10000.0) -> list[float]:
    """theta^(-2t/d), t = 0 .. d/2 - 1  (RoPE, Su et al. 2021)."""
    return [theta ** (-2 * t / d) for t in range(d // 2)]


def rotated(x: Array, position: float, freqs: Sequence[float]) -> Array:
    """R_position x in the half layout: frequency t rotates the coordinates t and t + D/2. D = 2 len(freqs)."""
    half = len(freqs)
    if len(x) != 2 * half:
        raise ValueError(f"got {len(x)} coordinates for {half} frequencies; expected two for each")
    y = np.zeros(2 * half)
    for t in range(half):
        cos, sin = math.cos(position * freqs[t]), math.sin(position * freqs[t])
        y[t] = x[t] * cos - x[t + half] * sin
        y[t + half] = x[t] * sin + x[t + half] * cos
    return y


# --- attention -------------------------------------------------------------------------------------------------------


def causal(q_pos: Positions, k_pos: Positions) -> Array:
    """[Lq, Lk]: a key is visible when its position is not greater than the query's."""
    return np.array([[j <= i for j in k_pos] for i in q_pos])


def attention(logits: Array, v: Array, visible: Array | None = None) -> tuple[Array, Array]:
    """out_i = sum_j w_ij v_j, w_i = softmax of the logits over the visible keys (all 0 when there is none).

    logits [B, H, Lq, Lk], v [B, H, Lk, Dv]. `visible` is [Lq, Lk] or [B, H, Lq, Lk]; None means every key. Returns out
    [B, H, Lq, Dv] and weights [B, H, Lq, Lk].
    """
    n_batch, n_heads, n_q, n_k = logits.shape
    shown = np.ones(logits.shape, dtype=bool) if visible is None else np.broadcast_to(visible, logits.shape)
    weights, out = np.zeros(logits.shape), np.zeros((n_batch, n_heads, n_q, v.shape[3]))
    for b in range(n_batch):
        for h in range(n_heads):
            for m in range(n_q):
                seen = [n for n in range(n_k) if shown[b, h, m, n]]
                top = max((logits[b, h, m, n] for n in seen), default=0.0)
                total = sum(math.exp(logits[b, h, m, n] - top) for n in seen)
                for n in seen:
                    weights[b, h, m, n] = math.exp(logits[b, h, m, n] - top) / total
                    out[b, h, m] += weights[b, h, m, n] * v[b, h, n]
    return out, weights


# --- 1. the general form ---------------------------------------------------------------------------------------------


def bilinear(x: Array, g: Any, y: Array) -> float:
    """x^T G y. A number stands for that multiple of the identity, and a vector for a diagonal matrix."""
    g = np.asarray(g, dtype=np.float64)
    if g.ndim == 0:
        return float(g) * dot(x, y)
    if g.ndim == 1:
        return dot(x * g, y)
    return dot(x, np.array([dot(row, y) for row in g]))


def logits(
    q: Array,
    k: Array,
    q_pos: Positions,
    k_pos: Positions,
    scale: float,
    *,
    rotate: Callable[[int, Array, float], Array] | None = None,
    gain: OfOffset | None = None,
    p: Array | None = None,
    a: OfOffset | None = None,
    t: Array | None = None,
    c: OfOffset | None = None,
    s: OfOffset | None = None,
    b: OfOffset | None = None,
    d: Array | None = None,
    tau: Callable[[float], float] | None = None,
) -> Array:
    """tau_i (scale ((R_i q_i)^T G_r (R_j k_j) + p_i.a_r + t_j.c_r + s_r) + b_r + d_j); a part left out is absent.

    rotate: (head, vector, position) -> R_position times the vector, of any width. It applies to queries and keys.
    gain: (head, r) -> G_r, see `bilinear`.
    p [B, H, Lq, P] and a: (head, r) -> a_r [P] belong together, and so do t [B, H, Lk, T] and c: (head, r) -> c_r [T].
    `projected` makes p and t from the hidden state.
    s, b: (head, r) -> s_r, b_r. d [B, H, Lk]. tau: position of the query -> tau_i.

    The scale multiplies p_i.a_r, t_j.c_r and s_r. It does not multiply b_r and d_j.
    """
    if (p is None) != (a is None) or (t is None) != (c is None):
        raise ValueError("got one of p and a, or of t and c; pass both or neither")
    result = empty(q, k)
    for row, h, m, n in pairs(q, k, q_pos, k_pos):
        i, j = q_pos[m], k_pos[n]
        r = j - i
        query = q[row, h, m] if rotate is None else rotate(h, q[row, h, m], i)
        key = k[row, h, n] if rotate is None else rotate(h, k[row, h, n], j)
        inner = bilinear(query, 1.0 if gain is None else gain(h, r), key)
        if p is not None and a is not None:
            inner += dot(p[row, h, m], a(h, r))
        if t is not None and c is not None:
            inner += dot(t[row, h, n], c(h, r))
        if s is not None:
            inner += float(s(h, r))
        outer = scale * inner
        if b is not None:
            outer += float(b(h, r))
        if d is not None:
            outer += float(d[row, h, n])
        result[row, h, m, n] = outer if tau is None else tau(i) * outer
    return result


def rope(q: Array, k: Array, q_pos: Positions, k_pos: Positions, scale: float, theta: float = 10000.0) -> Array:
    """scale (R_i q_i).(R_j k_j)  (Su et al. 2021). Positions may be real numbers."""
    freqs, result = frequencies(q.shape[3], theta), empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        query, key = rotated(q[b, h, m], q_pos[m], freqs), rotated(k[b, h, n], k_pos[n], freqs)
        result[b, h, m, n] = scale * dot(query, key)
    return result


# --- temperatures ----------------------------------------------------------------------------------------------------


def logn_tau(i: float, n0: float) -> float:
    """max(1, ln(i + 1) / ln n0), i >= 0 the position of the query: the one we call `logn`.

    i + 1 is the number of keys that a causal query sees. This is Qwen's use_logn_attn, whose list has the entry
    ln(n) / ln(n0) for n > n0 and 1 below it, n counted from 1. Published relatives differ:
    - `length_tau`: Su's log-n (kexue.fm 8823), one number for a whole row, and the one LongEmbed applies to encoders;
    - `yarn_tau`: one number for the whole model;
    - `inkling_tau`: grows with ln(i + 1) as well, but with a free slope and 1 at n0.
    """
    return max(1.0, math.log(i + 1) / math.log(n0))


def length_tau(length: int, n0: float) -> float:
    """max(1, ln L / ln n0), L the number of real (not padding) tokens of the row; the same for all its queries."""
    return max(1.0, math.log(length) / math.log(n0))


def yarn_tau(factor: float) -> float:
    """(0.1 ln(factor) + 1)^2 for factor > 1, else 1  (Peng et al. 2023).

    YaRN calls this 1/t. The square appears because implementations multiply both q and k by its root.
    """
    return (0.1 * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def inkling_tau(i: float, alpha: float, n0: float) -> float:
    """1 + alpha ln max(1, (i + 1) / n0)."""
    return 1 + alpha * math.log(max(1.0, (i + 1) / n0))


def logn(q: Array, k: Array, q_pos: Positions, k_pos: Positions, scale: float, *, n0: float) -> Array:
    """max(1, ln(i + 1) / ln n0) scale q_i.k_j. The temperature multiplies the whole logit."""
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        result[b, h, m, n] = logn_tau(q_pos[m], n0) * scale * dot(q[b, h, m], k[b, h, n])
    return result


def local(
    q: Array, k: Array, q_pos: Positions, k_pos: Positions, scale: float, *, window: int, first: bool = True
) -> Array:
    """scale q_i.k_j, less 10000 where |j - i| > window; with `first`, not where i or j is 0 (Longformer's windows)."""
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        far = abs(k_pos[n] - q_pos[m]) > window
        shown = first and (q_pos[m] == 0 or k_pos[n] == 0)
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) - (10000.0 if far and not shown else 0.0)
    return result


# --- 2. Inkling ------------------------------------------------------------------------------------------------------


def rms_normed(x: Array, weight: Array, eps: float) -> Array:
    """weight_c x_c / sqrt(mean_c x_c^2 + eps) over the last axis; `weight` [D] is shared by the heads."""
    result = np.zeros(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        mean = dot(x[index], x[index]) / x.shape[-1]
        result[index] = weight * x[index] / math.sqrt(mean + eps)
    return result


def inkling(
    q: Array,
    k: Array,
    x: Array,
    q_pos: Positions,
    k_pos: Positions,
    *,
    relative: Array,
    profiles: Array,
    scale: float | None = None,
    alpha: float | None = None,
    n0: float | None = None,
) -> Array:
    """tau_i (scale q_i.k_j + sum_d (W_h x_i)_d P[d, i - j] [0 <= i - j < extent])  (Inkling, transformers 5).

    x [B, Lq, W] is the hidden state of the queries, the one that q, k and v are computed from. `relative` is W, [H,
    width, W] (transformers' r_proj.weight [H width, W], head by head). `profiles` is P, [width, extent], shared by the
    heads. As read in transformers' modeling_inkling.py:

    - Offsets: the distance is i - j = -r. Column 0 of P belongs to the token itself, column extent - 1 is the last one
      used, and the bias is 0 (not masked, not clamped to the last column) for i - j >= extent and for future keys.
      Causality is left to the mask. i and j are indices in the cache, not position ids: left padding counts.
    - Normalisation: q and k are RMS-normed over the head dimension, each with one weight [D] shared by the heads (see
      `rms_normed`), before this function. k is normed after its short convolution. The vectors W x_i are not normed.
      There are no biases in the projections.
    - Scale: 1/D, not 1/sqrt(D), since q and k are normed. It multiplies q.k only: the bias is added after it.
    - tau_i = 1 + alpha ln max(1, (i + 1) / n0), i counted from 0, multiplies q and the bias, so the whole logit. Only
      global layers have it, and only when n0 is set. Sliding layers have extent = window and no tau.
    """
    if (alpha is None) != (n0 is None):
        raise ValueError("got one of alpha and n0; pass both or neither")
    scale = 1 / q.shape[3] if scale is None else scale
    extent, side = profiles.shape[1], projected(x, relative)
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        distance = int(q_pos[m]) - int(k_pos[n])
        bias = dot(side[b, h, m], profiles[:, distance]) if 0 <= distance < extent else 0.0
        tau = 1.0 if alpha is None or n0 is None else inkling_tau(q_pos[m], alpha, n0)
        result[b, h, m, n] = tau * (scale * dot(q[b, h, m], k[b, h, n]) + bias)
    return result


# --- 3. the forgetting transformer -----------------------------------------------------------------------------------


def fox_log_gates(x: Array, weight: Array, bias: Array) -> Array:
    """ln f_l = ln sigmoid(w_h.x_l + b_h), [B, H, L], of x [B, L, W], weight [H, W] and bias [H]; never positive."""
    result = np.zeros((x.shape[0], len(weight), x.shape[1]))
    for b, h, at in np.ndindex(result.shape):
        result[b, h, at] = log_sigmoid(dot(weight[h], x[b, at]) + float(bias[h]))
    return result


def fox_cumulated(log_gates: Array, k_pos: Positions, position: float) -> float:
    """c at a position: the sum of the log-gates [Lk] of all tokens at or before it, in float64."""
    return math.fsum(float(log_gates[n]) for n in range(len(k_pos)) if k_pos[n] <= position)


def fox(q: Array, k: Array, log_gates: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
    """scale q_i.k_j + c_i - c_j, c_i = sum_{l <= i} ln f_l, for j <= i  (FoX, Lin et al. 2025).

    log_gates [B, H, Lk] (see `fox_log_gates`) has one number for each key. So c_i - c_j = sum_{j < l <= i} ln f_l: the
    gate of the query counts, the gate of the key does not, and a token sees itself without decay. The decay is outside
    the scale. In causal use the mask removes j > i; there this formula would reward distance.

    The sum runs over all tokens given, whether or not they are visible. Padding before or after both tokens cancels.
    """
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        c_i = fox_cumulated(log_gates[b, h], k_pos, q_pos[m])
        c_j = fox_cumulated(log_gates[b, h], k_pos, k_pos[n])
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) + (c_i - c_j)
    return result


def fox_by_key(q: Array, k: Array, log_gates: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
    """scale q_i.k_j + d_j, d_j = -c_j: `fox` without c_i, which is the same for all keys and drops out of the softmax.

    The weights are those of `fox`, the logits are not. d_j grows with the length, so in float32 it swallows q.k.
    """
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        c_j = fox_cumulated(log_gates[b, h], k_pos, k_pos[n])
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) - c_j
    return result


def fox_two_sided(q: Array, k: Array, log_gates: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
    """scale q_i.k_j - |c_i - c_j|: FoX for encoders. This form is our proposal; no paper has it.

    -|c_i - c_j| = sum of ln f_l over min(i, j) < l <= max(i, j): the gates strictly between the two tokens, and that of
    the later one, whichever of them is the query. It equals `fox` for j <= i, and the decay is symmetric in i and j.
    It is not symmetric under reversal of the text: read backwards, the gate of the other end counts.

    No d_j has these weights, since c_i no longer drops out. In the general form it is p_i = c_i, a_r = -sign(r) / scale
    and t_j = c_j, c_r = sign(r) / scale.
    """
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        c_i = fox_cumulated(log_gates[b, h], k_pos, q_pos[m])
        c_j = fox_cumulated(log_gates[b, h], k_pos, k_pos[n])
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) - abs(c_i - c_j)
    return result


# --- 4. GRAPE, PoPE, gains, FoPE, DAPE -------------------------------------------------------------------------------


def grape_a_qk(
    q: Array,
    k: Array,
    q_pos: Positions,
    k_pos: Positions,
    scale: float,
    *,
    omega: Array,
    query_gate: Array,
    key_gate: Array,
    two_sided: bool = False,
) -> Array:
    """scale q_i.k_j + r omega_h (softplus(v_h.q_i / sqrt D) + softplus(u_h.k_j / sqrt D))  (GRAPE, eq. 4.6).

    omega [H], query_gate v [H, D], key_gate u [H, D]. The bias is outside the scale. With omega > 0 it is a penalty for
    j < i. For j > i the published formula is a reward; causal use never meets it. `two_sided` puts -|r| in place of r.
    """
    root, result = math.sqrt(q.shape[3]), empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        query, key = q[b, h, m], k[b, h, n]
        r = k_pos[n] - q_pos[m]
        slope = softplus(dot(query_gate[h], query) / root) + softplus(dot(key_gate[h], key) / root)
        result[b, h, m, n] = scale * dot(query, key) + (-abs(r) if two_sided else r) * float(omega[h]) * slope
    return result


def pope(
    q: Array, k: Array, q_pos: Positions, k_pos: Positions, scale: float, *, delta: Array, theta: float = 10000.0
) -> Array:
    """scale sum_c softplus(q_ic) softplus(k_jc) cos(r theta^(-c/D) + delta_hc), c = 0 .. D-1  (Gopalakrishnan 2025).

    Each coordinate has its own frequency, so there are D of them and not D/2. delta [H, D] is the phase of the keys,
    clamped to [-2 pi, 0] on use.
    """
    width, result = q.shape[3], empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        r, total = k_pos[n] - q_pos[m], 0.0
        for c in range(width):
            phase = r * theta ** (-c / width) + max(-2 * math.pi, min(float(delta[h, c]), 0.0))
            total += softplus(float(q[b, h, m, c])) * softplus(float(k[b, h, n, c])) * math.cos(phase)
        result[b, h, m, n] = scale * total
    return result


def parametric_gain(
    q: Array, k: Array, q_pos: Positions, k_pos: Positions, scale: float, *, a: Array, p: Array
) -> Array:
    """scale q_i.k_j exp(-a_h |r|^p_h), a, p [H], a >= 0 and p > 0  (the gain of KERPLE, Table 6).

    A far logit goes to 0, not to minus infinity: far keys keep a uniform weight.
    """
    if (np.asarray(a) < 0).any() or (np.asarray(p) <= 0).any():
        raise ValueError(f"got a = {a} and p = {p}; expected a >= 0 and p > 0")
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        gain = math.exp(-float(a[h]) * abs(k_pos[n] - q_pos[m]) ** float(p[h]))
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) * gain
    return result


def fope_turned(
    x: Array,
    position: float,
    freqs: Sequence[float],
    cos_coef: Array,
    sin_coef: Array,
    rest: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """x as `fope` takes it: R of RoPE with cos'_t and sin'_t for the cosine and sine of pair t, in the half layout.

    cos'_t(p) = sum_f C_ft cos(omega_f p) and sin'_t(p) = sum_f S_ft sin(omega_f p), C, S [F, T], T <= D/2. The pairs
    from T on have the constant cosine and sine of `rest`.
    """
    half = len(x) // 2
    y = np.zeros(len(x))
    for t in range(half):
        cos, sin = rest
        if t < cos_coef.shape[1]:
            cos = sum(float(cos_coef[f, t]) * math.cos(freqs[f] * position) for f in range(len(freqs)))
            sin = sum(float(sin_coef[f, t]) * math.sin(freqs[f] * position) for f in range(len(freqs)))
        y[t] = x[t] * cos - x[t + half] * sin
        y[t + half] = x[t] * sin + x[t + half] * cos
    return y


def fope(
    q: Array,
    k: Array,
    q_pos: Positions,
    k_pos: Positions,
    scale: float,
    *,
    freqs: Sequence[float],
    cos_coef: Array,
    sin_coef: Array,
    rest: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """scale (F_i q_i).(F_j k_j), F_p = `fope_turned`  (FoPE, Hua et al. 2024). It is not a function of r.

    cos_coef and sin_coef [H, F, T] are fixed, drawn once around the identity, and used as given: the paper's listing
    divides each column by its sum, and the OLMo fork does so only under its option fourier_norm. freqs [F] are the
    frequencies kept; those below 2 pi / (training length) are dropped, and the pairs left over have `rest`. As
    published these have cosine 1 and sine 1, which is sqrt(2) times a turn by 45 degrees: their product is doubled.
    """
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        query = fope_turned(q[b, h, m], q_pos[m], freqs, cos_coef[h], sin_coef[h], rest)
        key = fope_turned(k[b, h, n], k_pos[n], freqs, cos_coef[h], sin_coef[h], rest)
        result[b, h, m, n] = scale * dot(query, key)
    return result


def dape(
    q: Array,
    k: Array,
    q_pos: Positions,
    k_pos: Positions,
    scale: float,
    *,
    bias: OfOffset,
    hidden_weight: Array,
    hidden_bias: Array,
    out_weight: Array,
    out_bias: Array,
    leak: float = 0.01,
) -> Array:
    """s_h + b_h + MLP([s_1 .. s_H, b_1 .. b_H])_h, s = scale q_i.k_j, b = bias(h, r), for each pair  (DAPE 2024).

    MLP(z) = out_weight LeakyReLU(hidden_weight z + hidden_bias) + out_bias, with hidden_weight [width, 2H], out_weight
    [H, width] and negative slope `leak`. The input is the scaled, unmasked logits of all heads first, then the biases.
    """
    n_heads, result = q.shape[1], empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        r = k_pos[n] - q_pos[m]
        content = [scale * dot(q[b, g, m], k[b, g, n]) for g in range(n_heads)]
        biases = [float(bias(g, r)) for g in range(n_heads)]
        z = np.array(content + biases)
        hidden = np.zeros(len(hidden_weight))
        for c in range(len(hidden_weight)):
            y = dot(hidden_weight[c], z) + float(hidden_bias[c])
            hidden[c] = y if y >= 0 else leak * y
        result[b, h, m, n] = content[h] + biases[h] + dot(out_weight[h], hidden) + float(out_bias[h])
    return result


# --- 5. maps of positions and of offsets -----------------------------------------------------------------------------


def interpolated(positions: Positions, factor: float) -> list[float]:
    """i / factor, a real number  (position interpolation, Chen et al. 2023)."""
    return [i / factor for i in positions]


def grouped(positions: Sequence[int], size: int) -> list[int]:
    """floor(i / size): `size` tokens in a row share a position  (LongEmbed, section 4)."""
    return [i // size for i in positions]


def recurrent(positions: Sequence[int], length: int) -> list[int]:
    """i mod length: positions start again at 0  (LongEmbed, section 4). Offsets may change sign."""
    return [i % length for i in positions]


def self_extended_positions(i: int, j: int, window: int, size: int) -> tuple[int, int]:
    """Positions (of the query, of the key) that SelfExtend gives to one pair  (Jin et al. 2024).

    Near, |r| <= window: (i, j). Far, and j < i: (floor(i/G) + shift, floor(j/G)), shift = window - floor(window/G), so
    that far offsets continue where the window ends. This is all that causal use needs.

    For two-sided use we mirror it: far, and j > i, gives (floor(i/G), floor(j/G) + shift). The token that is later in
    the text is shifted, so swapping the query and the key negates the offset.
    """
    if abs(j - i) <= window:
        return i, j
    shift = window - window // size
    return (i // size + shift, j // size) if j < i else (i // size, j // size + shift)


def self_extended(i: int, j: int, window: int, size: int) -> int:
    """The offset SelfExtend puts in place of r: r itself if |r| <= window, else
    sign(r) (|floor(j/G) - floor(i/G)| + window - floor(window/G)).

    It depends on i and j, not on r alone: with size G, one far r has two images, depending on where the groups begin.
    """
    r = j - i
    if abs(r) <= window:
        return r
    return sign(r) * (abs(j // size - i // size) + window - window // size)


def self_extend_bias(
    q: Array,
    k: Array,
    q_pos: Sequence[int],
    k_pos: Sequence[int],
    scale: float,
    *,
    bias: OfOffset,
    window: int,
    size: int,
) -> Array:
    """scale q_i.k_j + bias(h, r'), r' = `self_extended`."""
    result = empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        r = self_extended(q_pos[m], k_pos[n], window, size)
        result[b, h, m, n] = scale * dot(q[b, h, m], k[b, h, n]) + float(bias(h, r))
    return result


def self_extend_rope(
    q: Array,
    k: Array,
    q_pos: Sequence[int],
    k_pos: Sequence[int],
    scale: float,
    *,
    window: int,
    size: int,
    theta: float = 10000.0,
) -> Array:
    """scale (R_i' q_i).(R_j' k_j), (i', j') = `self_extended_positions` of the pair.

    A causal model needs two rotations of each query and key, near and far. A two-sided one needs three: near, far and
    unshifted, far and shifted.
    """
    freqs, result = frequencies(q.shape[3], theta), empty(q, k)
    for b, h, m, n in pairs(q, k, q_pos, k_pos):
        i, j = self_extended_positions(q_pos[m], k_pos[n], window, size)
        result[b, h, m, n] = scale * dot(rotated(q[b, h, m], i, freqs), rotated(k[b, h, n], j, freqs))
    return result
