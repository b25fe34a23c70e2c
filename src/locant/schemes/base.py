"""`Scheme`: a rule for how a transformer uses the positions of its tokens, as one small object.

Most schemes override one of four methods:

    embed(pos)                     -> vectors that the model adds to the token embeddings
    rotate(q, k, q_pos, k_pos)     -> queries and keys of the content product
    terms(r)                       -> tables over the offset r = key position − query position
    sides(tokens)                  -> numbers and vectors of each token; with `read`, from its hidden state

and `parameter_count`, the formula of the paper. A scheme gets no masks, caches nothing, and has no maximum length
unless its mathematics has one. The model decides whether layers share a scheme.

Other packages never test the class of a scheme. They use its methods and properties, so a scheme written elsewhere is
treated like ours.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from locant.schemes.components import Components
from locant.terms import Far, Sides, Terms, Tokens

DIMS = ("n_heads", "head_dim", "d_model")
"""Constructor arguments that come from the model, not from the spec string."""

SchemeT = TypeVar("SchemeT", bound="Scheme")


class Scheme(nn.Module):
    """Base class of all schemes. Used directly, it has no effect, like NoPE."""

    # ---- declarations ------------------------------------------------------------------------------

    shift_invariant: bool = True
    """Adding a constant to all positions changes nothing."""
    pairwise: bool = True
    """The logit of (i, j) depends on the tokens and positions i and j alone, not on other keys."""
    incremental: bool = True
    """Decoding one query at a time equals the full pass: later keys do not change the result for earlier queries."""
    parallel: ClassVar[bool] = True
    """All positions are computed at once, without a recurrence along the sequence."""
    max_length: int | None = None
    """Positions must be below this; None if there is no limit."""
    causal_only: bool = False
    """The formula is meant for keys at or before the query; attention refuses later keys. Compiled code cannot read a
    mask, and trusts it."""
    reads_queries: bool = False
    """`sides` needs the hidden states of the queries: a caller passes x to `attend`."""
    reads_keys: bool = False
    """`sides` needs the hidden states of the keys."""
    read_width: int = 0
    """Numbers that `read` keeps of each token and head."""
    read_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that `read` alone uses. `terms` does not depend on them, which saves comparing them."""
    mappable: bool = True
    """Its positions or offsets can be mapped. False for a scheme that goes by the order and the number of tokens."""
    hides: bool = False
    """It hides pairs of tokens, by logits far below all others. A softcap would show them again, and is refused."""
    has_levels: bool = False
    """`sides` returns levels. A sum can have one part that does."""
    planes: tuple[str, int] | None = None
    """For a scheme that rotates: which pairs of coordinates. Rotations of the same pairs commute."""

    widens: bool = False
    """For a scheme that rotates: it returns queries and keys of more numbers than it gets."""
    own_keys: bool = False
    """For a scheme that rotates: every query head needs a key head of its own; grouped heads are refused."""
    takes_reals: bool = False
    """Its formula holds for real positions and offsets (float64) too. A `Map` interpolates the tables of all others."""
    ordered: bool = False
    """Its formula holds only if later tokens have larger positions, or the same. Maps must then be monotone."""
    grows: bool = False
    """For a scheme that rotates: it also multiplies by factors that grow towards the future, so logits may be huge."""

    cacheable: ClassVar[bool] = False
    """`terms` depends on the parameters, buffers and plain attributes of the scheme alone, so attention may cache it.

    True for the schemes of this package. A subclass does not inherit it: a class from elsewhere declares it itself.
    """

    dims_of_class: ClassVar[tuple[str, ...]] = ()
    """Which dimensions of the model are attributes of the class, such as properties. Those of an object are its own."""

    given: dict[str, Any]
    """The constructor arguments as the caller wrote them, so that str() returns the spec."""

    def __new__(cls: type[SchemeT], *args: Any, **kwargs: Any) -> SchemeT:
        self = super().__new__(cls)
        self.__dict__["given"] = kwargs
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "terms" in cls.__dict__ and "reach" not in cls.__dict__:  # the parent's reach holds for its own terms only
            cls.reach = Scheme.reach  # type: ignore[method-assign]
        if "terms" in cls.__dict__ and "read_parameters" not in cls.__dict__:  # so does this
            cls.read_parameters = ()
        if {"embed", "rotate", "terms"} & cls.__dict__.keys() and "takes_reals" not in cls.__dict__:
            cls.takes_reals = False  # so does this
        cls.dims_of_class = tuple(dim for dim in DIMS if hasattr(cls, dim))
        if "cacheable" not in cls.__dict__:
            cls.cacheable = cls.__module__.startswith(__package__ + ".")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reach":
            raise AttributeError(
                f"{type(self).__name__}.reach cannot be set: it describes the terms of the scheme (see Scheme.reach). "
                f"Define it as a property, or give your option another name"
            )
        super().__setattr__(name, value)

    @property
    def reach(self) -> int | None:
        """Distance beyond which terms are constant: terms(r) = terms(±reach) for |r| ≥ reach. None if there is none.

        Attention then requests no offsets beyond it, and fast back ends skip work. A class that defines `terms` must
        define its own reach.
        """
        return None

    # ---- properties --------------------------------------------------------------------------------

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
    def has_sides(self) -> bool:
        """Whether the scheme computes something for each token of a call."""
        return type(self).sides is not Scheme.sides

    @property
    def has_far(self) -> bool:
        """Whether the scheme rotates differently for keys at a distance."""
        return type(self).rotate_far is not Scheme.rotate_far

    @property
    def reads(self) -> bool:
        """Whether the scheme needs the hidden states of tokens."""
        return self.reads_queries or self.reads_keys

    @property
    def silent(self) -> bool:
        """Whether the scheme has no effect at all, like NoPE."""
        return not (self.embeds or self.rotates or self.has_terms or self.has_sides)

    @property
    def has_attention_parameters(self) -> bool:
        """Whether the scheme has parameters that act in attention, not only in the token embeddings."""
        acts = self.rotates or self.has_terms or self.has_sides
        return acts and next(self.parameters(), None) is not None

    @property
    def position_table(self) -> Tensor | None:
        """The table [length, d_model] of a scheme that is a table of absolute positions; None for all others."""
        return None

    @property
    def bucket_table(self) -> Tensor | None:
        """The table [n_heads, buckets] of a scheme that is a bias per bucket of offsets; None for all others."""
        return None

    def parts_of_sum(self) -> list[Scheme]:
        """Returns the schemes that this one is the sum of; itself if it is not a sum."""
        return [self]

    # ---- mathematics -------------------------------------------------------------------------------

    def embed(self, pos: Tensor) -> Tensor | None:
        """Returns [*pos.shape, d_model], which the model adds to the token embeddings; None to add nothing."""
        return None

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries [B, H, Lq, D] and keys [B, Hkv, Lk, D] of the content product; positions are [B or 1, L].

        Their dtype is that of the arguments or a wider one. A scheme that `widens` returns more than D numbers, as many
        for queries as for keys. The relative terms use the unrotated q and k.
        """
        return q, k

    def terms(self, r: Tensor) -> Terms:
        """Returns tables over the offsets r (1-D, integer, in any order): column c belongs to r[c].

        A column depends on its own offset alone. Tables are float32 or wider, whatever the dtype of the parameters,
        and so are the sums that make the gradients of parameters (see `wide`).
        """
        return Terms()

    def read(self, x: Tensor) -> Tensor:
        """Returns what the scheme keeps of hidden states x [B, L, d_model]: [B, n_heads, L, W], float32 or wider.

        One token at a time: a row depends on its own token alone. A model that caches keys caches this too.
        """
        raise NotImplementedError(f"{self} does not read hidden states")

    def sides(self, tokens: Tokens) -> Sides:
        """Returns vectors, levels and temperatures of the tokens of a call."""
        return Sides()

    def rotate_far(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Far | None:
        """Returns other rotations for keys at a distance; None where `rotate` serves for all."""
        return None

    def scale(self, head_dim: int) -> float:
        """Returns the logit scale that `attend` uses if the caller passes none."""
        return 1 / math.sqrt(head_dim)

    def parameter_count(self) -> int:
        """Returns the number of parameters by the paper's formula, from the options alone."""
        return 0

    def components(self, r: Tensor) -> Components | None:
        """Returns the kernels whose sum the scheme is, at the offsets r; None if it is not such a sum."""
        return None

    def basis(self, r: Tensor) -> Tensor | None:
        """Returns the curves over the offset that every token mixes, at the offsets r: [H or 1, R, curves].

        None if the scheme has none.
        """
        return None

    # ---- fitting and adapting ----------------------------------------------------------------------

    def parameter_scale(self, name: str) -> Tensor | float:
        """Returns the characteristic scale of a parameter: how much it changes when the scheme changes noticeably.

        `locant.fit` and `locant.adapt` optimize every parameter in units of its scale (a preconditioner). The scale is
        positive and broadcasts to the parameter. `name` is that of `named_parameters`. A parameter of a nested scheme
        has the scale that the nested scheme gives it; all others have 1 by default.
        """
        path, _, rest = name.partition(".")
        while rest:
            module = self.get_submodule(path)
            if isinstance(module, Scheme):
                return module.parameter_scale(rest)
            step, _, rest = rest.partition(".")
            path = f"{path}.{step}"
        return 1.0

    @property
    def can_start_from_curve(self) -> bool:
        """Whether `start_from_curve` sets the parameters. By default: whether the class defines it."""
        return type(self).start_from_curve is not Scheme.start_from_curve

    def start_from_curve(self, offsets: Tensor, bias: Tensor, weight: Tensor) -> None:
        """Sets the parameters so that the bias of the scheme is near a measured curve: the start of a fit.

        offsets   [R] integers, increasing.
        bias      [n_heads, R], the curve of each head. A constant per head has no meaning: softmax ignores it.
        weight    [R], how much each offset matters.

        All three are on the CPU, the last two in float64. Fitting minimizes a divergence from this start, so a rough
        approximation is enough. By default a scheme keeps its initial values.
        """

    def start_from_table(self, first: Tensor, rest: Tensor) -> None:
        """Sets the parameters to the two vectors [d_model] that `locant.fit` keeps of a table of absolute positions.

        `first` is the row of position 0 and `rest` the mean of the other rows. By default nothing happens.
        """

    def clear_values(self) -> None:
        """Sets parameters that change values, but no logits, to zero effect.

        `locant.fit` matches attention weights, which do not depend on them. By default there are none.
        """

    # ---- spelling ----------------------------------------------------------------------------------

    @classmethod
    def arguments(cls) -> dict[str, inspect.Parameter]:
        """Returns the arguments of the constructor.

        From `__init__`, because early releases of Python 3.11 return the signature of `__new__` for the class.
        """
        found = dict(inspect.signature(cls.__init__).parameters)
        found.pop("self", None)
        return found

    @classmethod
    def name(cls) -> str:
        """Returns the name of the scheme in spec strings."""
        return cls.__name__.lower()

    def options(self) -> dict[str, Any]:
        """Returns the options that the caller gave, without the model's dimensions."""
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
    """Returns x in float32 or wider: half-precision parameters must not make half-precision tables.

    Widen a parameter before indexing it. The gradient of an index is a sum, and it is summed in the dtype that was
    indexed.
    """
    return x if x.dtype == torch.float64 else x.float()


