"""Changes the position scheme of a trained model and keeps its quality: fit without training, then distill."""

from locant.adaptation.adapting import adapt
from locant.adaptation.fitting import Fit, fit
from locant.adaptation.result import Adapted

__all__ = ["Adapted", "Fit", "adapt", "fit"]
