"""The pages of reproductions: the figures of each paper, one file each."""
