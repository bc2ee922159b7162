"""Which output of a notebook carries the scripts that all its figures share.

1. The outputs of a notebook are one page in JupyterLab, VS Code and nbconvert, so one of them is
   enough. It is that of the cell that first shows a figure, and within it the first figure.
2. If that cell runs again, its new output takes the place of the old one, and carries them again.
   A cell is known by the id that the front end sends, or else by its text.
3. Every other output draws with the scripts that are on the page. Where they are not (the first
   output was cleared, or one output is shown alone) it draws plain maps; `attention.js` does that.
4. Outside a notebook, and in Colab, where each output is a page of its own, each carries them.
"""

from __future__ import annotations

import sys
from typing import Any

CARRIER = "_hc_lens_carrier"
"""Attribute of the notebook's shell: the cell that carries the scripts, and its run number."""


def carries_bundle() -> bool:
    """Whether the output that is made now is the one that carries the scripts."""
    shell = _shell()
    if shell is None:
        return True
    now = (_cell(shell), shell.execution_count)
    carrier = getattr(shell, CARRIER, None)
    carries = carrier is None or (carrier[0] == now[0] and carrier != now)
    if carries:
        setattr(shell, CARRIER, now)
    return carries


def _shell() -> Any:
    """The shell of the notebook that runs this, if its outputs are one page."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "google.colab" in sys.modules:
        return None
    return ipython.get_ipython()


def _cell(shell: Any) -> str:
    """What tells the running cell apart from others, also after it was edited if that is known."""
    request = shell.get_parent() if hasattr(shell, "get_parent") else {}
    texts = shell.user_ns.get("_ih") or [""]
    return request.get("metadata", {}).get("cellId") or texts[-1]
