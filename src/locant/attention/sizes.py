"""Questions about sizes that must not split a compiled graph.

While torch.compile or torch.export traces, a size is a symbol. A Python `if` on it records the answer as a condition of
the graph: sizes with another answer need another graph, and an exported program refuses them. Where both answers lead
to a correct result, `always` asks without a record.
"""

from __future__ import annotations

import torch

from locant.schemes.base import exporting


def always(condition: bool) -> bool:
    """Whether a condition on sizes holds; in traced code, whether it holds for every size that the graph serves."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loaded already: it is tracing this

    return statically_known_true(condition)


def same(a: int, b: int) -> bool:
    """Whether two sizes are equal. A compiled graph may depend on it; an exported one must serve every size."""
    return always(a == b) if exporting() else decided(a == b)


def decided(condition: bool) -> bool:
    """The condition as a plain bool, which operators require. In traced code the graph then depends on the answer."""
    return True if condition else False  # noqa: SIM210 - bool() of a symbol is a symbol again
