"""The whole study of a classifier or a language model, from its checkpoint to one page.

`run` runs the steps of the paper in one folder (`hc_lens.analyses.study.steps`). Names
are imported on first use.
"""

# ruff: noqa: F401 (the names are listed for `exports`)

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from hc_lens.analyses.study.config import StudyConfig, demo, read_settings
    from hc_lens.analyses.study.steps import report, run, summary

__getattr__, __dir__ = exports(__name__, __file__)
