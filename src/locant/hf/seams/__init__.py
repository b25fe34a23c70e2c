"""Seams for models whose attention does not go through transformers' attention interface.

While a seam is open, every self-attention of the model calls `interface.attention`. Closed, the model is as
transformers made it. `opening` is the mechanism: a seam is a table of attention classes and of the methods that it
replaces in their instances. The other files hold these methods, by how a class is written:

    inner       classes with a method `_attn(query, key, value, mask)`: GPT-Neo, GPT-J, CodeGen, …
    textbook    BERT's relatives: projections, a product, a softmax
    bart        BART's relatives: scaled queries, one class for self-attention and cross-attention
    xlm         XLM's and Flaubert's, with masks of 0 and 1
    linear      Bloom, MPT and Falcon, which add ALiBi (or rotate) themselves
    deberta     DeBERTa's three products
    xlnet       XLNet's, with the batch in the middle

`families` lists the families, with records of their positions or without. A model that is only observed, not swapped,
computes the bits that it always did: a replaced method then calls the original one, or the same operations in the same
order.
"""
