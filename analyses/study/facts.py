"""The numbers of the summary, each from a table of the run folder.

Every function takes the tables of one step and returns names with values. What stands here is
written to ``facts.json``; the sentences of the report hold no other number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analyses.lexical_overlap import ROLE_MASS, ROLE_RATIO
from analyses.study.folder import pick
from analyses.superadditive import holm

Facts = dict[str, Any]
FEWEST_ROWS = 20
"""A case with fewer rows says nothing about super-additivity."""
LEVEL = 0.025
"""One-sided level, after Holm's correction."""


def of_evaluation(table: pd.DataFrame) -> Facts:
    """How the full model does in domain and on the adversarial cases."""
    inside = pick(table, table["kind"] == "in domain")
    outside = pick(table, table["kind"] == "adversarial")
    worst = outside.loc[outside["accuracy"].idxmin()]
    best = outside.loc[outside["accuracy"].idxmax()]
    return {
        "id_rows": int(inside["n"].sum()),
        "id_accuracy": weighted(inside),
        "adversarial_cases": len(outside),
        "adversarial_rows": int(outside["n"].sum()),
        "adversarial_accuracy": float(outside["accuracy"].mean()),
        "worst_case": str(worst["case"]),
        "worst_case_accuracy": float(worst["accuracy"]),
        "best_case": str(best["case"]),
        "best_case_accuracy": float(best["accuracy"]),
    }


def of_spread(spread: pd.DataFrame, cases: Sequence[str], sparsities: Sequence[float]) -> Facts:
    """How far the subnetworks of one sparsity lie apart, in domain and on the widest case."""
    facts: Facts = {}
    for name, sparsity in (("first", sparsities[0]), ("second", sparsities[-1])):
        chosen = pick(spread, spread["sparsity"] == sparsity)
        inside = pick(chosen, chosen["dataset"] == "id")
        outside = pick(chosen, (chosen["dataset"] == "ood") & chosen["case"].isin(list(cases)))
        width = outside["max"] - outside["min"]
        widest = outside.loc[width.idxmax()]
        facts |= {
            f"{name}_sparsity": float(sparsity),
            f"{name}_seeds": int(inside["seeds"].iloc[0]),
            f"{name}_id_mean": float(inside["mean"].mean()),
            f"{name}_id_lowest": float(inside["min"].min()),
            f"{name}_id_worst_drop": float((inside["full"] - inside["min"]).max()),
            f"{name}_widest_case": str(widest["case"]),
            f"{name}_widest_low": float(widest["min"]),
            f"{name}_widest_high": float(widest["max"]),
            f"{name}_widest_spread": float(width.max()),
            f"{name}_adversarial_mean": float(outside["mean"].mean()),
        }
    return facts


def of_core(about: Mapping[str, Any], jaccard: pd.DataFrame) -> Facts:
    """The core, its size against chance, and the agreement of the sparsities."""
    facts: Facts = {
        "core": list(about["core"]),
        "core_fraction": float(about["fraction"]),
        "looked_at": list(about["looked_at"]),
        "core_size": len(about["core"]),
        "heads": int(about["chance"]["units"]),
        "subnetworks": subnetworks_in(jaccard),
        "core_expected": float(about["chance"]["expected"]),
        "core_tail": float(about["chance"]["tail"]),
        "spearman": float(about["spearman"]["rho"]),
        "spearman_p": float(about["spearman"]["p"]),
        "jaccard": float(jaccard["jaccard"].mean()),
        "jaccard_expected": float(jaccard["expected"].mean()),
    }
    early = about.get("early")
    if early:
        facts |= {
            "early_size": len(early["early"]),
            "early_shared": len(early["shared"]),
            "early_share": float(early["share"]),
            "early_expected": float(early["expected"]),
        }
    return facts


def of_ablation(excess: pd.DataFrame, scan: pd.DataFrame, heads: Sequence[str]) -> Facts:
    """What removing the heads together costs, against each of them alone.

    A case counts as super-additive if it does after Holm's correction over the cases, has rows
    enough for its interval to mean something, and loses accuracy when they are removed together:
    where it does not, an excess says only that removing one of them alone helps.
    """
    joint = pick(excess, excess["size"] == len(heads))
    inside = pick(joint, joint["dataset"] == "id")
    outside = pick(joint, (joint["dataset"] == "ood") & (joint["n"] >= FEWEST_ROWS))
    outside = outside if len(outside) else pick(joint, joint["dataset"] == "ood")
    known = outside["n"] >= FEWEST_ROWS
    likely = holm(outside["p"].to_numpy()) < LEVEL
    sure = pick(outside, likely & known & (outside["drop"] > 0))
    shown = sure if len(sure) else outside
    top = shown.loc[shown["excess"].idxmax()]
    alone = scan["set"].str.fullmatch(r"L\d+\.H\d+")
    single = pick(scan, alone & (scan["dataset"] == "ood"))
    core = single["set"].isin(list(heads))
    return {
        "joint_id_drop": float(inside["drop"].mean()),
        "joint_case": str(top["case"]),
        "joint_drop": float(top["drop"]),
        "joint_sum": float(top["sum_of_drops"]),
        "joint_excess": float(top["excess"]),
        "joint_low": float(top["low"]),
        "joint_high": float(top["high"]),
        "superadditive_cases": len(sure),
        "ablation_cases": len(outside),
        "core_head_change": float(single.loc[core, "accuracy_change"].mean()),
        "other_head_change": float(single.loc[~core, "accuracy_change"].mean()),
    }


