"""The findings of a study: the facts behind them, and the sentences that are said about them.

1. Facts are numbers, texts and lists of texts by name, from the tables of the run folder
   (`collect`). They go to ``facts.json``.
2. A sentence is a text with the names of facts in braces. It holds no other number, so that each
   can be looked up. A number is shown in the style after its name (a name of
   `hc_lens.show.report.STYLES`), such as ``{id_accuracy:percent}``.
3. Every sentence has a wording for when the facts show what the paper describes and one for when
   they do not. The thresholds that decide it come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

import pandas as pd

from hc_lens.analyses.lexical_overlap import ROLE_MASS, ROLE_RATIO
from hc_lens.analyses.statistics import holm
from hc_lens.analyses.study.config import StudyConfig
from hc_lens.analyses.study.results import Results
from hc_lens.records import json_bytes
from hc_lens.show.report import Fact, Part, Sentence

Facts = dict[str, Any]
"""Numbers, texts and lists of texts by name."""

ADVERSARIAL = "adversarial"
"""What cases are called that the heuristic gets wrong; others are out of domain only."""
NEAR = 0.05
"""Out of domain the model does about as well if it is at most this much below in domain."""
FAITHFUL = 0.05
"""Subnetworks are faithful in domain if none is further below the full model than this."""
WIDE = 0.15
"""Seeds differ on a case if their accuracies span more than this."""
COLLAPSE = 0.10
"""The sparser subnetworks fall back on the heuristic if adversarial accuracy is lower by this."""
CHANCE = 0.01
"""What has a probability below this is not chance."""
FEWEST_ROWS = 20
"""A case with fewer rows says nothing about super-additivity."""
LEVEL = 0.025
"""One-sided level of super-additivity, after Holm's correction."""
CARRIED = 0.5
"""A few edges carry the effect if they make up more than this share of it."""
FLAT = 10.0
"""An effective size that moves by at most so many percent of the units is flat."""
FLAGS = {
    "floor": "the model is at its floor, where any subnetwork is faithful",
    "ceiling": "the largest sparsity of the grid still passes",
    "none_passes": "no sparsity of the grid passes",
}
"""What makes an effective size doubtful."""


def collect(results: Results, config: StudyConfig) -> Facts:
    """The facts of all findings."""
    table, heads = results.table, results.heads
    facts: Facts = {"cases": ADVERSARIAL if config.adversarial else "out-of-domain"}
    facts |= evaluation_facts(table("evaluate/evaluation"))
    cases = results.inputs["adversarial"]
    facts |= spread_facts(table("core/spread"), cases, config.sparsities)
    facts |= core_facts(results.core, table("core/jaccard"))
    facts |= ablation_facts(table("ablation/excess"), table("ablation/scan"), heads)
    facts |= attention_facts(table("attention/attention"), heads)
    traced = ("strongest", "explained", "dependents")
    facts |= trace_facts(*(table(f"composition/{name}") for name in traced))
    if config.checkpoints:
        facts |= size_facts(table("effective_size/effective_size"))
    # On its way through a Series every number of NumPy becomes one of Python.
    return pd.Series(facts, dtype=object).to_dict()


def say(facts: Facts) -> list[Sentence]:
    """What the facts say, in the order of the study."""
    return [
        say_model(facts),
        say_spread(facts, "first"),
        say_spread(facts, "second"),
        say_collapse(facts),
        say_core(facts),
        say_ranks(facts),
        *([say_early(facts)] if "early_size" in facts else []),
        say_joint(facts),
        say_attention(facts),
        say_trace(facts),
        *([say_sizes(facts)] if "size_last_id" in facts else []),
    ]


def write(facts: Facts, text: str, found: bool | None) -> Sentence:
    """A sentence from a text with names of facts in braces."""
    parts: list[Part] = []
    for literal, name, style, _ in Formatter().parse(text):
        if literal:
            parts.append(literal)
        if name is not None:
            value = facts[name]
            if isinstance(value, (int, float)):
                parts.append(Fact(name, value, style or "number"))
            else:
                parts.append(", ".join(value) if isinstance(value, list) else value)
    return Sentence(tuple(parts), found)


def facts_json(facts: Facts) -> bytes:
    """Facts as JSON; a number that is not defined is null."""
    undefined = [
        name for name, value in facts.items() if isinstance(value, float) and math.isnan(value)
    ]
    return json_bytes(facts | dict.fromkeys(undefined))


