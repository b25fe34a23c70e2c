"""Another position scheme for a loaded Hugging Face model. Needs transformers ≥ 5 (`pip install 'locant[hf]'`).

Importing this package teaches transformers to open the folders that `save_pretrained` writes for a swapped model.
"""

from locant.hf import interface
from locant.hf.loading import load, register
from locant.hf.readout import Native, native
from locant.hf.swapped_config import refuse_to_build
from locant.hf.swapping import swap
from locant.hf.word_order import WordOrderWarning

interface.register()
refuse_to_build()
register()

__all__ = ["Native", "WordOrderWarning", "load", "native", "swap"]
