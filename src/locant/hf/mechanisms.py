"""How positions enter the models of transformers, and how to remove them exactly.

One class per mechanism. Each can `silence` a stack (the module that runs the layers), that is, replace the native
positions by a module that adds nothing, or by the embedding of a scheme; and `read` the native positions as schemes.
`silence` returns what it replaced, so it can be restored bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from locant.hf.interface import EMBED
from locant.hf.methods import replace_method
from locant.schemes import T5, Learned, Rope, Scheme


@dataclass
class Replaced:
    """A module or parameter that was replaced, and where it was."""

    parent: nn.Module
    name: str
    original: Any

    def put_back(self) -> None:
        """Restores the original."""
        for hooks in (self.parent._forward_pre_hooks, self.parent._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_put_patches, _take_patches)]:
                del hooks[key]
        in_place = isinstance(self.original, nn.Module) and self.name in self.parent._modules
        if hasattr(self.parent, self.name) and not in_place:  # in place: optimizers identify parameters by their order
            delattr(self.parent, self.name)
        if self.original is not None:
            setattr(self.parent, self.name, self.original)


@dataclass(frozen=True)
class Read:
    """The positions of a stack as schemes: one for the token embeddings, one per layer."""

    kind: str
    embed: Scheme | None
    layers: list[Scheme] | None  # None: nothing inside attention
    native_count: bool = True  # they belong to tokens as the model itself numbers them

    @property
    def shift_invariant(self) -> bool:
        """Whether it makes no difference at which number the positions begin."""
        return all(scheme is None or scheme.shift_invariant for scheme in [self.embed, *(self.layers or [])])


class Mechanism(Protocol):
    """One way in which positions enter a stack."""

    @property
    def kind(self) -> str:
        """Value of `Native.kind` for this mechanism: absolute, rotary, bias, …"""
        ...

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        """Removes the native positions (unless `keep`), adds `embed`, and returns what was replaced."""
        ...

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        """Returns the native positions as schemes, one per attention module."""
        ...

    def width(self, stack: nn.Module) -> int:
        """Returns the size of the vectors that are added to the token embeddings."""
        ...


def _find(stack: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return (stack.get_submodule(parent) if parent else stack), name


class Embedded(nn.Module):
    """Replaces a table of absolute positions: adds the embedding of a scheme, or nothing."""

    def __init__(self, scheme: Scheme | None, native: nn.Module | None, shift: int) -> None:
        super().__init__()
        self.scheme, self.native, self.shift = scheme, native, shift

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = kwargs.get("position_ids")
        ids = args[0] if ids is None else ids
        # Adding a zero without dimensions changes neither shape nor dtype.
        total = torch.zeros((), device=ids.device)
        if self.native is not None:
            total = total + self.native(*args, **kwargs)
        if self.scheme is not None:
            shift = 0 if "position_ids" in kwargs else self.shift  # OPT adds its shift inside the table
            places = ids - shift
            embedded = self.scheme.embed(places.clamp(min=0))
            if embedded is not None:  # padding has no position
                total = total + embedded * (places >= 0).unsqueeze(-1)
        return total


@dataclass(frozen=True)
class Table:
    """A table of absolute positions, added to the token embeddings (BERT, GPT-2, OPT, …)."""

    path: str
    kind: str = "absolute"

    def first(self, stack: nn.Module) -> int:
        """Returns the row of the first token."""
        return 0

    def table(self, stack: nn.Module) -> Tensor:
        """Returns the whole table, unused rows included."""
        weight = stack.get_submodule(self.path).weight
        assert isinstance(weight, Tensor)
        return weight

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = _find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Embedded(embed, original if keep else None, self.first(stack)))
        return [Replaced(parent, name, original)]

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        return Read(self.kind, _learned(self.table(stack)[self.first(stack) :]), None)

    def width(self, stack: nn.Module) -> int:
        return self.table(stack).shape[1]


@dataclass(frozen=True)
class TableAfterPadding(Table):
    """RoBERTa: rows up to the padding token's id are unused."""

    def first(self, stack: nn.Module) -> int:
        return int(stack.config.pad_token_id) + 1  # type: ignore[union-attr, arg-type]


