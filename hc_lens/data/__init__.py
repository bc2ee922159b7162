"""Labelled rows of text (`hc.Task`) into batches for a hooked model (`hc.Batches`)."""
