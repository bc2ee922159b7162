"""Find a subnetwork: hard-concrete gates, baselines, the result on disk."""
