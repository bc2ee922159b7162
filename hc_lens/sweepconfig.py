"""What a sweep runs: checkpoints x sparsities x seeds, as settings that go through a file.

1. Models and rows are named by text (`hc_lens.spec`), so another process or machine reads the same.
2. Everything is checked when the settings are made: a sweep of many hours does not find a wrong
   sparsity at its end.
3. ``from_file`` reads TOML or YAML; ``describe`` gives the plain values back.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hc_lens.errors import HcLensError
from hc_lens.pruneconfig import PruneConfig
from hc_lens.spec import DataSpec, check_keys

PRESETS = {"reference": PruneConfig.reference}
"""Named sets of pruning settings."""
_OWN = ("sparsity", "seed")
_TABLES = ("checkpoints", "train", "evaluation", "prune", "means")
_LISTS = {"sparsities": (float, int), "seeds": (int,)}
_NEEDED = ("checkpoints", "train", "evaluation", "sparsities", "seeds")


@dataclass(frozen=True)
class SweepConfig:
    """Which runs a sweep holds."""

    checkpoints: Mapping[str, str]
    """Name -> model string of `hc_lens.spec.read_model`, in order of training."""
    train: DataSpec
    """Rows to prune on."""
    evaluation: Mapping[str, DataSpec]
    """Name -> rows that every subnetwork is evaluated on, such as ``id`` and ``ood``."""
    sparsities: tuple[float, ...]
    """Fractions of the units to remove."""
    seeds: tuple[int, ...]
    """Seeds of the pruning."""
    prune: Mapping[str, Any] = field(default_factory=dict)
    """`PruneConfig` settings other than sparsity and seed; ``preset = "reference"`` starts from
    those of the public code."""
    means: DataSpec | None = None
    """Rows of the mean activations; None for those of `train`."""

    def __post_init__(self) -> None:
        _check_names("checkpoints", self.checkpoints, str)
        _check_names("evaluation", self.evaluation, DataSpec)
        for name, kinds in _LISTS.items():
            _check_list(name, getattr(self, name), kinds)
        frozen = {
            "sparsities": tuple(float(sparsity) for sparsity in self.sparsities),
            "seeds": tuple(self.seeds),
            # Copies: a sweep that is under way must not change with the caller's dict.
            "checkpoints": dict(self.checkpoints),
            "evaluation": dict(self.evaluation),
            "prune": dict(self.prune),
        }
        for name, value in frozen.items():
            object.__setattr__(self, name, value)
        self._check_prune()

    def _check_prune(self) -> None:
        """Every setting of pruning is known and every run's settings can be made."""
        fields = [item.name for item in dataclasses.fields(PruneConfig)]
        known = ["preset", *(name for name in fields if name not in _OWN)]
        for name in _OWN:
            if name in self.prune:
                raise HcLensError(
                    f"expected {name} among the sweep's own lists, got it in the prune settings; "
                    f"write {'sparsities' if name == 'sparsity' else 'seeds'} = [...]"
                )
        check_keys(self.prune, known, "the prune settings")
        preset = self.prune.get("preset")
        if preset is not None and preset not in PRESETS:
            raise HcLensError(
                f"expected a preset among {list(PRESETS)}, got {preset!r}; leave it out for ours"
            )
        if callable(self.prune.get("loss")):
            raise HcLensError(
                "expected a loss with a name ('kl' or 'cross-entropy') in a sweep, got a function, "
                "which another process cannot read; call hc.prune for each run instead"
            )
        for item in dataclasses.fields(PruneConfig):
            if item.name in self.prune:
                _check_kind(item.name, self.prune[item.name], item.default)
        for sparsity in self.sparsities:
            self.prune_config(sparsity, self.seeds[0])

    def prune_config(self, sparsity: float, seed: int) -> PruneConfig:
        """The pruning settings of one run."""
        settings = {name: value for name, value in self.prune.items() if name != "preset"}
        for name in ("stretch", "keep"):
            if name in settings:
                settings[name] = tuple(settings[name])
        make = PRESETS.get(self.prune.get("preset", ""), PruneConfig)
        return make(sparsity=sparsity, seed=seed, **settings)

    @property
    def n_runs(self) -> int:
        """Number of runs: checkpoints x sparsities x seeds."""
        return len(self.checkpoints) * len(self.sparsities) * len(self.seeds)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any], where: str = "the sweep") -> SweepConfig:
        """The sweep that plain values describe, such as those of a settings file."""
        check_keys(described, (item.name for item in dataclasses.fields(cls)), where)
        missing = [name for name in _NEEDED if name not in described]
        if missing:
            raise HcLensError(
                f"expected {', '.join(_NEEDED)} in {where}, missing {', '.join(missing)}; add them"
            )
        entries = {f"evaluation.{name}": spec for name, spec in _table(described, "evaluation")}
        for name, value in {**described, **entries}.items():
            if name in _TABLES or name in entries:
                _table({name: value}, name)
        _check_names("checkpoints", described["checkpoints"], str)
        values = dict(described)
        for name, kinds in _LISTS.items():
            _check_list(name, described[name], kinds)
            values[name] = tuple(described[name])
        for name in ("train", "means"):
            if name in values:
                values[name] = DataSpec.from_dict(values[name], f"{name} of {where}")
        values["evaluation"] = {
            name: DataSpec.from_dict(spec, f"evaluation.{name} of {where}")
            for name, spec in _table(described, "evaluation")
        }
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> SweepConfig:
        """The sweep that a ``.toml``, ``.yaml`` or ``.yml`` file describes."""
        path = Path(path)
        if path.suffix not in (".toml", ".yaml", ".yml"):
            raise HcLensError(
                f"expected a .toml, .yaml or .yml file for a sweep, got {path}; rename it"
            )
        try:
            described = _parse(path.suffix, path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # each parser's own error is a ValueError
            raise HcLensError(
                f"expected a readable sweep file, got {path}: {error}; correct it"
            ) from error
        if not isinstance(described, dict):
            raise HcLensError(
                f"expected settings with names in {path}, got {type(described).__name__}; "
                "see the example in docs/method/sweep.md"
            )
        return cls.from_dict(described, path.name)

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, which `from_dict` reads."""
        described: dict[str, Any] = {
            "checkpoints": dict(self.checkpoints),
            "train": self.train.describe(),
            "evaluation": {name: spec.describe() for name, spec in self.evaluation.items()},
            "sparsities": list(self.sparsities),
            "seeds": list(self.seeds),
            "prune": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in self.prune.items()
            },
        }
        if self.means is not None:
            described["means"] = self.means.describe()
        return described


def _parse(suffix: str, text: str) -> Any:
    if suffix == ".toml":
        # Python 3.10 has no tomllib; tomli is the same under another name.
        parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        return parser.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _table(described: Mapping[str, Any], name: str) -> list[tuple[Any, Any]]:
    """The entries of a table; anything but a table is an error."""
    value = described[name]
    if not isinstance(value, Mapping):
        raise HcLensError(
            f"expected a table for {name}, got {value!r}; write [{name}] and its entries below it"
        )
    return list(value.items())


def _check_names(name: str, given: Any, kind: type) -> None:
    """A mapping from names to one kind of value, with at least one entry."""
    if not isinstance(given, Mapping) or not given:
        raise HcLensError(f"expected at least one entry in {name}, got {given!r}; name one")
    for key, value in given.items():
        if not isinstance(key, str) or not key:
            raise HcLensError(f"expected names as text in {name}, got {key!r}; put it in quotes")
        if not isinstance(value, kind):
            raise HcLensError(
                f"expected {kind.__name__} for {key!r} in {name}, got {type(value).__name__} "
                f"{value!r}; correct it"
            )


def _check_kind(name: str, given: Any, default: Any) -> None:
    """A setting has the kind of its default; YAML reads 1e-3 as text, which shows only here."""
    if isinstance(default, bool):
        good, what = isinstance(given, bool), "true or false"
    elif isinstance(default, str):
        good, what = isinstance(given, str), "text"
    elif isinstance(default, tuple):
        good, what = isinstance(given, (list, tuple)), "a list"
    else:  # numbers; the settings without a default value are numbers too
        whole = isinstance(default, int) or name == "patience"
        kinds = (int,) if whole else (int, float)
        good = isinstance(given, kinds) and not isinstance(given, bool)
        good = good or (given is None and default is None)
        what = "a whole number" if whole else "a number such as 0.001"
    if not good:
        raise HcLensError(
            f"expected {what} for {name} in the prune settings, got {given!r}; correct it"
        )


def _check_list(name: str, given: Any, kinds: tuple[type, ...]) -> None:
    """A list of numbers, at least one, each once."""
    if isinstance(given, str) or not isinstance(given, Iterable) or not list(given):
        raise HcLensError(f"expected at least one number in {name}, got {given!r}; add one")
    numbers = list(given)
    for number in numbers:
        if not isinstance(number, kinds) or isinstance(number, bool):
            what = "whole numbers" if kinds == (int,) else "numbers"
            raise HcLensError(f"expected {what} in {name}, got {number!r}; correct it")
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise HcLensError(
            f"expected each of {name} once, got {twice} more than once; a run is the same each "
            "time, so leave the repetition out"
        )
