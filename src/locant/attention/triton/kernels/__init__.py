"""The kernels of the Triton back end: attention with every term, forward and backward, in tiles.

    x_ij     = scale · ( q_iᵀ G_r k_j + p_i·a_r + t_j·c_r ) + b_r + m_r · (e_i + d_j)
    logit_ij = cap · tanh(τ_i x_ij / cap)
    w_ij     = exp(logit_ij) / ( exp(sink) + Σ_l exp(logit_il) )
    out_i    = Σ_j w_ij · (v_j + u_r)

A tile is BM queries × BN keys. The softmax is online, as in FlashAttention, and the backward pass computes the logits
again from the largest logit and the logarithm of the sum of each query.

**Tables of vectors.** A tile with consecutive positions has BM + BN − 1 offsets. The products of its queries with these
columns of a table are one matrix product [BM, band], and row i of it must move i places to the left. Each program
writes the product to scratch memory of its own, which stays in the cache, and reads it with rows that are one number
shorter. Gradients move rows back and are matrix products too (`bands.py`). There are three kinds of tiles:

    far      every pair has the same column (beyond the reach of the scheme): one column, no matrix product
    band     consecutive positions: as above
    scatter  any other positions: column by column, slow and right

Only calls with explicit positions compile the code for scattered tiles.

**Gradients of tables** use no atomics. Program (s, h) of `backward_queries` is the only one that adds to part s of
head h of a buffer, in a fixed order. PyTorch sums the parts. So the same call gives the same bits.

**Operands.** Products have operands of one dtype, that of q and k, and accumulate in float32. In half precision this
rounds weights, gradients of logits and tables of vectors to the dtype, as FlashAttention rounds the weights. Everything
else is float32. A float16 cannot hold every table, so products of a table are computed in TF32 there.

**Files.** `outputs.py`, `by_queries.py` and `by_keys.py` have a kernel each. All three compute the logits of a tile by
`logits.py`, vectors and gradients of tables by `bands.py`, and loads and offsets by `tiles.py`.
"""

from __future__ import annotations

from locant.attention.triton.kernels.by_keys import backward_keys as backward_keys
from locant.attention.triton.kernels.by_queries import backward_queries as backward_queries
from locant.attention.triton.kernels.dropout import kept_weights as kept_weights
from locant.attention.triton.kernels.outputs import forward as forward
