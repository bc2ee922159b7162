"""``python -m analyses.composition``."""

from analyses.composition.cli import main

main()
