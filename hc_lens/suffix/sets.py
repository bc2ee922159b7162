"""Sets of units as a user writes them.

1. A set is a list of units or labels, one unit, or a label such as ``"L2.H5+L3.H7"``.
2. Its own label joins its units with ``+`` in the order in which the model runs them: layer by
   layer, heads before the MLP. Two ways of writing one set have the same label.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hc_lens.errors import HcLensError
from hc_lens.units import Unit, UnitSpace

FULL = "none"
"""The label of the full model among the sets."""
UnitSet = Iterable[Unit | str] | Unit | str
"""A set as a user writes it: ``["L2.H5", "L3.H7"]``, ``"L2.H5+L3.H7"`` or ``"L2.H5"``."""


def as_units(units: UnitSet) -> tuple[Unit, ...]:
    """A set as a user writes it, as units in the order in which the model runs them."""
    if isinstance(units, str):
        units = units.split("+")
    given = list(units) if isinstance(units, Iterable) else [units]
    found = [Unit.parse(unit) if isinstance(unit, str) else unit for unit in given]
    strange = [unit for unit in found if not isinstance(unit, Unit)]
    if strange:
        raise HcLensError(
            "expected units such as 'L4.H0' or hc.Unit(4, 0) in a set, got a "
            f"{type(strange[0]).__name__}; list the units with hc.UnitSpace.of(model).labels"
        )
    return tuple(sorted(found, key=lambda unit: (unit.layer, unit.head is None, unit.head or 0)))


def set_label(units: UnitSet) -> str:
    """The label of a set, such as ``"L2.H5+L3.H7"``: its units in the order the model runs them."""
    return "+".join(str(unit) for unit in as_units(units))


def resolve_sets(
    space: UnitSpace,
    sets: Iterable[UnitSet] | None,
    units: Iterable[Unit | str] | None,
    pairs: bool,
) -> list[tuple[Unit, ...]]:
    """The sets that a scan was asked for; anything doubtful is an HcLensError."""
    if isinstance(sets, str | Unit):
        raise HcLensError(
            f"expected a list of sets, got the one set {sets}; write sets=[[...]] around its units"
        )
    if sets is not None:
        if units is not None or pairs:
            raise HcLensError(
                "expected either sets= or units= (with pairs= if wanted), got both; leave one out"
            )
        found = [as_units(given) for given in sets]
        if not found:
            raise HcLensError("expected at least one set to ablate, got none; leave sets out for "
                              "every unit alone")  # fmt: skip
    else:
        singles = list(space) if units is None else [space[i] for i in space.indices(units)]
        found = [(unit,) for unit in singles]
        if len(found) < (2 if pairs else 1):
            raise HcLensError(
                f"expected at least {2 if pairs else 1} units to ablate, got {len(found)}; leave "
                "units out for every unit of the model"
            )
        if pairs:
            found += [as_units(pair) for pair in itertools.combinations(singles, 2)]
    _check_sets(space, found)
    return found


def _check_sets(space: UnitSpace, sets: Sequence[tuple[Unit, ...]]) -> None:
    seen: set[tuple[Unit, ...]] = set()
    for place, units in enumerate(sets):
        if not units:
            raise HcLensError(
                f"expected units in every set, set {place} is empty; leave it out, as the full "
                f"model is always in the results as {FULL!r}"
            )
        space.indices(units)
        if units in seen:
            raise HcLensError(
                f"expected each set once, got {set_label(units)} again at place {place}; "
                "remove the repeats"
            )
        seen.add(units)
