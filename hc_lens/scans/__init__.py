"""Ablation by suffix re-execution: run only what the removal of some units can change."""
