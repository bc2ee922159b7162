"""The desk-scale study as text and figures: what ``hc-lens analyse extractive --demo`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analyses.extractive.desk import DeskConfig, study
from analyses.extractive.figures import heat_maps, rank_bars

_UNITS = ("head", "mlp")


def demo(
    out: str | Path | None = None,
    n_seeds: int = 3,
    config: DeskConfig | None = None,
    *,
    progress: bool = True,
) -> tuple[str, list[Path]]:
    """Run the study; the report as text, and the figures and tables written into `out`.

    Args:
        out: a folder for the heat maps, the bars (PNG) and the tables (CSV); None writes nothing.
        n_seeds: number of worlds and models.
        config: sizes and training.
        progress: show a progress bar.
    """
    config = config or DeskConfig()
    tables = study(range(n_seeds), config, progress=progress)
    text = report(tables)
    return text, [] if out is None else write(tables, Path(out), config)


def report(tables: dict[str, pd.DataFrame]) -> str:
    """The study's tables as text, means over seeds."""
    n_seeds = tables["freezing"]["seed"].nunique()
    parts = [f"Extractive structures, desk-scale: mean over {n_seeds} seeds (rank 0 is perfect)."]
    for title, name, keys in (
        ("Out of context and freezing: train on facts, rank implications", "freezing", 2),
        ("Ordering: new people's ranks (invented relation)", "ordering", 1),
        ("Grafting: ranks on counterfactual facts (invented relation)", "grafting", 1),
        ("Agreement of linear with exact scores", "agreement", 2),
    ):
        parts.append(f"\n{title}\n{_mean(tables[name], keys).round(2).to_string(index=False)}")
    for method in ("exact", "linear"):
        parts.append(
            f"\nMean {method} score by layer (embed, heads summed, MLPs)\n"
            f"{by_layer(tables['components'], method).round(2).to_string()}"
        )
    return "\n".join(parts)


def _mean(table: pd.DataFrame, keys: int) -> pd.DataFrame:
    """Means over seeds; the first `keys` columns after the seed name the row."""
    names = [name for name in table if name != "seed"][:keys]
    means: Any = table.drop(columns="seed").groupby(names, sort=False).mean()
    return means.reset_index()


def by_layer(components: pd.DataFrame, method: str) -> pd.DataFrame:
    """Mean score of the embeddings and of each layer's heads and MLP, a row a set and score."""
    chosen: Any = components[components["method"] == method]
    chosen = chosen[chosen["kind"].isin(("embed", *_UNITS))]
    layer = chosen["layer"].map(lambda value: "" if pd.isna(value) else f"L{value} ")
    kind = chosen["kind"].map({"embed": "embed", "head": "heads", "mlp": "MLP"})
    chosen = chosen.assign(place=layer + kind)
    places = list(dict.fromkeys(chosen["place"]))
    summed = chosen.groupby(["set", "score", "seed", "question", "place"], sort=False)[
        "value"
    ].sum()
    return summed.groupby(["set", "score", "place"], sort=False).mean().unstack("place")[places]


def write(tables: dict[str, pd.DataFrame], out: Path, config: DeskConfig) -> list[Path]:
    """Write the heat maps of each set, the bars and the tables; the paths written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in tables["positions"]["set"].unique():
        table = tables["positions"][tables["positions"]["set"] == name]
        # Questions of different seeds are different questions.
        table = table.assign(
            question=table["seed"].astype(str) + ":" + table["question"].astype(str)
        )
        figure = heat_maps(table, title=f"{name}: linear scores, mean over implications and seeds")
        written.append(out / f"{name.replace(' ', '-')}-heat-maps.png")
        figure.savefig(written[-1], dpi=150)
    freezing: Any = tables["freezing"]
    panels: list[Any] = [
        (f"freezing, {name}", freezing[freezing["set"] == name], "condition", "implication_rank")
        for name in freezing["set"].unique()
    ]
    panels += [
        ("ordering", tables["ordering"], "order", "implication_rank"),
        ("grafting", tables["grafting"], "model", "implication_rank"),
    ]
    written.append(out / "ranks.png")
    rank_bars(panels, chance=(config.n_cities - 1) / 2).savefig(written[-1], dpi=150)
    for name in ("freezing", "ordering", "grafting", "agreement", "components", "positions"):
        written.append(out / f"{name}.csv")
        tables[name].to_csv(written[-1], index=False)
    return written
