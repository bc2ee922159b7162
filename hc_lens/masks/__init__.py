"""Masks on a live model: hooks, ablation, what replaces a removed unit."""
