"""Hugging Face checkpoints as hooked models: `load`, and one file per family of encoders."""
