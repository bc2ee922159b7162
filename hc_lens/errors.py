"""The one exception that hc_lens raises for input it cannot use."""


class HcLensError(ValueError):
    """Input that hc_lens cannot use: says what was expected, what was given and what to do."""
