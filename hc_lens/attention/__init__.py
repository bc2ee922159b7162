"""Attention patterns, with the words that the tokens belong to."""
