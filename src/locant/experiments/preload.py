"""The imports of every run. The fork server does them once for all runs.

It computes nothing: threads of a parent process do not exist after a fork.
"""

import gc
import os
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
command = os.getppid()
for name in MODULES:
    if os.getppid() != command:
        raise SystemExit  # the command has ended: its arguments were wrong
    import_module(name)
gc.freeze()  # collections in the runs skip these objects, so their memory stays shared
gc.enable()
