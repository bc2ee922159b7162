"""Models in which the circuit is known, to try every instrument on.

`planted` makes a random BERT or GPT-2 in which some heads carry the label and everything else is
noise of a chosen size; `compiled` reads a transformer that Tracr compiled from a RASP program. Both
give a `Known`: the model, rows, and the units that matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from hc_lens.circuits.known import Known as Known
    from hc_lens.circuits.planting import PlantedConfig as PlantedConfig
    from hc_lens.circuits.planting import planted as planted
    from hc_lens.circuits.planting import planted_checkpoint as planted_checkpoint
    from hc_lens.circuits.rasp import PROGRAMS as PROGRAMS
    from hc_lens.circuits.rasp import compiled as compiled

__getattr__, __dir__ = exports(__name__, __file__)
