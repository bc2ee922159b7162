"""The version of hc_lens, which results name."""

__version__ = "0.1.0"
