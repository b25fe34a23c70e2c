"""The effect of position on the outputs of a model: move the positions, shuffle the tokens, lengthen the input.

    shift     ‖h(p + s) − h(p)‖ / ‖h(p)‖        every position moved by s; h is the last hidden state
    shuffle   the loss of the last token after a shuffled prefix (Haviv et al. 2022, arXiv 2203.16634); for an encoder
              ‖e − e′‖ / ‖e‖ of the mean-pooled embedding e, compared with that of another text
    length    the loss of the same last tokens after more and more context; for an encoder, the change of the embedding
              of the same first tokens in longer inputs
    share     σ²_position / σ²_total of the hidden states of each layer

All take a model of transformers, swapped or not, and token ids [B, L] without padding. The model runs in eval mode. Of
an encoder-decoder they measure the encoder. A row that cannot be measured holds NaN and a note with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from locant.analysis.behaviour.decomposition import Decomposition, decompose

if TYPE_CHECKING:
    from locant.analysis.behaviour.longer_inputs import Length, length
    from locant.analysis.behaviour.moved_positions import Shift, shift
    from locant.analysis.behaviour.position_share import Share, share
    from locant.analysis.behaviour.shuffled_tokens import Shuffle, shuffle

__all__ = [
    "Decomposition",
    "Length",
    "Share",
    "Shift",
    "Shuffle",
    "decompose",
    "length",
    "share",
    "shift",
    "shuffle",
]


def __getattr__(name: str) -> Any:
    """Imports what needs transformers when it is used: it is an optional dependency, and slow to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from locant.analysis.behaviour import longer_inputs, moved_positions, position_share, shuffled_tokens

    modules = (longer_inputs, moved_positions, position_share, shuffled_tokens)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
