"""`Flat`: the parameters of a scheme as one vector θ, and the scheme as a function of it, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locant.schemes import Scheme


class _Holder(nn.Module):
    """Calls a function with a scheme, so that `functional_call` can put other parameters into it."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, function: Callable[[Scheme], Any]) -> Any:
        return function(self.scheme)


class Flat:
    """A copy of a scheme on the CPU in float64, with its parameters as a vector."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = copy.deepcopy(scheme).cpu().double().eval()
        named = dict(self.scheme.named_parameters())
        self.parameters = [parameter.requires_grad_() for parameter in named.values()]
        self.names, self.shapes = list(named), [parameter.shape for parameter in named.values()]
        self.learned = self.joined(self.parameters).detach()
        self.scale = self.joined([self._scale(name, parameter) for name, parameter in named.items()])
        self._holder = _Holder(self.scheme)

    def __len__(self) -> int:
        return len(self.learned)

    def _scale(self, name: str, parameter: Tensor) -> Tensor:
        scale = torch.as_tensor(self.scheme.parameter_scale(name), dtype=torch.float64).detach()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(
                f"{self.scheme}: parameter_scale({name!r}) must return finite numbers above 0; got "
                f"{float(scale.min()):g} … {float(scale.max()):g}"
            )
        return scale.expand(parameter.shape)

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """Returns tensors of the shapes of the parameters as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0).double()

    def call(self, theta: Tensor, function: Callable[[Scheme], Any]) -> Any:
        """Returns function(scheme), where the scheme has the parameters theta [P]."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = zip(self.names, self.shapes, theta.split(sizes), strict=True)
        values = {f"scheme.{name}": part.reshape(shape) for name, shape, part in parts}
        return torch.func.functional_call(self._holder, values, (function,))

    def jacobian(self, function: Callable[[Scheme], Tensor]) -> Tensor:
        """Returns the derivatives [M, P] of function(scheme) [M] by the parameters, one parameter after another."""
        columns, unit = [], torch.zeros_like(self.learned)
        for place in range(len(self)):
            unit[place] = 1
            columns.append(torch.func.jvp(lambda theta: self.call(theta, function), (self.learned,), (unit,))[1])
            unit = torch.zeros_like(self.learned)
        return torch.stack(columns, dim=1).detach()

    def score(self, output: Tensor, towards: Tensor) -> Tensor:
        """Returns the product [P] of `towards` and the derivatives of an output that was computed from `scheme`."""
        found = torch.autograd.grad(output, self.parameters, towards, retain_graph=True, allow_unused=True)
        return self.joined(
            [torch.zeros(s).double() if x is None else x for x, s in zip(found, self.shapes, strict=True)]
        )

    @torch.enable_grad()
    def blocks(self, r: Tensor, *, joint: bool = False) -> list[Tensor]:
        """Returns the places of parameters that depend on each other, if `r` are the offsets of visible pairs.

        For attention weights a block is a head, if heads share no parameters; otherwise all parameters are one block.
        With `joint` it is one for all heads: what follows the attention mixes them.
        """
        everything = [torch.arange(len(self))]
        if self.scheme.rotates or self.scheme.has_sides:
            return everything
        terms = self.scheme.terms(r)
        tables = [table for table in terms.tables().values() if table.requires_grad]
        heads = {table.shape[0] for table in tables}
        if terms.pair is not None or len(heads) != 1 or heads == {1}:
            return everything
        draw = torch.Generator().manual_seed(0)  # random weights: derivatives do not cancel in the sum
        used = []
        for head in range(heads.pop()):
            total = sum((torch.randn(table[head].shape, generator=draw, dtype=torch.float64) * table[head]).sum()
                        for table in tables)  # fmt: skip
            assert isinstance(total, Tensor)
            used.append(self.score(total, torch.ones((), dtype=torch.float64)) != 0)
        count = torch.stack(used).sum(0)
        if bool((count > 1).any()):
            return everything
        idle = (count == 0).nonzero()[:, 0]  # each is a block of its own: nothing depends on it
        used = [torch.stack(used).any(0)] if joint else used
        return [each.nonzero()[:, 0] for each in used if bool(each.any())] + [at[None] for at in idle]
