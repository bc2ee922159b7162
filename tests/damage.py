"""What can happen to a file on disk; the same as in the campaign of the benchmarks."""

from docs.benchmarks.damage import DAMAGES, edit, flip, replace, swap, truncate

__all__ = ["DAMAGES", "edit", "flip", "replace", "swap", "truncate"]
