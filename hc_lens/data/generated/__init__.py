"""Prompts that are made from a seed: one file a generator, each with a function `rows`."""
