"""`replace_method`: another function in place of a method, for one object instead of its whole class.

The attribute is a `Method`, not a bound method. Pickle stores a bound method as "this object's attribute of that name",
which is the method of the class while the object is being restored. A swapped model would then run without its
positions after `torch.load`, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any


class Method:
    """Calls `function(owner, …)`. It can be copied and pickled together with its owner."""

    def __init__(self, function: Callable[..., Any], owner: Any, name: str) -> None:
        self.__func__ = function  # as a bound method has it: accelerate wraps the function, not the method
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.owner, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The method of the class: `inspect.signature` returns its arguments."""
        return MethodType(getattr(type(self.owner), self.name), self.owner)

    @property
    def __code__(self) -> CodeType:
        """Where the function is: `torch.export` names it."""
        return self.__func__.__code__


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes `owner.name(…)` call `function(owner, …)`. `function` must be at the top of a module, for pickle."""
    owner.__dict__[name] = Method(function, owner, name)
