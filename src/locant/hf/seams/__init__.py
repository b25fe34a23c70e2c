"""Seams for models whose attention does not go through transformers' attention interface: one file per kind.

While a seam is open, every self-attention of the model calls `interface.attention`. Closed, the model is as
transformers made it.
"""
