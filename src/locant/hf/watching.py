"""One run of a model on a few tokens, watched: which modules attend, what every module returns, and where softmax runs.

`finding` and `probing` learn from it how a model works, without knowing its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from locant.hf.call import AttentionCall
from locant.hf.listening import observing

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
WHOLE = {F.scaled_dot_product_attention: (-2, -2), F.multi_head_attention_forward: (0, 0)}
"""Functions that compute a whole attention, and the dimension of queries and of keys that counts tokens."""


@dataclass
class Watched:
    """What happened in a run. Modules are in the order in which they ran."""

    calls: list[AttentionCall] = field(default_factory=list)  # that went through the seam
    elsewhere: dict[nn.Module, list[tuple[int, ...]]] = field(default_factory=dict)
    """Innermost modules that ran a softmax outside the seam, and the shapes of its inputs."""
    returned: list[tuple[nn.Module, Any, Any, Any]] = field(default_factory=list)
    """Modules that were to be recorded: module, positional arguments, keyword arguments, output."""

    def attended_elsewhere(self, lengths: set[int]) -> list[nn.Module]:
        """Returns the modules with a softmax over keys outside the seam. A router's softmax is over experts.

        Attention to blocks of tokens (LongT5) has other lengths; such modules are known by their names.
        """

        def over_keys(module: nn.Module, shape: tuple[int, ...]) -> bool:
            both = len(shape) > 2 and shape[-1] in lengths and shape[-2] in lengths
            return both or (len(shape) > 2 and "Attention" in type(module).__name__)

        return [
            module for module, shapes in self.elsewhere.items() if any(over_keys(module, shape) for shape in shapes)
        ]


class _Softmaxes(TorchFunctionMode):
    """Records every softmax that runs while `enabled`, with the innermost module that is running."""

    def __init__(self, found: dict[nn.Module, list[tuple[int, ...]]], running: list[nn.Module]) -> None:
        super().__init__()
        self.found, self.running, self.enabled = found, running, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.enabled and self.running and (func in SOFTMAX or func in WHOLE):
            shape = tuple(args[0].shape)
            if func in WHOLE:
                of_queries, of_keys = WHOLE[func]
                shape = (1, shape[of_queries], args[1].shape[of_keys])
            self.found.setdefault(self.running[-1], []).append(shape)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(base: nn.Module, record: Callable[[nn.Module], bool] = lambda module: False) -> Iterator[Watched]:
    """Watches the runs of a model inside the block. `record` chooses the modules whose outputs are kept."""
    found, running = Watched(), [base]
    softmaxes = _Softmaxes(found.elsewhere, running)

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()
        if record(module):
            found.returned.append((module, args, kwargs, output))

    def before(call: AttentionCall) -> None:
        softmaxes.enabled = False
        found.calls.append(call)

    def after(call: AttentionCall, out: Tensor) -> None:
        softmaxes.enabled = True

    hooks = []
    for module in base.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)]
    try:
        with observing(before=before, after=after), softmaxes:
            yield found
    finally:
        for hook in hooks:
            hook.remove()
