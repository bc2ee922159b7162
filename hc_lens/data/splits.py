"""Which split of some rows is meant: by its name, for training, or held out.

1. A split goes by its own name or by its short name: ``dev`` finds ``validation``.
2. Rows train on ``train``, else on the first split that is not held out, else on the only one.
3. Rows are held out in a validation split, else in a test split, else in one that is not for
   training, else in the only one.
"""

from __future__ import annotations

from hc_lens.data import readers
from hc_lens.errors import check_choice

HELD_OUT = ("validation", "dev", "test")
"""How the names of splits begin that are not for training."""


class Splits:
    """What has a name and named splits."""

    name: str
    """Name of the rows."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        raise NotImplementedError

    def training_split(self) -> str:
        """``train``, else the first split that is not held out, else the only one."""
        if "train" in self.splits:
            return "train"
        others = [split for split in self.splits if not split.startswith(HELD_OUT)]
        return (others or self.splits)[0]

    def held_out_split(self) -> str:
        """The validation split, else a test split, else one not for training, else the only one."""
        kept = [split for name in HELD_OUT for split in self.splits if split.startswith(name)]
        others = [split for split in self.splits if split != self.training_split()]
        return (kept or others or self.splits)[0]

    def split_named(self, split: str | None) -> str:
        """The split of that name or short name (``dev``); by default the only one, or ``train``."""
        if split is None:
            split = self.splits[0] if len(self.splits) == 1 else "train"
        long = readers.split_in(split)
        if split not in self.splits and long is not None and long in self.splits:
            return long
        check_choice(f"a split of {self.name}", split, self.splits)
        return split
