"""Experiments: what is trained, on what, how runs are kept, and what they show."""
