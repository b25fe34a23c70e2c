"""A pretrained model keeps its quality under another position scheme: fitted without training, then distilled."""

from locant.adaptation.adapting import Adapted, adapt
from locant.adaptation.fitting import Fit, fit

__all__ = ["Adapted", "Fit", "adapt", "fit"]
