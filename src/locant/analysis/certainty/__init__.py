"""How sure the learned curves of a scheme are: a Laplace posterior over its few parameters.

The parameters θ of one scheme (TISA has 15 per head with 5 kernels) get a normal posterior with full covariance:

    p(θ | text) ∝ p(text | θ)^(1/T) · N(θ; 0, diag(s²) / α)        Λ = H / T + α diag(s)⁻²

H   curvature of the loss at the learned parameters: the Fisher information, or Gauss–Newton matrix (scores.py)
T   noise scale of a loss that is no log-likelihood (scores.py); 1 for one that is
α   damping, by which the evidence is largest (posterior.py); s is the characteristic scale of each parameter

likelihood   p(text | θ)                                                 T
tokens       Π_t p_θ(x_t | context)                    (tokens.py)       1: the ordinary posterior
attention    Π_i w_ij(θ), keys j drawn with p_i        (attention.py)    estimated with `original`, otherwise 1
vectors      Π_s N(u°_s; u_s(θ), σ² I)                 (vectors.py)      estimated

The last two are losses that are minimized, by `locant.fit` and `locant.adapt`, rather than log-likelihoods. Their
posterior is that of generalized Bayes: T is chosen so that its width is that of the differences between texts.

Parameters outside the scheme are held constant, and so are the schemes of other layers: intervals are conditional on
them. `certainty` measures all schemes of a model; bands.py turns posteriors into intervals of curves, kernels and
buckets.
"""

from locant.analysis.certainty.bands import Band, Bucket, Bump
from locant.analysis.certainty.measuring import Certainty, Place, certainty
from locant.analysis.certainty.posterior import Posterior, posterior

__all__ = ["Band", "Bucket", "Bump", "Certainty", "Place", "Posterior", "certainty", "posterior"]