def evaluation_facts(table: pd.DataFrame) -> Facts:
    """How the full model does in domain and on the adversarial cases."""
    inside = table.loc[table["kind"] == "in domain"]
    outside = table.loc[table["kind"] == "adversarial"]
    by_case = outside.set_index("case")["accuracy"]
    return {
        "id_rows": inside["n"].sum(),
        "id_accuracy": (inside["accuracy"] * inside["n"]).sum() / inside["n"].sum(),
        "adversarial_cases": len(outside),
        "adversarial_rows": outside["n"].sum(),
        "adversarial_accuracy": by_case.mean(),
        "worst_case": by_case.idxmin(),
        "worst_case_accuracy": by_case.min(),
        "best_case": by_case.idxmax(),
        "best_case_accuracy": by_case.max(),
    }


def say_model(facts: Facts) -> Sentence:
    """How the full model does."""
    text = (
        "The full model is right on {id_accuracy:percent} of {id_rows} in-domain rows and, on "
        "average over {adversarial_cases} {cases} cases, on {adversarial_accuracy:percent} (from "
        "{worst_case_accuracy:percent} on {worst_case} to {best_case_accuracy:percent} on "
        "{best_case})"
    )
    if facts["id_accuracy"] - facts["adversarial_accuracy"] <= NEAR:
        return write(facts, text + ": out of domain it does about as well.", False)
    if facts["cases"] != ADVERSARIAL:
        return write(facts, text + ": out of domain it does worse.", None)
    if facts["best_case_accuracy"] > 0.5:
        return write(facts, text + ": out of domain it generalises in part.", True)
    return write(facts, text + ": out of domain it follows the heuristic.", False)


def spread_facts(spread: pd.DataFrame, cases: Sequence[str], sparsities: Sequence[float]) -> Facts:
    """How far the subnetworks of one sparsity lie apart, in domain and on the widest case."""
    facts: Facts = {}
    for name, sparsity in (("first", sparsities[0]), ("second", sparsities[-1])):
        chosen = spread.loc[spread["sparsity"] == sparsity]
        inside = chosen.loc[chosen["dataset"] == "id"]
        outside = chosen.loc[(chosen["dataset"] == "ood") & chosen["case"].isin(list(cases))]
        width = outside["max"] - outside["min"]
        widest = outside.loc[width.idxmax()]
        facts |= {
            f"{name}_sparsity": sparsity,
            f"{name}_seeds": inside["seeds"].iloc[0],
            f"{name}_id_mean": inside["mean"].mean(),
            f"{name}_id_lowest": inside["min"].min(),
            f"{name}_id_worst_drop": (inside["full"] - inside["min"]).max(),
            f"{name}_widest_case": widest["case"],
            f"{name}_widest_low": widest["min"],
            f"{name}_widest_high": widest["max"],
            f"{name}_widest_spread": width.max(),
            f"{name}_adversarial_mean": outside["mean"].mean(),
        }
    return facts


def say_spread(facts: Facts, name: str) -> Sentence:
    """Whether subnetworks that agree in domain differ outside; ``N_`` stands for the name."""
    if facts[f"{name}_seeds"] < 2:
        text = "With {N_sparsity:percent} of the units removed there is one subnetwork: "
        return write(facts, text.replace("N_", f"{name}_") + "nothing to compare.", None)
    faithful = facts[f"{name}_id_worst_drop"] <= FAITHFUL
    wide = facts[f"{name}_widest_spread"] > WIDE
    text = (
        "With {N_sparsity:percent} of the units removed, the subnetworks of {N_seeds} seeds are "
        "right in domain on {N_id_mean:percent} on average and {N_id_lowest:percent} at least"
    )
    text += " (faithful to the full model)" if faithful else " (not all are faithful)"
    text += (
        ", and their accuracy on {N_widest_case} ranges from {N_widest_low:percent} to "
        "{N_widest_high:percent}: "
        if wide
        else ", and on no {cases} case do their accuracies lie further apart than "
        "{N_widest_spread:span} points ({N_widest_case}): "
    )
    text += {
        (True, True): "close in domain, they generalise differently.",
        (True, False): "close in domain, they also generalise alike.",
        (False, True): "they differ, but not at equal in-domain accuracy.",
        (False, False): "outside the seeds agree, in domain some are lost.",
    }[faithful, wide]
    return write(facts, text.replace("N_", f"{name}_"), faithful and wide)


