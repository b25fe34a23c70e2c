"""The figures of the claims of each paper."""
