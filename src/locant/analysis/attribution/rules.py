"""The rules of relevance: a run of a model in which every operation is linear in the signal.

`Linearized` is a mode of torch. While it is active, every torch function that receives a *signal* (a tensor that
depends on the explained inputs: it requires a gradient) is computed by one of these rules, without a change of its
value:

    linear          sums, views, products with weights: as they are
    held            softmax, sigmoid, exp, roots, norms: constants of this run
    divided         a / b: b is held
    identity        an activation f(x) = x · c + f(0), with c = (f(x) − f(0)) / x held
    normalized      layer norm, RMS norm: the divisor is held
    halves          a product a · b of two signals: ½ a·[b] + ½ [a]·b, where [ ] is held

The result is a linear function of the inputs and of the constants that are added on the way (biases, f(0), position
tables). Every constant that meets a signal in a sum becomes a leaf of its own. So gradient × input, summed over inputs
and constants, is the output itself. Attention weights and divisors as constants: Ali et al. 2022, arXiv 2202.07304.
The halves of a product: the uniform rule of Achtibat et al. 2024, arXiv 2402.05602.

A function without a rule that would carry signal raises NotImplementedError with its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from locant.hf.interrupts import check

LINEAR = frozenset({
    "__get__", "__getitem__", "alias", "amax", "amin", "as_strided", "atleast_1d", "atleast_2d", "bfloat16",
    "broadcast_to", "chunk", "clone", "column_stack", "constant_pad_nd", "contiguous", "cpu", "cumsum", "cuda",
    "diagonal", "diff", "double", "expand", "expand_as", "flatten", "flip", "float", "fold", "gather", "half",
    "index_select", "masked_select", "max", "mean", "min", "moveaxis", "movedim", "mT", "narrow", "neg", "__neg__",
    "nan_to_num", "pad", "permute", "positive", "ravel", "repeat", "repeat_interleave", "requires_grad_", "reshape",
    "reshape_as", "roll", "select", "select_scatter", "split", "split_with_sizes", "squeeze", "squeeze_", "sum",
    "swapaxes", "swapdims", "t", "take", "take_along_dim", "tensor_split", "tile", "to", "topk", "transpose",
    "transpose_", "tril", "triu", "type", "type_as", "unbind", "unflatten", "unfold", "unsafe_chunk",
    "unsafe_split", "unsqueeze", "unsqueeze_", "view", "view_as", "view_as_complex", "view_as_real", "zero_", "set_",
    "sort",
})  # fmt: skip
"""Functions that are linear in the signal, or choose among its entries."""
SUMS = frozenset({
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub",
    "subtract", "where", "masked_fill", "masked_fill_", "cat", "concat", "concatenate", "stack", "hstack", "vstack",
    "dstack", "copy_", "__setitem__", "index_add", "index_add_", "index_copy", "index_copy_", "index_put",
    "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "slice_scatter", "lerp", "masked_scatter",
    "masked_scatter_", "fill_", "index_fill", "index_fill_",
})  # fmt: skip
"""Functions that put signals and constants together."""
PRODUCTS = frozenset({
    "mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "matmul", "__matmul__", "__rmatmul__", "bmm",
    "mm", "mv", "dot", "inner", "outer", "einsum", "tensordot", "_grouped_mm", "grouped_mm",
})  # fmt: skip
WITH_ADDEND = frozenset({
    "addmm", "addbmm", "baddbmm", "addmv", "addcmul",
})  # fmt: skip
"""Functions whose first argument is added to a product of the next two."""
LAYERS = frozenset({
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "bilinear",
})  # fmt: skip
"""Functions of input, weight and bias."""
QUOTIENTS = frozenset({
    "div", "div_", "__truediv__", "__rtruediv__", "__itruediv__", "divide", "true_divide",
})  # fmt: skip
HELD = frozenset({
    "softmax", "log_softmax", "_softmax", "sigmoid", "sigmoid_", "logsigmoid", "log_sigmoid", "exp", "exp2", "expm1",
    "softplus", "rsqrt", "sqrt", "sqrt_", "rsqrt_", "reciprocal", "norm", "linalg_norm", "linalg_vector_norm",
    "vector_norm", "var", "std", "var_mean", "std_mean", "log", "log2", "logsumexp", "sign", "heaviside", "__rpow__",
    "rpow", "__rdiv__", "detach", "softmin", "cumprod", "prod", "round", "floor", "ceil",
})  # fmt: skip
GATES = (nn.Sigmoid, nn.LogSigmoid, nn.Softplus)
"""Modules of functions that are held."""
ELEMENTWISE = frozenset({
    "gelu", "silu", "relu", "relu_", "tanh", "tanh_", "leaky_relu", "leaky_relu_", "elu", "celu", "selu", "mish",
    "hardswish", "hardtanh", "relu6", "clamp", "clamp_", "clip", "clamp_min", "clamp_max", "abs", "__abs__",
    "square", "softsign", "erf", "sin", "cos", "atan", "asinh", "log1p", "prelu", "rrelu", "threshold",
    "hardshrink", "softshrink", "tanhshrink",
})  # fmt: skip
POWERS = frozenset({
    "pow", "pow_", "__pow__", "__ipow__",
})  # fmt: skip
DROPPED = frozenset({
    "dropout", "dropout1d", "dropout2d", "alpha_dropout", "feature_dropout",
})  # fmt: skip

Leaf = Callable[[Tensor], Tensor]


class Linearized(TorchFunctionMode):
    """Computes by the rules of this file while it is active. `constants` are the leaves of added constants."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner  # named in errors
        self.advice = "explain another model"
        self.enabled = True
        self.constants: list[Tensor] = []
        self.origins: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        """Which text token ids were made of, by tensor: 0 for the text, 1 for the decoder's."""
        self.leaves: Callable[[], list[Tensor]] = lambda: self.constants
        """Returns all leaves of the run."""
        self.held: list[str] | None = None
        """Functions of the caller's own that the rules hold constant; None while the model itself runs."""
        self.embedding: Callable[[Tensor, Tensor], Tensor | None] = lambda ids, found: None
        """Returns the leaf that takes the place of embedded tokens; None for other tables."""
        self.tables: list[tuple[Tensor, Leaf]] = []
        """Tensors that a model indexes by position, and what makes a leaf of the rows."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Runs a block by torch's own rules."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def reading(self) -> Iterator[list[str]]:
        """Runs a function of the caller's on the outputs of the model. Yields the names of functions that were held.

        Tensors of the caller's that require a gradient are no signal: they become constants.
        """
        before = self.owner, self.advice
        self.owner, self.advice, self.held = "the function passed as output", "return another number", []
        try:
            yield self.held
        finally:
            (self.owner, self.advice), self.held = before, None

    def constant(self, value: Tensor) -> Tensor:
        """Returns a constant as a leaf, so that its relevance is counted. Numbers that are not finite stay as they are:
        they hide something."""
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            return value
        leaf = value.detach().requires_grad_()
        self.constants.append(leaf)
        return leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        check()
        name = getattr(func, "__name__", str(func))
        if self.held is not None:
            args, kwargs = self._without_foreign((args, kwargs))
        flat = tree_flatten((args, kwargs))[0]
        if not torch.is_grad_enabled():
            return self._followed(flat, func(*args, **kwargs))
        if name == "embedding":
            return self._embedding(func, args, kwargs)
        if name == "__getitem__":
            for table, leaf in self.tables:
                if args[0] is table:
                    return leaf(func(*args, **kwargs))
        if not any(_is_signal(x) for x in flat):
            return self._followed(flat, func(*args, **kwargs))
        rule = RULES.get(name)
        if rule is not None:
            return rule(self, func, args, kwargs)
        found = func(*args, **kwargs)
        if name not in LINEAR and any(_is_signal(x) for x in tree_flatten(found)[0]):
            raise NotImplementedError(
                f"{self.owner} computes with {name}, for which relevance has no rule that conserves it; {self.advice}"
            )
        return found

    def _embedding(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        ids = args[0] if args else kwargs["input"]
        leaf = self.embedding(ids, found)
        return found if leaf is None else leaf

    def _followed(self, flat: list[Any], found: Any) -> Any:
        """Returns what a function made. Token ids that it made of those of one text belong to that text."""
        texts = {self.origins[x] for x in flat if _is_ids(x) and x in self.origins}
        if len(texts) == 1:
            (text,) = texts
            for x in tree_flatten(found)[0]:
                if _is_ids(x):
                    self.origins[x] = text
        return found

    def _without_foreign(self, given: Any) -> Any:
        """Arguments in which tensors that require a gradient, and come from none of the leaves, are constants."""
        ours = {id(leaf) for leaf in self.leaves()}
        return tree_map(lambda x: x.detach() if _is_signal(x) and not _comes_from(x, ours) else x, given)


def _is_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)


def _comes_from(x: Tensor, leaves: set[int]) -> bool:
    """Whether a tensor was computed from one of some leaves, which are given by their id."""
    if x.grad_fn is None:
        return id(x) in leaves
    nodes: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if id(getattr(node, "variable", None)) in leaves:
            return True
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(new)
        nodes += new
    return False


def _is_signal(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _hold(x: Any) -> Any:
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, x)


# ---- the rules: (mode, function, args, kwargs) -> result -----------------------------------------------------------


def _sum(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    """Constants among the summands become leaves. In place, the tensor that is written to stays the same object."""
    name = func.__name__
    in_place = name in ("__setitem__", "copy_") or (name.endswith("_") and not name.startswith("__"))
    if name in ("__setitem__", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "fill_"):
        at = len(args) - 1
        if at and isinstance(args[at], (int, float)) and args[at] not in (0, 0.0) and math.isfinite(args[at]):
            value = torch.full((), float(args[at]), dtype=args[0].dtype, device=args[0].device)
            args = (*args[:at], mode.constant(value))
    signal = next(x for x in tree_flatten((args, kwargs))[0] if _is_signal(x))
    scale = 1.0 if "alpha" in kwargs else None

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) and not x.requires_grad and x.is_floating_point():
            return mode.constant(x)
        return x

    first, *rest = args if args else ((),)
    if name.strip("_").removeprefix("i").removeprefix("r") in ("add", "sub", "subtract") and scale is None:
        # A number is a summand too.
        numbers = [isinstance(x, (int, float)) and not isinstance(x, bool) and x != 0 for x in (first, *rest)]
        if any(numbers) and all(not isinstance(x, (int, float)) or math.isfinite(x) for x in (first, *rest)):
            args = tuple(
                torch.full((), float(x), dtype=signal.dtype, device=signal.device) if number else x
                for x, number in zip(args, numbers, strict=True)
            )
            first, *rest = args
    if in_place:  # an untouched base of constants: zeros in every model we know; the sum is checked at the end
        return func(first, *tree_map(leaf, rest), **tree_map(leaf, kwargs))
    return func(*tree_map(leaf, args), **tree_map(leaf, kwargs))


def _product(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    operands = [x for x in tree_flatten((args, kwargs))[0] if _is_signal(x)]
    if len(operands) == 1:
        return func(*args, **kwargs)
    flat = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
    if len(flat) != 2:
        raise NotImplementedError(
            f"{mode.owner} multiplies {len(flat)} tensors at once ({func.__name__}), for which relevance has no rule; "
            f"{mode.advice}"
        )
    if func.__name__ in ("mul_", "__imul__"):
        left, right = flat
        return left.copy_((left * right.detach() + left.detach() * right) / 2)
    first, second = flat

    def holding(held: Tensor) -> Any:
        return tree_map(lambda x: x.detach() if x is held else x, args)

    if first is second:  # x·x, also as a product of matrices of one tensor
        if func.__name__ in ("mul", "__mul__", "__rmul__", "multiply"):
            return first * first.detach()
        copy = first.view_as(first)
        return _product(mode, func, tuple(copy if x is second and at else x for at, x in enumerate(args)), kwargs)
    return (func(*holding(second), **kwargs) + func(*holding(first), **kwargs)) / 2


def _with_addend(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    addend, a, b = args[:3]
    addend = addend if _is_signal(addend) else mode.constant(addend)
    if _is_signal(a) and _is_signal(b):
        whole = func(addend, a, b.detach(), *args[3:], **kwargs)
        return (whole + func(addend, a.detach(), b, *args[3:], **kwargs)) / 2
    return func(addend, a, b, *args[3:], **kwargs)


def _layer(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args[:3], strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    others = {key: value for key, value in kwargs.items() if key not in names}
    if func.__name__ == "bilinear" or any(_is_signal(given.get(name)) for name in ("weight", "bias")):
        raise NotImplementedError(
            f"{mode.owner} computes the weights of a layer from its tokens ({func.__name__}), for which relevance has "
            f"no rule; {mode.advice}"
        )
    bias = given.get("bias")
    return func(
        given["input"], given["weight"], None if bias is None else mode.constant(bias), *args[3:], **others
    )  # fmt: skip


def _quotient(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    first, second, *rest = args
    if func.__name__ == "__rtruediv__":  # x.__rtruediv__(1) is 1 / x
        return func(_hold(first), second, *rest, **kwargs)
    return func(first, _hold(second), *rest, **kwargs)


def _held(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.held is not None:
        mode.held.append(func.__name__)
    return func(*_hold(args), **_hold(kwargs))


def _elementwise(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    others = tuple(_hold(each) for each in args[1:] if not isinstance(each, bool))  # without inplace=True
    rest = {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}
    plain = func.__name__.removesuffix("_") if not func.__name__.startswith("__") else func.__name__
    f = getattr(F, plain, None) or getattr(torch, plain, None) if plain != func.__name__ else func
    assert f is not None
    found = identity(mode, lambda value: f(value, *others, **_hold(rest)), x)
    return x.copy_(found) if func.__name__.endswith("_") and plain != func.__name__ else found


def identity(mode: Linearized, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns f(x) as x · c + f(0), with c held."""
    with torch.no_grad():
        zero = f(torch.zeros_like(x))
        value = f(x)
        factor = torch.where(x == 0, torch.zeros_like(value), (value - zero) / x)
        hits = bool((zero != 0).any())
    found = x * factor
    return found + mode.constant(zero) if hits else found