def say_collapse(facts: Facts) -> Sentence:
    """Whether sparser subnetworks lose what goes beyond the heuristic."""
    text = (
        "From {first_sparsity:percent} to {second_sparsity:percent} removed, mean accuracy on the "
        "{cases} cases goes from {first_adversarial_mean:percent} to "
        "{second_adversarial_mean:percent}"
    )
    if facts["first_adversarial_mean"] - facts["second_adversarial_mean"] <= COLLAPSE:
        return write(facts, text + ": no clear loss.", False)
    if facts["cases"] != ADVERSARIAL:
        return write(facts, text + ": smaller subnetworks do worse outside.", None)
    return write(facts, text + ": smaller subnetworks lose what goes beyond the heuristic.", True)


def core_facts(about: Mapping[str, Any], jaccard: pd.DataFrame) -> Facts:
    """The core, its size against chance, and the agreement of the sparsities."""
    facts: Facts = {
        "core": about["core"],
        "core_fraction": float(about["fraction"]),
        "looked_at": about["looked_at"],
        "core_size": len(about["core"]),
        "heads": about["chance"]["units"],
        # n subnetworks have n (n - 1) / 2 pairs.
        "subnetworks": round((1 + math.sqrt(1 + 8 * len(jaccard))) / 2),
        "core_expected": about["chance"]["expected"],
        "core_tail": about["chance"]["tail"],
        "spearman": about["spearman"]["rho"],
        "spearman_p": about["spearman"]["p"],
        "jaccard": jaccard["jaccard"].mean(),
        "jaccard_expected": jaccard["expected"].mean(),
    }
    if early := about.get("early"):
        facts |= {
            "early_size": len(early["early"]),
            "early_shared": len(early["shared"]),
            "early_share": early["share"],
            "early_expected": early["expected"],
        }
    return facts


def say_core(facts: Facts) -> Sentence:
    """Whether subnetworks share more heads than chance."""
    size = facts["core_size"]
    which = "all" if facts["core_fraction"] == 1 else "at least {core_fraction:percent} of the"
    instead = "; what follows looks at the most frequent ones: {looked_at}."
    expected = "chance expects {core_expected:probability}"
    if size == 0:
        text = f"No head is in {which} {{subnetworks}} subnetworks ({expected}){instead}"
        return write(facts, text, False)
    above = facts["core_tail"] < CHANCE
    text = "{core_size} of {heads} heads " + ("appears in " if size == 1 else "appear in ")
    text += f"{which} {{subnetworks}} subnetworks ({{core}}); {expected} "
    text += "(probability of as many or more: {core_tail:probability}): "
    text += "they share a core" if above else "not more than chance would give"
    return write(facts, text + (instead if size == 1 else "."), above)


def say_ranks(facts: Facts) -> Sentence:
    """Whether the same heads are kept at both sparsities."""
    agree = facts["spearman"] > 0 and facts["spearman_p"] < CHANCE
    text = (
        "Heads that are often kept at {first_sparsity:percent} are often kept at "
        "{second_sparsity:percent} too "
        if agree
        else "How often a head is kept at {first_sparsity:percent} does not clearly tell how often "
        "it is at {second_sparsity:percent} "
    )
    if math.isnan(facts["spearman"]):
        return write(facts, text + "(one of the two is the same for all heads).", False)
    text += (
        "(Spearman {spearman:two}, p {spearman_p:probability}); two subnetworks share "
        "{jaccard:two} of their heads (Jaccard; chance {jaccard_expected:two})."
    )
    return write(facts, text, agree)


def say_early(facts: Facts) -> Sentence:
    """Whether the core was there before generalisation."""
    if facts["early_size"] == 0:
        return write(facts, "The early checkpoint has no core to compare with.", False)
    text = (
        "{early_shared} of the {early_size} core heads of the early checkpoint are in the final "
        "core (a random set of its size would hold {early_expected:percent} of them): "
    )
    if facts["early_shared"] == facts["early_size"]:
        return write(facts, text + "the early core survives whole.", True)
    text += "it survives in part." if facts["early_shared"] else "none of it survives."
    return write(facts, text, False)