def readable(x: Tensor) -> bool:
    """Returns whether Python can read the values of x: not while torch.compile traces, and not under vmap."""
    if torch.compiler.is_compiling():
        return False
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return True


def exporting() -> bool:
    """Returns whether torch.export or the exporter of ONNX traces: its one graph serves every size."""
    return torch.compiler.is_compiling() and bool(getattr(torch.compiler, "is_exporting", lambda: False)())


def exact(x: Tensor) -> Tensor:
    """Returns integers in the widest float of the device, for formulas without parameters."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def check_positions(scheme: Scheme, pos: Tensor) -> Tensor:
    """Returns positions as int64; raises TypeError unless they are integers.

    Where the scheme takes reals, float64 stays as it is: a `Map` made it. Narrower floats are somebody's mistake.
    """
    if scheme.takes_reals and pos.is_floating_point() and pos.dtype == exact(pos).dtype:
        return pos
    if pos.dtype == torch.bool or pos.is_floating_point() or pos.is_complex():
        raise TypeError(f"{scheme.name()}: positions must be integers, got {pos.dtype}")
    return pos.long()


def check_int(scheme: Scheme, name: str, value: Any, *, at_least: int) -> None:
    """Raises ValueError unless the option is an integer ≥ at_least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{scheme.name()}: {name} must be a whole number ≥ {at_least}, got {value!r}")


def check_bool(scheme: Scheme, name: str, value: Any) -> None:
    """Raises ValueError unless the option is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{scheme.name()}: {name} must be True or False, got {value!r}")


def check_float(scheme: Scheme, name: str, value: Any, *, above: float) -> None:
    """Raises ValueError unless the option is a finite number > above."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < float("inf"):
        raise ValueError(f"{scheme.name()}: {name} must be a finite number > {above:g}, got {value!r}")


def check_choice(scheme: Scheme, name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ValueError unless the option is one of the choices."""
    if value not in list(choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{scheme.name()}: {name} must be one of {known}, got {value!r}")


def check_even(scheme: Scheme, name: str, value: int) -> None:
    """Raises ValueError unless the size is even."""
    if value % 2:
        raise ValueError(f"{scheme.name()}: {name} must be even (sines and cosines come in pairs), got {value}")