def _power(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    x, exponent = args[0], args[1] if len(args) > 1 else kwargs["exponent"]
    if not _is_signal(x) or not isinstance(exponent, (int, float)) or exponent < 1:
        return _held(mode, func, args, kwargs)  # roots and inverses are divisors
    return identity(mode, lambda value: value**exponent, x)


def _layer_norm(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, dims = given["input"], tuple(range(-len(given["normalized_shape"]), 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide) - x.to(wide).mean(dims, keepdim=True)
    divisor = (centred.detach().square().mean(dims, keepdim=True) + given.get("eps", 1e-5)).sqrt()
    return _scaled(mode, centred / divisor, given, x.dtype)


def _rms_norm(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "normalized_shape", "weight", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, dims = given["input"], tuple(range(-len(given["normalized_shape"]), 0))
    eps = given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    divisor = (wide.detach().square().mean(dims, keepdim=True) + eps).sqrt()
    return _scaled(mode, wide / divisor, given, x.dtype)


def _scaled(mode: Linearized, x: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    weight, bias = given.get("weight"), given.get("bias")
    x = x if weight is None else x * weight
    x = x if bias is None else x + mode.constant(bias)
    return x.to(dtype)


def _batch_norm(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("training") or given["running_mean"] is None:
        raise NotImplementedError(f"{mode.owner} normalizes over a batch, which mixes texts; {mode.advice}")
    x = given["input"]
    shape = (1, -1, *(1 for _ in range(x.ndim - 2)))
    factor = (given["running_var"] + given.get("eps", 1e-5)).rsqrt()
    factor = factor if given.get("weight") is None else factor * given["weight"]
    shift = -given["running_mean"] * factor
    shift = shift if given.get("bias") is None else shift + given["bias"]
    return x * factor.view(shape) + mode.constant(shift.view(shape))


def _normalize(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "p", "dim", "eps")
    given = {"p": 2.0, "dim": 1, "eps": 1e-12, **dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    return x / x.detach().norm(given["p"], given["dim"], keepdim=True).clamp_min(given["eps"])


def _attention(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    """An attention that does not go through the seam: its weights are held."""
    names = ("query", "key", "value")
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    others = {key: _hold(value) for key, value in kwargs.items() if key not in names}
    return func(given["query"].detach(), given["key"].detach(), given["value"], *_hold(args[3:]), **others)


def _dropout(mode: Linearized, func: Any, args: Any, kwargs: Any) -> Any:
    """Models run in eval mode, where dropout does nothing."""
    return func(*args, **kwargs)


Rule = Callable[[Linearized, Any, Any, Any], Any]
RULES: dict[str, Rule] = {
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(WITH_ADDEND, _with_addend),
    **dict.fromkeys(LAYERS, _layer),
    **dict.fromkeys(QUOTIENTS, _quotient),
    **dict.fromkeys(HELD, _held),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(POWERS, _power),
    **dict.fromkeys(DROPPED, _dropout),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "normalize": _normalize,
    "scaled_dot_product_attention": _attention,
}
"""Name of a torch function -> its rule. All functions in LINEAR run as they are."""


@contextmanager
def whole_activations(mode: Linearized, model: nn.Module) -> Iterator[None]:
    """Applies the identity rule to activation modules as a whole, whatever they are made of.

    GELU by tanh is x · (1 + tanh(…)) / 2: by the rules of its parts, the 1 would take relevance as a constant. A module
    counts as an activation if it has no parameters and no parts, and numbers show that each entry of its output
    depends on the same entry of its input alone. Gates (GATES) are held, as their functions are.
    """
    replaced: list[tuple[nn.Module, Any]] = []

    def wrapped(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or not _is_signal(args[0]) or not mode.enabled or isinstance(module, GATES):
                return forward(*args, **kwargs)
            with mode.off(), torch.no_grad():
                whole = _is_elementwise(forward, args[0])
            return identity_off(mode, forward, args[0]) if whole else forward(*args)

        return run

    try:
        for module in model.modules():
            if next(module.children(), None) is None and not _tensors(module):
                replaced.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = wrapped(module, module.forward)
        yield
    finally:
        for module, before in replaced:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


def identity_off(mode: Linearized, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The identity rule for a function that is itself made of torch functions."""
    with mode.off():
        return identity(mode, f, x)


def _tensors(module: nn.Module) -> Sequence[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_elementwise(f: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether entries of f(x) stay the same when every other entry of x becomes 0, and f keeps the shape."""
    value = f(x.detach().clone())
    if not isinstance(value, Tensor) or value.shape != x.shape or not value.is_floating_point():
        return False
    kept = (torch.arange(x.numel(), device=x.device) * 7919 // 3 % 2 == 0).view(x.shape)
    other = f(torch.where(kept, x.detach(), torch.zeros_like(x)))
    return bool(((other == value) | ~kept).all())