def ablation_facts(excess: pd.DataFrame, scan: pd.DataFrame, heads: Sequence[str]) -> Facts:
    """What removing the heads together costs, against each of them alone.

    A case counts as super-additive if it does after Holm's correction over the cases, has rows
    enough for its interval to mean something, and loses accuracy when they are removed together:
    where it does not, an excess says only that removing one of them alone helps.
    """
    joint = excess.loc[excess["size"] == len(heads)]
    outside = joint.loc[joint["dataset"] == "ood"]
    known = outside.loc[outside["n"] >= FEWEST_ROWS]
    sure = known.loc[(holm(known["p"].to_numpy()) < LEVEL) & (known["drop"] > 0)]
    outside = known if len(known) else outside
    shown = sure if len(sure) else outside
    top = shown.loc[shown["excess"].idxmax()]
    alone = scan["set"].str.fullmatch(r"L\d+\.H\d+")
    single = scan.loc[alone & (scan["dataset"] == "ood")]
    core = single["set"].isin(list(heads))
    return {
        "joint_id_drop": joint.loc[joint["dataset"] == "id", "drop"].mean(),
        "joint_case": top["case"],
        "joint_drop": top["drop"],
        "joint_sum": top["sum_of_drops"],
        "joint_excess": top["excess"],
        "joint_low": top["low"],
        "joint_high": top["high"],
        "superadditive_cases": len(sure),
        "ablation_cases": len(outside),
        "core_head_change": single.loc[core, "accuracy_change"].mean(),
        "other_head_change": single.loc[~core, "accuracy_change"].mean(),
    }


def say_joint(facts: Facts) -> Sentence:
    """Whether the core heads do more together than the sum of each alone."""
    some = facts["superadditive_cases"] > 0
    text = "The core heads" if facts["core_size"] > 1 else "The heads"
    text += (
        " are super-additive on {superadditive_cases} of {ablation_cases} {cases} cases: "
        if some
        else " are super-additive on none of {ablation_cases} {cases} cases; nearest, "
    )
    text += (
        "on {joint_case} removing them together costs {joint_drop:span} points, the sum of each "
        "alone is {joint_sum:span}, the excess {joint_excess:span} (95% interval {joint_low:span} "
        "to {joint_high:span}). In domain it costs {joint_id_drop:span}."
    )
    return write(facts, text, some)


def attention_facts(table: pd.DataFrame, heads: Sequence[str]) -> Facts:
    """How many of the core heads look at the same word in the other sentence.

    Those count that give it a fifth of their attention, twice as much as uniform attention and as
    their own attention with another row's hypothesis, whatever else they look at.
    """
    overlap = table.loc[table["score"] == "overlap"]
    inside = overlap["unit"].isin(list(heads))
    baseline = overlap[["chance", "permuted"]].max(axis=1)
    least = (ROLE_RATIO * baseline).clip(lower=ROLE_MASS)
    low: pd.Series = overlap["low"]
    sure = overlap.loc[low.fillna(overlap["value"]) >= least, "unit"]
    named = [head for head in heads if head in set(sure)]
    return {
        "overlap_heads": named,
        "overlap_core": len(named),
        "overlap_all": len(sure),
        "overlap_least": ROLE_MASS,
        "overlap_core_mass": overlap.loc[inside, "value"].mean(),
        "overlap_other_mass": overlap.loc[~inside, "value"].mean(),
        "overlap_chance": overlap["chance"].iloc[0],
    }


def say_attention(facts: Facts) -> Sentence:
    """Whether core heads look for the same word in the other sentence."""
    if math.isnan(facts["overlap_core_mass"]):
        return write(facts, "The rows have no word that stands in two sentences.", None)
    some = facts["overlap_core"] > 0
    text = (
        "{overlap_core} of these heads ({overlap_heads}) look"
        if some
        else "None of these heads looks"
    )
    text += (
        " at the same content word in the other sentence (with {overlap_least:percent} of their "
        "attention or more, twice chance and twice what is left with another row's hypothesis); "
        "on average these heads give it {overlap_core_mass:percent} of their attention, other "
        "heads {overlap_other_mass:percent}, uniform attention {overlap_chance:percent}."
    )
    return write(facts, text, some)