def of_attention(table: pd.DataFrame, heads: Sequence[str]) -> Facts:
    """How many of the core heads look at the same word in the other sentence.

    Those count that give it a fifth of their attention, twice as much as uniform attention and as
    their own attention with another row's hypothesis, whatever else they look at.
    """
    overlap = pick(table, table["score"] == "overlap")
    inside = overlap["unit"].isin(list(heads))
    baseline = overlap[["chance", "permuted"]].max(axis=1)
    least = (ROLE_RATIO * baseline).clip(lower=ROLE_MASS)
    low: Any = overlap["low"]
    sure = pick(overlap, low.fillna(overlap["value"]) >= least)["unit"]
    named = [head for head in heads if head in set(sure)]
    return {
        "overlap_heads": named,
        "overlap_core": len(named),
        "overlap_all": len(sure),
        "overlap_least": ROLE_MASS,
        "overlap_core_mass": float(overlap.loc[inside, "value"].mean()),
        "overlap_other_mass": float(overlap.loc[~inside, "value"].mean()),
        "overlap_chance": float(overlap["chance"].iloc[0]),
    }


def of_trace(strongest: pd.DataFrame, explained: pd.DataFrame, dependents: pd.DataFrame) -> Facts:
    """The strongest edge from the core, what the strongest explain together, who depends on it.

    A head with no more edges than are patched together explains nothing: it is left out.
    """
    first = strongest.iloc[0]
    outside = pick(explained, explained["dataset"] == "ood")
    edges: Any = pick(outside, outside["patched"] == "all").groupby("sender")["n_edges"].first()
    top = pick(outside, outside["patched"] == "top")
    top = pick(top, top["n_edges"] < top["sender"].map(edges))
    facts: Facts = {
        "edge_sender": str(first["sender"]),
        "edge_receiver": str(first["receiver"]),
        "edge_kind": str(first["kind"]),
        "edge_kl": float(first["kl"]),
    }
    if len(top):
        total = (top["total_kl"] * top["n"]).sum()
        facts |= {
            "edges_patched": int(top["n_edges"].max()),
            "edges_fewest": int(edges[top["sender"].unique()].min()),
            "edges_most": int(edges[top["sender"].unique()].max()),
            "edges_explained": float((top["kl"] * top["n"]).sum() / total),
        }
    cut: Any = pick(dependents, dependents["dataset"] == "ood")
    if len(cut):
        by_head = cut.groupby("head", sort=False)[["kl", "accuracy_change"]].mean()
        head = by_head["kl"].idxmax()
        change = float(by_head.loc[head, "accuracy_change"])
        facts |= {"dependent_head": str(head), "dependent_change": change}
    return facts


def of_sizes(table: pd.DataFrame) -> Facts:
    """The effective size at the first and the last checkpoint of the series."""
    facts: Facts = {}
    order = list(dict.fromkeys(table["checkpoint"]))
    cells = table.set_index(["checkpoint", "target"])
    for name, checkpoint in (("first", order[0]), ("last", order[-1])):
        facts[f"size_{name}_checkpoint"] = str(checkpoint)
        for target in ("id", "ood"):
            row = cells.loc[(checkpoint, target)]
            facts[f"size_{name}_{target}"] = float(row["effective_size"])
            facts[f"size_{name}_{target}_flags"] = [
                flag
                for flag in ("floor", "ceiling", "none_passes")
                if row[flag] == True  # noqa: E712
            ]
    return facts


def weighted(table: pd.DataFrame) -> float:
    """Accuracy over all rows of some cases."""
    return float((table["accuracy"] * table["n"]).sum() / table["n"].sum())


def subnetworks_in(jaccard: pd.DataFrame) -> int:
    """Number of subnetworks behind a table of all pairs."""
    return round((1 + math.sqrt(1 + 8 * len(jaccard))) / 2)
