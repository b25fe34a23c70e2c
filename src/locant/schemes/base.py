"""`Scheme`: how a transformer knows where its tokens are, as one small object.

Most schemes override one of three methods:

    embed(pos)                     -> what is added to the token embeddings
    rotate(q, k, q_pos, k_pos)     -> queries and keys of the content product
    terms(r)                       -> tables over the offset r = key position − query position

and `parameter_count`, the formula of the paper. A scheme never sees masks, never caches and has no maximum
length unless its mathematics has one; whether layers share a scheme is the model's decision.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from locant.terms import Terms

DIMS = ("n_heads", "head_dim", "d_model")
"""Constructor arguments that come from the model, not from the spec string."""

SchemeT = TypeVar("SchemeT", bound="Scheme")


class Scheme(nn.Module):
    """Base of all schemes. Used as it is, it is NoPE: no position at all."""

    shift_invariant: bool = True
    """Moving every position by the same amount changes nothing."""
    pairwise: bool = True
    """The logit of (i, j) depends on the tokens and positions i and j alone, not on other keys."""
    incremental: bool = True
    """Decoding one query at a time equals the full pass: later keys do not change what earlier queries see."""
    parallel: ClassVar[bool] = True
    """All positions are computed at once, without a recurrence along the sequence."""
    max_length: int | None = None
    """Positions must be below this; None if any position will do."""

    planes: tuple[str, int] | None = None
    """For a scheme that rotates: which pairs of coordinates. Rotations of the same pairs commute."""

    given: dict[str, Any]
    """The constructor arguments as they were written, so that str() gives the spec back."""

    def __new__(cls: type[SchemeT], *args: Any, **kwargs: Any) -> SchemeT:
        self = super().__new__(cls)
        self.__dict__["given"] = kwargs
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "terms" in cls.__dict__ and "reach" not in cls.__dict__:  # what was said of the parent's terms does not hold
            cls.reach = Scheme.reach  # type: ignore[method-assign]

    @property
    def reach(self) -> int | None:
        """Beyond this distance nothing changes: terms(r) = terms(±reach) for |r| ≥ reach. None if it goes on changing.

        Tables are then asked for no further, and fast back ends take a short way for what is further off. A class that
        defines `terms` states its own.
        """
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reach":
            raise AttributeError(
                f"{type(self).__name__}.reach cannot be set: it is what a scheme says of its terms (see Scheme.reach). "
                f"Define it as a property, or give an option of yours another name"
            )
        super().__setattr__(name, value)

    @property
    def embeds(self) -> bool:
        """Whether the scheme adds to the token embeddings."""
        return type(self).embed is not Scheme.embed

    @property
    def rotates(self) -> bool:
        """Whether the scheme changes the queries and keys of the content product."""
        return type(self).rotate is not Scheme.rotate

    @property
    def has_terms(self) -> bool:
        """Whether the scheme has tables over offsets."""
        return type(self).terms is not Scheme.terms

    @property
    def silent(self) -> bool:
        """Whether the scheme has no effect at all, like NoPE."""
        return not (self.embeds or self.rotates or self.has_terms)

    def parts_of_sum(self) -> list[Scheme]:
        """Returns the schemes that this one is the sum of; itself if it is not a sum."""
        return [self]

    def embed(self, pos: Tensor) -> Tensor | None:
        """[*pos.shape, d_model], to be added to the token embeddings by the model; None if there is nothing."""
        return None

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, Lq, D] and keys [B, Hkv, Lk, D] of the content product; positions are [B or 1, L].

        Returns them in the dtype given or a wider one. The relative terms see the unrotated q and k.
        """
        return q, k

    def terms(self, r: Tensor) -> Terms:
        """Tables over the offsets r (1-D, integer, in any order): column c belongs to r[c].

        A column depends on its own offset alone. Tables are float32 or wider whatever the parameters are.
        """
        return Terms()

    def scale(self, head_dim: int) -> float:
        """The scale of the logits when `attend` is not told one."""
        return 1 / math.sqrt(head_dim)

    def parameter_count(self) -> int:
        """The number of parameters by the paper's formula, from the options alone."""
        return 0

    @classmethod
    def arguments(cls) -> dict[str, inspect.Parameter]:
        """What a scheme is built with. Early releases of Python 3.11 take `__new__` for a signature of the class."""
        found = dict(inspect.signature(cls.__init__).parameters)
        found.pop("self", None)
        return found

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def options(self) -> dict[str, Any]:
        """The options that were given, without the model's dimensions."""
        return {key: value for key, value in self.given.items() if key not in DIMS}

    def __str__(self) -> str:
        options = ",".join(f"{key}={_spell(value)}" for key, value in self.options().items())
        return f"{self.name()}:{options}" if options else self.name()

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.given.items())


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def wide(x: Tensor) -> Tensor:
    """float32 or wider: half-precision parameters must not make half-precision tables."""
    return x if x.dtype == torch.float64 else x.float()


def exact(x: Tensor) -> Tensor:
    """Integers as the widest float of the device, for formulas without parameters."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def check_positions(scheme: Scheme, pos: Tensor) -> Tensor:
    """Positions as int64; TypeError for anything but integers."""
    if pos.dtype == torch.bool or pos.is_floating_point() or pos.is_complex():
        raise TypeError(f"{scheme.name()}: positions must be integers, got {pos.dtype}")
    return pos.long()


def check_int(scheme: Scheme, name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{scheme.name()}: {name} must be a whole number ≥ {at_least}, got {value!r}")


def check_bool(scheme: Scheme, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{scheme.name()}: {name} must be True or False, got {value!r}")


def check_float(scheme: Scheme, name: str, value: Any, *, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < float("inf"):
        raise ValueError(f"{scheme.name()}: {name} must be a finite number > {above:g}, got {value!r}")


def check_choice(scheme: Scheme, name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in list(choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{scheme.name()}: {name} must be one of {known}, got {value!r}")


def check_even(scheme: Scheme, name: str, value: int) -> None:
    if value % 2:
        raise ValueError(f"{scheme.name()}: {name} must be even (sines and cosines come in pairs), got {value}")
