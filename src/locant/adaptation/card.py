"""What an adapted model says of itself: the table of before and after, and a model card around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locant.adaptation.adapting import Adapted, Row


def table(measure: str, rows: list[Row]) -> str:
    """The table in Markdown."""
    scores = list(rows[0].scores)
    head = ["", f"agreement ({measure})", *scores, "parameters of its positions"]
    lines = [
        [row.state, f"{row.agreement:.4f}", *(f"{row.scores[name]:.4f}" for name in scores), f"{row.parameters:,}"]
        for row in rows
    ]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def card(done: Adapted, what: dict[str, Any]) -> str:
    """README.md of the folder."""
    name = what["model"] or type(done.model).__name__
    trained = "every weight" if what["train"] == "all" else "the parameters of the scheme alone"
    steps, budget, seed, length = done.steps, what["budget"], what["seed"], what["length"]
    where = (
        "on lines of the text that were not trained on" if what["lines"] > 1 else "on the text itself, a single line"
    )
    return f"""---
library_name: locant
base_model: {name}
---
# {name.rstrip("/").rpartition("/")[2]} with {done.spec}

A model with another position scheme, made by locant from {name}: the scheme was fitted to what the model's own
positions did in attention, then {trained} learned from the original for {steps:,} steps (budget {budget},
seed {seed}, sequences up to {length} tokens, {what["lines"]:,} lines of text without labels).

{table(done.measure, done.rows)}

Agreement is with the original, {where}; *silenced* is the model with its
positions taken away, *fitted* with the scheme set and nothing trained
({done.fit.summary}).

```python
import locant
model = locant.load("this folder")
```
"""
