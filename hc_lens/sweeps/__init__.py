"""Many prunings: checkpoints x sparsities x seeds, resumable, local or on Ray."""
