"""``python -m analyses.extractive``."""

from analyses.extractive.cli import main

main()
