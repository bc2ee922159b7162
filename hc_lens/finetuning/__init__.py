"""Fine-tuning of a classifier, with a series of checkpoints."""
