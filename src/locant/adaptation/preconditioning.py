"""Optimizers that work in units of each parameter's characteristic scale (`Scheme.parameter_scale`).

The sharpness of TISA's kernels spans four decades. Adam's steps have the size of the learning rate whatever the
parameter, and L-BFGS starts from the assumption that all parameters are alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme

Scales = dict[nn.Parameter, Tensor | float]

LARGE = 1024.0
"""Parameters with a larger scale take Adam's step from zero. Added to the parameter itself in float32, a step of the
size of the learning rate would be rounded away before it is multiplied by the scale."""


def parameter_scales(module: nn.Module) -> Scales:
    """Returns the characteristic scale of every parameter of the schemes in a module that requires a gradient."""
    found: Scales = {}
    for scheme in module.modules():  # outer schemes come before the schemes they contain, and decide for them
        if isinstance(scheme, Scheme):
            for name, parameter in scheme.named_parameters():
                if parameter.requires_grad and parameter not in found:
                    found[parameter] = _checked(scheme, name, parameter)
    return found


def _checked(scheme: Scheme, name: str, parameter: nn.Parameter) -> Tensor | float:
    scale = scheme.parameter_scale(name)
    numbers = torch.as_tensor(scale)
    try:
        fits = torch.broadcast_shapes(numbers.shape, parameter.shape) == parameter.shape
    except RuntimeError:
        fits = False
    if not fits or not bool((numbers.isfinite() & (numbers > 0)).all()):
        got = f"a tensor {list(numbers.shape)}" if not fits else f"{numbers.min():g} … {numbers.max():g}"
        raise ValueError(
            f"{scheme}: parameter_scale({name!r}) must return finite numbers above 0 that broadcast to the parameter, "
            f"{list(parameter.shape)}; got {got}"
        )
    return scale


class ScaledAdamW(torch.optim.AdamW):
    """AdamW whose steps are multiplied by the scale of each parameter that has one. No weight decay.

    Decay would pull a curve to zero.
    """

    def __init__(self, groups: list[dict[str, Any]], scales: Scales) -> None:
        super().__init__(groups, weight_decay=0.0, fused=True)  # fused takes a seventh of the time, on CPUs too
        self.scales = scales
        self.large = {parameter for parameter, scale in scales.items() if float(torch.as_tensor(scale).max()) > LARGE}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        before = {parameter: parameter.clone() for parameter in self.scales}
        for parameter in self.large:
            parameter.zero_()
        super().step()
        for parameter, scale in self.scales.items():
            step = parameter if parameter in self.large else parameter - before[parameter]
            parameter.copy_(before[parameter] + step * scale)
        return loss


class _OutOfTime(Exception):
    """Ends an optimization whose time is over."""


@torch.no_grad()
def minimize(
    loss: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    scales: Scales,
    *,
    iterations: int,
    seconds: float = math.inf,
) -> bool:
    """Sets parameters to a minimum of a loss, by L-BFGS over parameter / scale; returns False if out of time.

    loss     returns the loss and adds its gradients to the `grad` of the parameters.
    seconds  after this time the search ends, and the parameters are the best it has found.
    """
    sizes = [scales[parameter] for parameter in parameters]
    scaled = [(parameter / size).requires_grad_() for parameter, size in zip(parameters, sizes, strict=True)]
    optimizer = torch.optim.LBFGS(scaled, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    @torch.no_grad()  # LBFGS enables gradients for its closure
    def write() -> None:
        for parameter, value, size in zip(parameters, scaled, sizes, strict=True):
            parameter.copy_(value * size)

    end, least, best = time.perf_counter() + seconds, math.inf, [value.detach().clone() for value in scaled]
    evaluations, finished = 0, True

    def closure() -> Tensor:
        nonlocal evaluations, least, best
        if evaluations and time.perf_counter() > end:
            raise _OutOfTime
        evaluations += 1
        write()
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            total = loss()
        for parameter, value, size in zip(parameters, scaled, sizes, strict=True):
            value.grad = torch.zeros_like(value) if parameter.grad is None else parameter.grad * size
        if seconds < math.inf and float(total) < least:
            least, best = float(total), [value.detach().clone() for value in scaled]
        return total

    try:
        optimizer.step(closure)
    except _OutOfTime:
        finished = False
        for value, found in zip(scaled, best, strict=True):
            value.copy_(found)
    write()
    for parameter in parameters:
        parameter.grad = None
    return finished