@dataclass(frozen=True)
class TableAndBias(TableAfterPadding):
    """MPNet: RoBERTa's table, and one T5 bias shared by all layers."""

    bias: str = "encoder.relative_attention_bias"
    kind: str = "absolute and bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        encoder = stack.get_submodule("encoder")
        # MPNet computes its bias once for all layers, [1, H, L, L]. The schemes hold it now, so it is not computed.
        replace_method(encoder, "compute_position_bias", _no_bias)
        bias = Replaced(encoder, "compute_position_bias", None)
        return [*super().silence(stack, embed, keep), _unbias(stack, self.bias), bias]

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        weight: Any = stack.get_submodule(self.bias).weight
        if weight.shape[0] != 32:  # the model uses 32, whatever its config says
            raise NotImplementedError(
                f"{type(stack).__name__} has {weight.shape[0]} buckets of offsets, but the model uses 32"
            )
        scheme = _t5(weight, max_distance=128, bidirectional=True)
        return Read(self.kind, _learned(self.table(stack)[self.first(stack) :]), [scheme] * len(attentions))


@dataclass(frozen=True)
class TableAfterTwo(Table):
    """OPT: the first two rows are unused."""

    def first(self, stack: nn.Module) -> int:
        return 2


@dataclass(frozen=True)
class CountingTable(TableAfterTwo):
    """BART: a table like OPT's that numbers tokens itself, so it can be read and kept, but not replaced."""

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        raise NotImplementedError(
            f"{type(stack).__name__} counts positions inside its table, which can be read and kept but not replaced; "
            f"add a scheme that acts in attention to it: swap(model, spec, keep_native=True)"
        )


