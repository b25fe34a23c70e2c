"""What every run imports: the fork server does it once for all of them. Nothing is computed: threads do not fork."""

import datasets  # noqa: F401
import scipy.stats  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Trainer  # noqa: F401

import locant.analysis.invariance
import locant.experiments.run
import locant.hf  # noqa: F401
