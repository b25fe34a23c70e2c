"""The imports of every run. The fork server does them once for all runs.

It computes nothing: threads of a parent process do not exist after a fork.
"""

import gc
from importlib import import_module

MODULES = (
    "torch",
    "datasets",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "locant.hf",
    "locant.experiments.trainer",
    "locant.experiments.workers",
)

gc.disable()  # collections between imports find no garbage, and take a fifth of the time
for name in MODULES:
    import_module(name)
gc.freeze()  # collections in the runs skip these objects, so that their memory stays shared
gc.enable()
