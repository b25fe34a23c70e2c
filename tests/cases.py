"""Schemes to test, and how to compare one with its oracle."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

import locant
from locant.schemes import Rope
from locant.schemes.base import DIMS
from locant.schemes.rope import TABLES
from tests import oracles

N_HEADS, HEAD_DIM, D_MODEL = 4, 8, 32

SPECS = [
    "nope",
    "learned:length=64",
    "sinusoidal",
    "first",
    "shaw:clip=3",
    "shaw:clip=3,heads=own",
    "shaw:clip=3,values=false",
    "xl",
    "huang1:clip=3",
    "huang1:clip=3,heads=shared",
    "huang2:clip=3",
    "huang2:clip=3,heads=shared",
    "huang3:clip=3",
    "huang3:clip=3,heads=own",
    "huang4:clip=3",
    "huang4:clip=3,heads=own",
    "huang4:clip=1",
    "tisa",
    "tisa:kernels=1",
    "tisa2:kernels=4",
    "tisa2:kernels=4,free=2,min_field=8,max_field=64",
    "t5",
    "t5:buckets=8,max_distance=12",
    "t5:buckets=8,max_distance=12,bidirectional=false",
    "toeplitz:clip=3",
    "alibi",
    "alibi:slopes=learned",
    "alibi:scaled=true",
    "alibi:scaled=true,rounding=bfloat16",
    "rope",
    "rope:layout=interleaved,theta=100",
    "rope:partial=0.5",
    "rope:scaling=linear,factor=4",
    "rope:scaling=ntk,factor=4,layout=interleaved",
    "rope:scaling=dynamic,factor=2,original=6",
    "rope:scaling=yarn,factor=4,original=16,theta=50",
    "rope:scaling=yarn,factor=4,original=16,theta=50,truncate=false,attention_factor=1.3",
    "rope:scaling=llama3,factor=8,original=32",
    "rope:scaling=table,layout=interleaved,partial=0.5,first=2",
    "rope:scaling=longrope,original=12,factor=4,partial=0.25,first=5,attention_factor=0.8",
    "xpos",
    "xpos:layout=half,base=600,gamma=0.3",
    "kerple",
    "kerple:kind=power",
    "sandwich:width=16",
    "fire:width=6,length=4",
    "cope:positions=4",
    "cope:positions=3,heads=own",
    "deberta:buckets=4,max_distance=8",
    "deberta:buckets=4,max_distance=8,products=c2p",
    "deberta:buckets=3,spacing=linear",
    "deberta:buckets=3,spacing=linear,products=p2c",
]

NAMES = [spec for spec in SPECS if spec.split(":")[0] not in ("nope", "learned", "sinusoidal", "first")]
"""Those that do something inside attention."""


PAIRS = [spec for spec in SPECS if spec.split(":")[0] in ("fire", "cope") or "rounding" in spec]
"""Those whose logits are not a function of the offset: they have a `pair`."""


def build(spec: str, *, n_heads: int = N_HEADS, head_dim: int = HEAD_DIM, d_model: int = D_MODEL) -> locant.Scheme:
    """A scheme in float64 whose parameters are away from where they start."""
    scheme = locant.scheme(spec, n_heads=n_heads, head_dim=head_dim, d_model=d_model).double()
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        for part in scheme.parts_of_sum():
            if isinstance(part, Rope) and part.scaling in TABLES:
                part.set_speeds(torch.randn(part.speeds.shape, dtype=torch.float64))
    return scheme


def tensors(
    b: int = 2,
    h: int = N_HEADS,
    kv: int = N_HEADS,
    lq: int = 9,
    lk: int = 9,
    d: int = HEAD_DIM,
    dtype: Any = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (b, h, lq, d), (b, kv, lk, d), (b, kv, lk, d)
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def by_oracle(
    scheme: locant.Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the loops of `tests.oracles`; the scheme is only asked for its parameters and options."""
    b, h, lq, d = q.shape
    lk = k.shape[2]
    q_pos, k_pos = q_pos.reshape(-1, lq).expand(b, lq), k_pos.reshape(-1, lk).expand(b, lk)
    visible = torch.ones(b, h, lq, lk, dtype=torch.bool)
    if causal:
        visible &= (k_pos[:, None, :] <= q_pos[:, :, None])[:, None]
    if mask is not None:
        visible &= mask
    defaults = {name: parameter.default for name, parameter in scheme.arguments().items() if name not in DIMS}
    if scale is None:
        products = {"both": 3, "c2p": 2, "p2c": 2}[scheme.options().get("products", "both")]
        scale = (products * d) ** -0.5 if scheme.name() == "deberta" else d**-0.5
    out, weights = oracles.attention(
        scheme.name(),
        *(x.detach().double().numpy() for x in (q, k, v)),
        q_pos.numpy(),
        k_pos.numpy(),
        visible.numpy(),
        scale,
        {name: value.detach().double().numpy() for name, value in scheme.state_dict().items()},
        {**defaults, **scheme.options()},
        softcap,
        None if sinks is None else sinks.detach().double().numpy(),
    )
    return torch.from_numpy(np.asarray(out)), torch.from_numpy(np.asarray(weights))
