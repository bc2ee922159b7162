"""What the command line knows before it has imported anything: its commands and their sentences."""

from __future__ import annotations

HELP = "--help"

COMMANDS = {
    "demo": "The whole study on the bundled model, without a network.",
    "study": "The whole study on a checkpoint of your own.",
    "report": "Write the report of a study's folder again.",
    "load-check": "Does a checkpoint load, with Hugging Face's logits?",
    "means": "Collect the mean activations of all heads and MLPs.",
    "prune": "Find a subnetwork that does what the model does.",
    "evaluate": "Score a model, and subnetworks of it, case by case.",
    "scan": "Ablate every unit, or sets of units, and tell what changes.",
    "sweep": "Find subnetworks for many checkpoints, sparsities and seeds.",
    "attention": "Draw attention patterns as one HTML file.",
    "finetune": "Fine-tune a classifier, with a series of checkpoints.",
    "analyse": "Run the analysis NAME; NAME --help shows its options.",
}
"""Every command with a sentence for the help."""


class UsageError(Exception):
    """A command line that cannot be read."""
