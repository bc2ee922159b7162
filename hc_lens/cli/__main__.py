"""``python -m hc_lens.cli``."""

from hc_lens.cli import main

main()