class EmbeddedPatches(nn.Module):
    """The same for a model that adds its table as a parameter: recomputed before each forward pass."""

    def __init__(self, scheme: Scheme | None, native: nn.Parameter | None, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scheme, self.native, self.shape = scheme, native, shape

    def forward(self, like: Tensor) -> Tensor:
        total = torch.zeros((), dtype=like.dtype, device=like.device).expand(1, *self.shape)
        if self.native is not None:
            total = total + self.native
        if self.scheme is not None:
            embedded = self.scheme.embed(torch.arange(self.shape[0], device=like.device))
            assert embedded is not None
            total = total + embedded.to(like.dtype)
        return total


def _put_patches(module: nn.Module, args: Any) -> None:
    like = next(module.parameters())
    module.__dict__["position_embeddings"] = getattr(module, EMBED)(like)


def _take_patches(module: nn.Module, args: Any, output: Any) -> None:
    module.__dict__["position_embeddings"] = torch.zeros(1)  # a tensor with a gradient history cannot be deep-copied


@dataclass(frozen=True)
class Patches:
    """A parameter [1, patches + 1, width] added to the class token and the patches of an image (ViT)."""

    path: str = "embeddings.position_embeddings"
    kind: str = "absolute"

    def table(self, stack: nn.Module) -> nn.Parameter:
        """Returns the table, [1, patches + 1, width]."""
        parent, name = _find(stack, self.path)
        table = parent._parameters[name]
        assert table is not None
        return table

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = _find(stack, self.path)
        original = self.table(stack)
        delattr(parent, name)
        parent.add_module(EMBED, EmbeddedPatches(embed, original if keep else None, tuple(original.shape[1:])))
        parent.__dict__[name] = torch.zeros(1)  # transformers initialises it; recomputed before each forward pass
        parent.register_forward_pre_hook(_put_patches)
        parent.register_forward_hook(_take_patches)
        return [Replaced(parent, name, original), Replaced(parent, EMBED, None)]

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        return Read(self.kind, _learned(self.table(stack)[0]), None)

    def width(self, stack: nn.Module) -> int:
        return self.table(stack).shape[2]


class Unturned(nn.Module):
    """Replaces a rotary embedding: cos = 1 and sin = 0 rotate nothing."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        one = torch.ones((), dtype=x.dtype, device=x.device).expand(*position_ids.shape, 2 * self.pairs)
        return one, torch.zeros_like(one[:1, :1]).expand_as(one)


@dataclass(frozen=True)
class Rotary:
    """cos and sin made once per forward and applied in every layer (Llama and most since)."""

    path: str = "rotary_emb"
    layout: str | None = "half"  # None: unknown, so it can be silenced but not read
    kind: str = "rotary"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        parent, name = _find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Unturned(_speeds(original)[0].shape[0]))
        return [Replaced(parent, name, original), *_add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        if self.layout is None:
            raise NotImplementedError(
                f"cannot read the rotary positions of {type(stack).__name__}: "
                f"locant does not know how they pair coordinates"
            )
        rotary = stack.get_submodule(self.path)
        return Read(self.kind, None, [_rope(stack, rotary, attention, self.layout) for attention in attentions])

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


class Unbiased(nn.Module):
    """Replaces T5's table of biases: zeros that take no memory."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.__dict__["weight"] = torch.zeros(0)  # transformers initialises it; not a parameter, and not saved

    def forward(self, bucket: Tensor) -> Tensor:
        return torch.zeros((), device=bucket.device).expand(*bucket.shape, self.n_heads)


@dataclass(frozen=True)
class Bias:
    """T5: a bias per head and bucket of offsets, computed in the first layer and used in all."""

    path: str = "block.0.layer.0.SelfAttention.relative_attention_bias"
    kind: str = "bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        return [_unbias(stack, self.path), *_add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module]) -> Read:
        parent, name = _find(stack, self.path)
        weight = getattr(parent, name).weight
        distance: Any = parent.relative_attention_max_distance
        scheme = _t5(weight, max_distance=distance, bidirectional=not parent.is_decoder)
        return Read(self.kind, None, [scheme] * len(attentions))

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


def _no_bias(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    return None


def _unbias(stack: nn.Module, path: str) -> Replaced:
    parent, name = _find(stack, path)
    original = getattr(parent, name)
    setattr(parent, name, Unbiased(original.weight.shape[1]))
    return Replaced(parent, name, original)


def _add_embedding(stack: nn.Module, embed: Scheme | None) -> list[Replaced]:
    if embed is None:
        return []
    stack.add_module(EMBED, embed)
    return [Replaced(stack, EMBED, None)]


def _learned(table: Tensor) -> Learned:
    scheme = Learned(length=table.shape[0], d_model=table.shape[1]).to(table)
    with torch.no_grad():
        scheme.table.copy_(table)
    return scheme


def _t5(weight: Tensor, *, max_distance: int, bidirectional: bool) -> T5:
    """The scheme of a table [buckets, heads]."""
    buckets, n_heads = weight.shape
    scheme = T5(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, n_heads=n_heads).to(weight)
    with torch.no_grad():
        scheme.table.copy_(weight.mT)
    return scheme


def _speeds(rotary: nn.Module, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Radians per position, and the factor on cos and sin, that the model uses now."""
    for prefix in (f"{layer_type}_", "full_attention_", ""):
        speed = getattr(rotary, f"{prefix}inv_freq", None)
        if speed is not None:
            return speed, float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    raise NotImplementedError(
        f"{type(rotary).__name__} has no inv_freq: locant does not know this kind of rotary embedding"
    )


def _rope(stack: nn.Module, rotary: nn.Module, attention: nn.Module, layout: str) -> Rope:
    """The rotary settings of one layer, read from the config and compared with the frequencies in use."""
    config: Any = stack.config
    types = getattr(config, "layer_types", None)
    layer_type = types[attention.layer_idx] if types is not None else None
    parameters = config.rope_parameters
    if layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    speed, magnitude = _speeds(rotary, layer_type)
    head_dim = int(attention.head_dim) if hasattr(attention, "head_dim") else int(attention.head_size)  # type: ignore[arg-type]

    kind = parameters.get("rope_type", "default")
    names = {"factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
             "beta_slow": "beta_slow", "low_freq_factor": "low", "high_freq_factor": "high"}  # fmt: skip
    options: dict[str, Any] = {ours: parameters[theirs] for theirs, ours in names.items() if parameters.get(theirs)}
    if kind == "dynamic":
        options["original"] = config.max_position_embeddings
    if kind == "default":
        options = {}
    scaling = "none" if kind == "default" else kind
    rope = Rope(
        theta=float(parameters["rope_theta"]),
        layout=layout,
        partial=2 * speed.shape[0] / head_dim,
        scaling=scaling,
        head_dim=head_dim,
        **options,
    )
    ours = rope.frequencies(torch.ones(1, dtype=torch.long)).flatten().to(speed)
    if not torch.allclose(ours, speed, rtol=1e-4, atol=0) or abs(rope.magnitude() - magnitude) > 1e-4:
        raise NotImplementedError(
            f"the rotary settings {parameters} of {type(stack).__name__} do not give the frequencies of {rope}"
        )
    return rope
