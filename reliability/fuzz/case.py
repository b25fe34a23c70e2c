"""`Case`: one random call as a record of plain values, from which its tensors are rebuilt."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A call of `locant.attend`. The defaults are the simplest choice: a failing case shrinks towards them."""

    spec: str = "nope"
    impl: str = "eager"
    b: int = 1
    kv: int = 1  # key/value heads
    groups: int = 1  # query heads for each of them
    lq: int = 1
    lk: int = 1
    d: int = 2
    dv: int = 2
    dtype: str = "float32"
    parameters: str = "float32"  # dtype of the scheme's parameters
    q_layout: str = "plain"  # names of `reliability.fuzz.inputs.LAYOUTS`
    k_layout: str = "plain"
    v_layout: str = "plain"
    grad_layout: str = "plain"
    mask: str = "none"  # its shape: letters B, H, Q, K, or 1
    mask_kind: str = "random"
    mask_layout: str = "plain"
    positions: str = "none"
    given: str = "both"  # which positions are passed
    pos_shape: str = "L"
    pos_dtype: str = "int64"
    additive: str = "none"  # the shape of the additive mask: four letters, as `mask`
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: str = "none"  # names of `reliability.fuzz.inputs.SINKS`
    dropout: float = 0.0
    need_weights: bool = False
    context: str = "plain"
    states: str = "pair"  # how hidden states are passed to a scheme that reads them: a pair, "keys" or "queries"
    wanted: str = ""  # gradients of q, k, v, the parameters p, the sinks s and the hidden states x
    before: str = "nothing"  # calls of the same scheme before this one
    slices: bool = False  # small slices in eager and sdpa, as for long sequences
    size: float = 1.0  # of the numbers in q and k
    data: int = 0  # seed of all numbers

    @property
    def h(self) -> int:
        return self.kv * self.groups

    @property
    def d_model(self) -> int:
        """The model's width, even for the schemes with sines and cosines."""
        return self.h * self.d + self.h * self.d % 2

    @property
    def torch_dtype(self) -> torch.dtype:
        return named(self.dtype)

    @property
    def transformed(self) -> bool:
        """Whether a transform of torch.func makes the call; vmap has no rule for an empty batch."""
        return self.context in ("vjp", "jvp") or (self.context == "vmap" and self.b > 0)

    @property
    def scheme_names(self) -> list[str]:
        """The name of every part of the scheme."""
        return [part.partition("@")[0].partition(":")[0] for part in self.spec.split("+")]

    @property
    def maps(self) -> list[tuple[str, dict[str, float]] | None]:
        """The map of every part of the scheme, with its options; None for a part without one."""
        found = [part.partition("@")[2] for part in self.spec.split("+")]
        return [(text.partition(":")[0], _numbers(text)) if text else None for text in found]

    @property
    def reads(self) -> str:
        """Whose hidden states the scheme reads: letters q and k."""
        return "".join(x for x, name in (("q", "inkling"), ("k", "fox")) if name in self.scheme_names)

    @property
    def causal_only(self) -> bool:
        """Whether a part of the scheme refuses keys after their query."""
        return any(part.startswith(("fox", "grape")) and "two_sided=true" not in part for part in self.spec.split("+"))

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Case({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Case) if f.default is not MISSING}


def _numbers(text: str) -> dict[str, float]:
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", text)}


def named(dtype: str) -> torch.dtype:
    """The torch dtype of a name."""
    found: torch.dtype = getattr(torch, dtype)
    return found
