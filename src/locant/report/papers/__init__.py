"""Figures of the reproductions, one file per paper."""
