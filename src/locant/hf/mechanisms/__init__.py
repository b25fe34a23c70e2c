"""How positions enter the models of transformers, and how to remove them exactly.

One file per mechanism. Each can `silence` a stack (the module that runs the layers), that is, replace the native
positions by a module that adds nothing, or by the embedding of a scheme; and `read` the native positions as schemes.
`silence` returns what it replaced, so it can be restored bit for bit.
"""

from locant.hf.mechanisms.alibi import FalconBias, LinearBias
from locant.hf.mechanisms.base import Mechanism, Read, Replaced, Run
from locant.hf.mechanisms.bias import Bias, Biases, TableAndBias
from locant.hf.mechanisms.choice import Choice
from locant.hf.mechanisms.disentangled import Disentangled
from locant.hf.mechanisms.nothing import Nothing
from locant.hf.mechanisms.patches import EmbeddedPatches, Patches
from locant.hf.mechanisms.projected_sinusoids import ProjectedSinusoids
from locant.hf.mechanisms.relative_logits import RelativeLogits
from locant.hf.mechanisms.rotary import Rotary
from locant.hf.mechanisms.rotary_table import RotaryTable, SharedRotaryTable
from locant.hf.mechanisms.table import (
    Carried,
    CarriedTable,
    CarriedTableAfterPadding,
    Embedded,
    IndexedTable,
    Table,
    TableAfterPadding,
    TableAfterTwo,
)

__all__ = [
    "Bias",
    "Biases",
    "Carried",
    "CarriedTable",
    "CarriedTableAfterPadding",
    "Choice",
    "Disentangled",
    "Embedded",
    "EmbeddedPatches",
    "FalconBias",
    "IndexedTable",
    "LinearBias",
    "Mechanism",
    "Nothing",
    "Patches",
    "ProjectedSinusoids",
    "Read",
    "RelativeLogits",
    "Replaced",
    "Rotary",
    "RotaryTable",
    "Run",
    "SharedRotaryTable",
    "Table",
    "TableAfterPadding",
    "TableAfterTwo",
    "TableAndBias",
]
