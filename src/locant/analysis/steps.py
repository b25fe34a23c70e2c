"""Names for the steps of a transformer's layer. `layout` finds the modules of a model that compute them."""

from __future__ import annotations

INPUT, NORM, QUERY, KEY, VALUE = "input", "layer norm", "query", "key", "value"
LOGITS, WEIGHTS, ATTENTION = "logits", "weights", "attention output"
RESIDUAL, FEED_FORWARD, OUTPUT = "residual", "feed-forward output", "layer output"

STEPS = [INPUT, NORM, QUERY, KEY, VALUE, LOGITS, WEIGHTS, ATTENTION, RESIDUAL, FEED_FORWARD, OUTPUT]
"""In the order of a layer. Logits are scaled. The attention output is after W_o. For `weights` tables hold Σ_n w_mn²
where they hold a variance for the others."""