def trace_facts(
    strongest: pd.DataFrame, explained: pd.DataFrame, dependents: pd.DataFrame
) -> Facts:
    """The strongest edge from the core, what the strongest explain together, who depends on it.

    A head with no more edges than are patched together explains nothing: it is left out.
    """
    first = strongest.iloc[0]
    outside = explained.loc[explained["dataset"] == "ood"]
    every = outside.loc[outside["patched"] == "all"]
    edges = every.drop_duplicates("sender").set_index("sender")["n_edges"]
    top = outside.loc[outside["patched"] == "top"]
    top = top.loc[top["n_edges"] < top["sender"].map(edges)]
    facts: Facts = {
        "edge_sender": first["sender"],
        "edge_receiver": first["receiver"],
        "edge_kind": first["kind"],
        "edge_kl": first["kl"],
    }
    if len(top):
        counts = top["sender"].map(edges)
        facts |= {
            "edges_patched": top["n_edges"].max(),
            "edges_fewest": counts.min(),
            "edges_most": counts.max(),
            "edges_explained": (top["kl"] * top["n"]).sum() / (top["total_kl"] * top["n"]).sum(),
        }
    cut = dependents.loc[dependents["dataset"] == "ood"]
    if len(cut):
        by_head: Any = cut.groupby("head", sort=False)[["kl", "accuracy_change"]].mean()
        head = by_head["kl"].idxmax()
        facts["dependent_head"] = head
        facts["dependent_change"] = by_head.loc[head, "accuracy_change"]
    return facts


def say_trace(facts: Facts) -> Sentence:
    """Whether a few edges carry what the core does."""
    readers = {"mlp": "{edge_receiver}", "classifier": "the classifier"}
    text = "On {cases} rows the strongest edge from these heads leads from {edge_sender} to "
    text += readers.get(facts["edge_kind"], "the {edge_kind} of {edge_receiver}")
    carried = None
    if "edges_explained" in facts:
        carried = facts["edges_explained"] > CARRIED
        one = facts["edges_fewest"] == facts["edges_most"]
        edges = "{edges_most}" if one else "{edges_fewest} to {edges_most}"
        text += f"; the {{edges_patched}} strongest of the {edges} edges of each head together "
        text += "make up {edges_explained:percent} of what removing it changes (KL): "
        text += "a few wires carry most of it" if carried else "it is spread over many wires"
    text += "."
    if "dependent_head" in facts:
        text += (
            " The head that depends on them most is {dependent_head}: cutting it off from them "
            "alone changes accuracy there by {dependent_change:points} points on average."
        )
    return write(facts, text, carried)


def size_facts(table: pd.DataFrame) -> Facts:
    """The effective size at the first and the last checkpoint of the series."""
    facts: Facts = {}
    order = table["checkpoint"].unique()
    cells = table.set_index(["checkpoint", "target"])
    for name, checkpoint in (("first", order[0]), ("last", order[-1])):
        facts[f"size_{name}_checkpoint"] = checkpoint
        for target in ("id", "ood"):
            row = cells.loc[(checkpoint, target)]
            facts[f"size_{name}_{target}"] = float(row["effective_size"])
            # A floor is missing where there is no chance level.
            flags = [flag for flag in FLAGS if pd.notna(row[flag]) and row[flag]]
            facts[f"size_{name}_{target}_flags"] = flags
    return facts


def say_sizes(facts: Facts) -> Sentence:
    """Whether generalising took more of the network while the in-domain part stayed."""
    flat = abs(facts["size_last_id"] - facts["size_first_id"]) <= FLAT
    rises = facts["size_last_ood"] - facts["size_first_ood"] > FLAT
    text = (
        "From checkpoint {size_first_checkpoint} to {size_last_checkpoint} the effective size goes "
        "from {size_first_id}% to {size_last_id}% of the units in domain and from "
        "{size_first_ood}% to {size_last_ood}% on the {cases} cases: "
    )
    text += "in domain it stays about the same, " if flat else "in domain it moves too, "
    text += "outside it rises." if rises else "outside it does not rise."
    doubts = [
        f"{where} at checkpoint {{size_{name}_checkpoint}} {FLAGS[flag]}"
        for name in ("first", "last")
        for target, where in (("id", "in domain"), ("ood", "outside"))
        for flag in facts[f"size_{name}_{target}_flags"]
    ]
    if doubts:
        text += f" To be read with care: {'; '.join(doubts)}."
    return write(facts, text, None if doubts else flat and rises)
