"""The schemes of 2025–26 to test, with hidden states, and their logits by the loops of `tests.frontier_oracles`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import locant
from locant.schemes.alibi import alibi_slopes
from tests import cases
from tests import frontier_oracles as oracles

SPECS = [
    "inkling:extent=4,width=3",
    "inkling:extent=1,width=1",
    "inkling:extent=50,width=3,alpha=0.3,n0=3",
    "fox",
    "fox:two_sided=true",
    "grape",
    "grape:two_sided=true",
    "pope",
    "pope:theta=50",
    "fade",
    "logn:n0=3",
    "logn:n0=4,learned=true",
    "local:window=2",
    "local:window=0",
    "local:window=3,first=false",
    "fope:length=100,theta=50",
    "fope:seed=3,rest=turned,spread=0.5",
    "fope:heads=shared,length=40",
    "dape:width=5",
    "dape:bias=kerple,width=3",
]
CAUSAL = [spec for spec in SPECS if spec in ("fox", "grape")]
"""Those that refuse keys after their query."""
GROUPED = [spec for spec in SPECS if not spec.startswith("fope") or "shared" in spec]
"""Those that take fewer key heads than query heads."""


def states(b: int = 2, length: int = 9, dtype: Any = torch.float64) -> Tensor:
    return torch.randn(b, length, cases.D_MODEL, dtype=torch.float64).to(dtype)


def logits(
    scheme: locant.Scheme, q: Tensor, k: Tensor, x: Tensor, q_pos: Tensor, k_pos: Tensor, scale: float
) -> Tensor:
    """Logits [B, H, Lq, Lk] by the oracles. x [B, Lk, d_model] is of the keys, the last Lq of which are the queries."""
    rows = []
    for row in range(q.shape[0]):
        heads = k[row : row + 1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        arrays = [part.detach().double().numpy() for part in (q[row : row + 1], heads, x[row : row + 1])]
        where = [pos[row if pos.shape[0] > 1 else 0].tolist() for pos in (q_pos, k_pos)]
        rows.append(ORACLES[scheme.name()](scheme, *arrays, *where, scale))
    return torch.from_numpy(np.concatenate(rows))


def _values(scheme: Any) -> dict[str, Any]:
    return {name: value.detach().double().numpy() for name, value in scheme.named_parameters()}


def _inkling(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    values = _values(s)
    heat = {"alpha": s.alpha, "n0": s.n0} if s.alpha else {}
    return oracles.inkling(
        q, k, x[:, x.shape[1] - q.shape[2] :], q_pos, k_pos, profiles=values["profiles"], scale=scale,
        relative=values["project"].reshape(s.n_heads, s.width, -1), **heat,
    )  # fmt: skip


def _fox(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    values = _values(s)
    gates = oracles.fox_log_gates(x, values["gate"], values["bias"])
    return (oracles.fox_two_sided if s.two_sided else oracles.fox)(q, k, gates, q_pos, k_pos, scale)


def _grape(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    values = _values(s)
    return oracles.grape_a_qk(
        q, k, q_pos, k_pos, scale, omega=np.exp(values["log_speed"]), query_gate=values["query_gate"],
        key_gate=values["key_gate"], two_sided=s.two_sided,
    )  # fmt: skip


def _pope(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    delta = -(-_values(s)["phase"] % (2 * np.pi))  # the same phase between −2π and 0
    return oracles.pope(q, k, q_pos, k_pos, scale, delta=delta, theta=s.theta)


def _fade(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    values = _values(s)
    p = np.array([abs(p) if abs(p) <= 2 else 4 - abs(p) for p in values["p"]])
    return oracles.parametric_gain(q, k, q_pos, k_pos, scale, a=np.abs(values["a"]), p=p)


def _logn(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    sharp = oracles.logn(q, k, [max(i, 0) for i in q_pos], k_pos, scale, n0=s.n0)
    if not s.learned:
        return sharp
    plain = oracles.logits(q, k, q_pos, k_pos, scale)
    return plain + _values(s)["strength"][:, None, None] * (sharp - plain)


def _local(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    return oracles.local(q, k, q_pos, k_pos, scale, window=s.window, first=s.first)


def _fope(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    cos, sin = (np.broadcast_to(c.numpy(), (s.n_heads, *c.shape[1:])) for c in s.mixtures())
    freqs = oracles.frequencies(s.head_dim, s.theta)
    kept = [f for f in freqs if f >= 2 * np.pi / s.length]
    rest = (1.0, 1.0) if s.rest == "turned" else (1.0, 0.0)
    return oracles.fope(q, k, q_pos, k_pos, scale, freqs=kept, cos_coef=cos, sin_coef=sin, rest=rest)


def _dape(s: Any, q: Any, k: Any, x: Any, q_pos: Any, k_pos: Any, scale: float) -> Any:
    values, slopes = _values(s), alibi_slopes(s.n_heads)

    def bias(h: int, r: float) -> float:
        if s.bias == "alibi":
            return -slopes[h] * abs(r)
        return float(-abs(values["p"][h]) * np.log1p(abs(values["a"][h]) * abs(r)))

    return oracles.dape(
        q, k, q_pos, k_pos, scale, bias=bias, hidden_weight=values["hidden.weight"], hidden_bias=values["hidden.bias"],
        out_weight=values["out.weight"], out_bias=values["out.bias"],
    )  # fmt: skip


ORACLES: dict[str, Callable[..., Any]] = {
    "inkling": _inkling, "fox": _fox, "grape": _grape, "pope": _pope, "fade": _fade, "logn": _logn, "fope": _fope,
    "dape": _dape, "local": _local,
}  # fmt: skip
