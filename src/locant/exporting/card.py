"""The model card of an exported model."""

from __future__ import annotations

from typing import Any

from locant.exporting.source import Source
from locant.hf.checkpoint import hub_name
from locant.hf.saving import base_model
from locant.version import __version__


def card(done: Any, source: Source) -> str:
    """Returns README.md of the folder of an `Exported`."""
    model = source.model
    length = "any number of" if done.length is None else f"{done.length:,}"
    lines = [
        f"---\ntags: [position-embeddings]{base_model(hub_name(model.name_or_path))}\n---\n",
        f"# {type(model).__name__} with other positions, as {done.to}\n",
        f"Written by `locant export` (locant {__version__}). It opens without locant, and reads {length} tokens.\n",
    ]
    if source.plan is not None:
        schemes = list(dict.fromkeys(map(str, source.plan.schemes())))
        lines.append(f"Schemes of the model: {', '.join(f'`{scheme}`' for scheme in schemes)}.\n")
    if done.exact:
        lines.append(
            f"It computes what that model computes: on random tokens, with and without padding, the outputs differ by "
            f"at most {done.difference:.1e} of their size.\n"
        )
    else:
        lines.append(
            f"It is an approximation of that model. Agreement ({done.measure}) with it on held-out text:\n\n"
            "| tokens | start | fitted |\n|--:|--:|--:|\n"
            + "\n".join(f"| {row.length:,} | {row.start:.4f} | {row.fitted:.4f} |" for row in done.agreement)
            + "\n"
        )
    lines += [f"- {notice[0].upper()}{notice[1:]}." for notice in done.notices]
    return "\n".join(lines) + "\n"
