"""How much rounding a result in float32 may have: one rule, for the output and for every gradient.

With logits S, weights P, output o and its gradient g, gradients are sums over pairs:

    dθ = Σ_ij dS_ij · ∂S_ij/∂θ        dS_ij = P_ij · (g_i·v_j − g_i·o_i)        dv_j = Σ_i P_ij · g_i

The rounding of dS_ij reaches dθ multiplied by the derivative of the logit: a distance for a slope, x² exp(−b x²) for
the sharpness b of a bump, 1 for the bias of a table. `rounding` computes these products for any scheme. It draws
roundings at random, lets autograd carry them to θ, and takes the root mean square over a few draws. Their sizes:

    of a pair     P_ij · ‖g_i ∘ v_j‖     the sum over coordinates in g_i·v_j
    of a query    P_ij · ‖g_i ∘ o_i‖     g_i·o_i and the sum of the softmax, which all pairs of a query share

Where θ is in the values, the sum is over queries with the terms P_ij · g_i, as it is for v.
"""

import torch

import locant
from locant.attention import eager
from locant.attention.request import prepare

DRAWS = 4
FEW_PAIRS = 2**12
"""With more pairs than this, one draw is enough for q and k, which have many elements."""
EPS = torch.finfo(torch.float32).eps


def rounding(scheme, tensors, grad, **how):
    """The rounding of the output and of the gradients of q, k, v and every parameter, in this order.

    Each has the shape of its result; None for a parameter without gradient. `grad` is the gradient of the output.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    groups = q.shape[1] // v.shape[1]
    out, weights = locant.attend(q, k, v, scheme, impl="eager", need_weights=True, **how)
    request = prepare(q, k, v, scheme, **how)
    logits = eager.logits(request)
    values, p = v.detach().repeat_interleave(groups, dim=1), weights.detach()
    pair = p * (grad.square() @ values.square().mT).sqrt()  # [B, H, Lq, Lk]
    query = p * (grad * out.detach()).square().sum(-1, keepdim=True).sqrt()

    def carried(leaves):
        """The squares of one draw of roundings in the gradients of some leaves."""
        draws = [(logits, pair * torch.randn_like(pair) + query * torch.randn_like(query[..., :1]))]
        if request.terms.value is not None:
            draws.append((out, grad * torch.randn_like(grad[..., :1])))
        found = [torch.autograd.grad(x, leaves, y, allow_unused=True, retain_graph=True) for x, y in draws]
        return [[x.square() for x in parts if x is not None] for parts in zip(*found, strict=True)]

    of_content = mean_root([carried((q, k)) for _ in range(DRAWS if p.numel() < FEW_PAIRS else 1)])
    parameters = list(scheme.parameters())
    of_parameters = mean_root([carried(parameters) for _ in range(DRAWS)]) if parameters else []
    of_v = (p.square().mT @ grad.square()).unflatten(1, (v.shape[1], groups)).sum(2).sqrt()
    of_out = (p.square() @ values.square()).sqrt()
    return [None if x is None else EPS * x for x in (of_out, *of_content, of_v, *of_parameters)]


def mean_root(draws):
    """Root mean squares over draws, one for each leaf; None for a leaf that nothing was carried to."""
    leaves = zip(*draws, strict=True)
    return [(sum(sum(x) for x in squares) / len(draws)).sqrt() if squares[0] else None for squares in leaves]
