"""From models, schemes and tensors to tables: frozen dataclasses. `locant.report` draws figures from them."""
