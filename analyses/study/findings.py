"""The findings of a study: the facts behind them, and the sentences that are said about them.

1. Facts are numbers, texts and lists of texts by name, from the tables of the run folder
   (`collect`). They go to ``facts.json``.
2. A sentence is a text with the names of facts in braces. It holds no other number, so that each
   can be looked up. A number is shown in the style after its name (a name of
   `hc_lens.show.report.STYLES`), such as ``{id_accuracy:percent}``.
3. Every sentence has a wording for when the facts show what the paper describes, one for when
   they do not, and one for when their interval spans the threshold, so that they cannot tell
   (`judge`). The thresholds come first.
4. Answering one label is not generalising: it wins on the adversarial cases what it loses on the
   friendly ones. Where friendly cases are known, the balanced score of both sides stands beside
   every mean out of domain, and a loss of the friendly ones is said.
5. Prompts have answers of their own instead of labels, and are one text each: nothing is said of
   labels, nor of words that stand in two sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from string import Formatter
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import hypergeom

from hc_lens.analyses.lexical_overlap import ROLE_MASS, ROLE_RATIO
from hc_lens.analyses.statistics import (
    Interval,
    difference_interval,
    mean_interval,
    t_interval,
)
from hc_lens.analyses.study.config import StudyConfig
from hc_lens.analyses.study.results import Results
from hc_lens.analyses.superadditive.verdicts import CANNOT_TELL, SUPERADDITIVE, nothing_is_left
from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.metrics import by_side, wilson
from hc_lens.records import json_bytes
from hc_lens.show.report import Fact, Part, Sentence

Facts = dict[str, Any]
"""Numbers, texts and lists of texts by name."""

HALF = 0.5
"""A case is solved in part if more than this share of it is right."""
ONE_ANSWER = 0.5
"""The balanced score of answering one label alone, whichever it is, and of the heuristic alone."""
PROMPTS, TEXTS = "prompts", "texts"
"""What the rows of a study are: prompts with answers, or texts with labels."""
TOLD = [FRIENDLY, ADVERSARIAL, "balanced", "said", "said_share"]
"""What is told of the two sides (`hc_lens.metrics.by_side`)."""
NEAR = 0.05
"""Out of domain the model does about as well if it is at most this much below in domain."""
FAITHFUL = 0.05
"""Subnetworks are faithful in domain if none is further below the full model than this."""
WIDE = 0.15
"""Seeds differ on a case if their accuracies span more than this."""
COLLAPSE = 0.10
"""Subnetworks have lost the adversarial or the friendly cases if they are lower by this."""
CHANCE = 0.01
"""What has a probability below this is not chance."""
LIKELY = 0.05
"""Heads do something more often than others if its p-value is below this."""
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
TARGETS = {"id": "in domain", "ood": "outside", "balanced": "balanced"}
"""The effective sizes that are told, and how they are called."""


def collect(results: Results, config: StudyConfig) -> Facts:
    """The facts of all findings."""
    table, heads = results.table, results.heads
    full, cases = table("evaluate/evaluation"), results.inputs["adversarial"]
    followed = full.loc[full["kind"] == ADVERSARIAL, "side"]
    known = config.adversarial or (followed == ADVERSARIAL).all()
    facts: Facts = {
        "cases": ADVERSARIAL if known else "out-of-domain",
        "rows": PROMPTS if config.train.is_prompts else TEXTS,
    }
    facts |= evaluation_facts(full)
    facts |= spread_facts(table("core/spread"), cases, config.sparsities)
    facts |= side_facts(table("core/sides"), config.sparsities, facts["full_friendly"])
    facts |= core_facts(results.core, table("core/jaccard"))
    kept = table("subnetworks/subnetworks")
    facts["distinct"] = kept.loc[kept["checkpoint"] == config.final, "kept"].nunique()
    facts |= ablation_facts(table("ablation/excess"), table("ablation/scan"), heads)
    if not of_prompts(facts):
        facts |= attention_facts(table("attention/attention"), heads)
    traced = ("strongest", "explained", "dependents")
    facts |= trace_facts(*(table(f"composition/{name}") for name in traced))
    if config.checkpoints:
        facts |= size_facts(table("effective_size/effective_size"), config.grid)
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
        *([say_sizes(facts)] if "size_id" in facts else []),
    ]


def of_prompts(facts: Facts) -> bool:
    """Whether the rows are prompts, which have no labels."""
    return facts["rows"] == PROMPTS


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


def judge(found: Interval, threshold: float) -> bool | None:
    """Whether an interval lies above a threshold; None if it spans it, or if there is none."""
    if math.isnan(found.low) or found.low <= threshold < found.high:
        return None
    return found.low > threshold


def ends(name: str, found: Interval) -> Facts:
    """The facts of a value with its interval: NAME, NAME_low and NAME_high."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def of(facts: Facts, name: str) -> Interval:
    """The value and the interval that `ends` made facts of."""
    return Interval(facts[name], facts[f"{name}_low"], facts[f"{name}_high"])


def loss(facts: Facts, name: str) -> Interval:
    """How much lower something is, from the facts of its change."""
    change = of(facts, name)
    return Interval(-change.value, -change.high, -change.low)


def accuracy_of(row: Any, column: str = "accuracy", chosen_among: int = 1) -> Interval:
    """An accuracy over the rows of a case, wider if it was chosen among several."""
    share, n = (np.array([row[name]], dtype=float) for name in (column, "n"))
    low, high = wilson(share, n, level=1 - 0.05 / chosen_among)
    return Interval(float(share[0]), float(low[0]), float(high[0]))


def evaluation_facts(table: pd.DataFrame) -> Facts:
    """How the full model does in domain, on the adversarial cases and on the friendly ones."""
    inside = table.loc[table["kind"] == "in domain"]
    outside = table.loc[table["kind"] == ADVERSARIAL].reset_index(drop=True)
    rows = int(inside["n"].sum())
    right = float((inside["accuracy"] * inside["n"]).sum())
    in_domain = accuracy_of({"accuracy": right / rows, "n": rows})
    adversarial = mean_interval([accuracy_of(row) for _, row in outside.iterrows()])
    worst, best = (
        outside.loc[at] for at in (outside["accuracy"].idxmin(), outside["accuracy"].idxmax())
    )
    known = table.assign(side=table["kind"]).loc[table["kind"].isin([ADVERSARIAL, FRIENDLY])]
    return {
        "id_rows": rows,
        **ends("id_accuracy", in_domain),
        "adversarial_cases": len(outside),
        "adversarial_rows": int(outside["n"].sum()),
        **ends("adversarial_accuracy", adversarial),
        **ends("gap", difference_interval(in_domain, adversarial)),
        "worst_case": worst["case"],
        "worst_case_accuracy": worst["accuracy"],
        "best_case": best["case"],
        **ends("best_case_accuracy", accuracy_of(best, chosen_among=len(outside))),
        "fewest_rows": int(outside["n"].min()),
        "friendly_cases": int((table["kind"] == FRIENDLY).sum()),
        "friendly_rows": int(table.loc[table["kind"] == FRIENDLY, "n"].sum()),
        **{
            f"full_{name}": value
            for name, value in by_side(known, ["dataset"]).iloc[0][TOLD].items()
        },
    }


def say_model(facts: Facts) -> Sentence:
    """How the full model does."""
    text = (
        "The full model is right on {id_accuracy:percent} of {id_rows} in-domain rows and, on "
        "average over {adversarial_cases} {cases} cases ({fewest_rows} rows or more each), on "
        "{adversarial_accuracy:percent} (95% interval {adversarial_accuracy_low:percent} to "
        "{adversarial_accuracy_high:percent}; from {worst_case_accuracy:percent} on {worst_case} "
        "to {best_case_accuracy:percent} on {best_case})"
    )
    if has_sides(facts):
        text += (
            ", on the {friendly_cases} friendly ones on {full_friendly:percent}: balanced "
            "{full_balanced:percent}"
        )
    worse = judge(of(facts, "gap"), NEAR)
    if worse is None:
        return write(facts, text + ". Too few rows to tell how much worse it does outside.", None)
    if not worse:
        return write(facts, text + ". Out of domain it does about as well.", False)
    if facts["cases"] != ADVERSARIAL:
        return write(facts, text + ". Out of domain it does worse.", None)
    if has_sides(facts) and facts["full_balanced"] <= ONE_ANSWER:
        text += (
            ". Following the heuristic alone would do as well."
            if of_prompts(facts)
            else ". Answering one label alone would do as well: it answers {full_said} on "
            "{full_said_share:percent} of these rows."
        )
        return write(facts, text, False)
    part = judge(of(facts, "best_case_accuracy"), HALF)
    text += {
        True: ". Out of domain it generalises in part.",
        False: ". Out of domain it follows the heuristic.",
        None: ". Too few rows to tell whether it is right on more than half of any case.",
    }[part]
    return write(facts, text, part)


def has_sides(facts: Facts) -> bool:
    """Whether friendly cases are known beside the adversarial ones."""
    return not math.isnan(facts["full_balanced"])


def spread_facts(spread: pd.DataFrame, cases: Sequence[str], sparsities: Sequence[float]) -> Facts:
    """How far the subnetworks of one sparsity lie apart, in domain and on the widest case.

    The widest of several cases, and the two seeds that are furthest apart, are chosen among many:
    their interval is widened for it (Bonferroni).
    """
    facts: Facts = {}
    for name, sparsity in (("first", sparsities[0]), ("second", sparsities[-1])):
        chosen = spread.loc[spread["sparsity"] == sparsity]
        inside = chosen.loc[chosen["dataset"] == "id"]
        outside = chosen.loc[(chosen["dataset"] == "ood") & chosen["case"].isin(list(cases))]
        lowest = inside.loc[(inside["full"] - inside["min"]).idxmax()]
        widest = outside.loc[(outside["max"] - outside["min"]).idxmax()]
        seeds = int(inside["seeds"].iloc[0])
        pairs = max(1, seeds * (seeds - 1) // 2 * len(outside))
        drop = difference_interval(
            *(accuracy_of(lowest, column, seeds * len(inside)) for column in ("full", "min"))
        )
        width = difference_interval(
            *(accuracy_of(widest, column, pairs) for column in ("max", "min"))
        )
        facts |= {
            f"{name}_sparsity": sparsity,
            f"{name}_seeds": seeds,
            f"{name}_id_mean": inside["mean"].mean(),
            f"{name}_id_lowest": inside["min"].min(),
            **ends(f"{name}_id_worst_drop", drop),
            f"{name}_widest_case": widest["case"],
            f"{name}_widest_rows": int(widest["n"]),
            f"{name}_widest_least": widest["min"],
            f"{name}_widest_most": widest["max"],
            **ends(f"{name}_widest_spread", width),
            f"{name}_adversarial_mean": outside["mean"].mean(),
        }
    return facts


def side_facts(sides: pd.DataFrame, sparsities: Sequence[float], full: float) -> Facts:
    """Both sides of the subnetworks: means over seeds, and how they change.

    `full` is the full model's accuracy on the friendly cases. The second sparsity is compared with
    the first seed by seed.
    """
    facts: Facts = {}
    seeds = sides.set_index(["sparsity", "seed"])
    first, second = (seeds.loc[sparsities[at]] for at in (0, -1))
    for name, chosen in (("first", first), ("second", second)):
        means = chosen[["friendly", "adversarial", "balanced"]].mean()
        facts |= {f"{name}_{side}_side": value for side, value in means.items()}
        facts[f"{name}_balanced_least"] = chosen["balanced"].min()
        facts[f"{name}_balanced_most"] = chosen["balanced"].max()
        said = chosen.groupby("said")["said_share"]
        facts[f"{name}_said"] = said.size().idxmax() if len(said) else ""
        facts[f"{name}_said_seeds"] = int(said.size().max()) if len(said) else 0
        facts[f"{name}_said_share"] = said.mean().get(facts[f"{name}_said"], math.nan)
        facts |= ends(f"{name}_friendly_change", mean_change(chosen["friendly"] - full))
    for side in ("friendly", "adversarial", "balanced"):
        facts |= ends(f"{side}_change", mean_change(second[side] - first[side]))
    return facts


def mean_change(changes: pd.Series) -> Interval:
    """The mean change of an accuracy over seeds; it cannot be more than all of it."""
    mean, low, high = t_interval(changes.to_list())
    return Interval(mean, max(low, -1.0), min(high, 1.0))


def say_spread(facts: Facts, name: str) -> Sentence:
    """Whether subnetworks that agree in domain differ outside; ``N_`` stands for the name."""

    def written(text: str, found: bool | None) -> Sentence:
        return write(facts, text.replace("N_", f"{name}_"), found)

    text = "With {N_sparsity:percent} of the units removed"
    if facts[f"{name}_seeds"] < 2:
        return written(text + " there is one subnetwork: nothing to compare.", None)
    faithful = judge(of(facts, f"{name}_id_worst_drop"), FAITHFUL)
    faithful = None if faithful is None else not faithful
    wide = judge(of(facts, f"{name}_widest_spread"), WIDE)
    text += (
        ", the subnetworks of {N_seeds} seeds are right in domain on {N_id_mean:percent} on "
        "average and {N_id_lowest:percent} at least ("
    )
    text += {
        True: "faithful to the full model",
        False: "not all are faithful",
        None: "too few rows to tell whether all are faithful",
    }[faithful]
    text += (
        "). Their accuracies lie furthest apart on {N_widest_case}, from {N_widest_least:percent} "
        "to {N_widest_most:percent} of {N_widest_rows} rows (a difference of "
        "{N_widest_spread_low:span} to {N_widest_spread_high:span} points, 95% interval)"
    )
    collapsed = has_sides(facts) and judge(loss(facts, f"{name}_friendly_change"), COLLAPSE)
    if has_sides(facts):
        text += (
            "; balanced over friendly and {cases} cases they score {N_balanced_least:percent} to "
            "{N_balanced_most:percent}, the full model {full_balanced:percent}"
        )
        if facts[f"{name}_balanced_side"] <= ONE_ANSWER:
            alone = "the heuristic" if of_prompts(facts) else "one answer"
            text += f"; on average no more than {alone} alone would score"
    if collapsed:
        said = "They lose what the heuristic gives." if of_prompts(facts) else ONE_LABEL
        return written(f"{text}. {COLLAPSED} {said}", None)
    return written(text + _spread_verdict(faithful, wide), _both(faithful, wide))


COLLAPSED = (
    "On the friendly cases they fall from {full_friendly:percent} to {N_friendly_side:percent}."
)
"""What is said of subnetworks that lose the friendly cases; ``N_`` stands for the sparsity."""
ONE_LABEL = (
    "{N_said_seeds} of {N_seeds} answer {N_said} most, on {N_said_share:percent} of the rows of "
    "both sides. Answering one label is not generalising."
)
"""What is said of them where rows have labels."""


def _both(first: bool | None, second: bool | None) -> bool | None:
    """True if both are, False if one is not, None if that cannot be told."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def _spread_verdict(faithful: bool | None, wide: bool | None) -> str:
    if wide is None:
        return ". Too few rows to tell whether they generalise differently."
    return {
        (True, True): ". Close in domain, they generalise differently.",
        (True, False): ". Close in domain, they also generalise alike.",
        (False, True): ". They differ, but not at equal in-domain accuracy.",
        (False, False): ". Outside the seeds agree, in domain some are lost.",
        (None, True): ". They generalise differently.",
        (None, False): ". They generalise alike.",
    }[faithful, wide]


def say_collapse(facts: Facts) -> Sentence:
    """Whether sparser subnetworks lose what goes beyond the heuristic, or answer one label."""
    text = (
        "From {first_sparsity:percent} to {second_sparsity:percent} removed, mean accuracy on the "
        "{cases} cases goes from {first_adversarial_mean:percent} to "
        "{second_adversarial_mean:percent} (a change of "
        "{adversarial_change_low:points} to {adversarial_change_high:points} points over seeds, "
        "95% interval)"
    )
    lost = judge(loss(facts, "adversarial_change"), COLLAPSE)
    if not has_sides(facts):
        text += {
            True: ": smaller subnetworks do worse outside.",
            False: ": no clear loss.",
            None: ": too few seeds to tell.",
        }[lost]
        alone = "the loss of a heuristic" if of_prompts(facts) else "answering one label"
        text += f" No friendly cases are known, so that {alone} cannot be told from generalising."
        return write(facts, text, False if lost is False else None)
    text += (
        ", on the friendly ones from {first_friendly_side:percent} to "
        "{second_friendly_side:percent}, balanced from {first_balanced_side:percent} to "
        "{second_balanced_side:percent} ({balanced_change_low:points} to "
        "{balanced_change_high:points})"
    )
    falls = judge(loss(facts, "balanced_change"), 0.0)
    untold = "the balanced score falls; too few seeds to tell on which side" if falls else ""
    friendly = judge(loss(facts, "friendly_change"), COLLAPSE)
    if friendly:
        return write(facts, text + _friendly_lost(facts, lost), False)
    text += {
        True: ": smaller subnetworks lose what goes beyond the heuristic.",
        False: ": no clear loss on either side."
        if friendly is False
        else ": too few seeds to tell about the friendly cases.",
        None: f": {untold or 'too few seeds to tell'}.",
    }[lost]
    return write(facts, text, lost if friendly is False or lost else None)


def _friendly_lost(facts: Facts, lost: bool | None) -> str:
    """What is said of smaller subnetworks that lose the friendly cases, and others with them."""
    if lost:
        return ": smaller subnetworks lose both sides."
    if of_prompts(facts):
        return ": smaller subnetworks lose what the heuristic gives."
    return (
        ": smaller subnetworks fall into answering one label ({second_said_seeds} of "
        "{second_seeds} answer {second_said} most, on {second_said_share:percent} of the rows), "
        "which is not generalising."
    )


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
            "early_core": early["early"],
            "early_tail": early["tail"],
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
    same = facts["distinct"] < facts["subnetworks"]
    text += f"{which} {{subnetworks}} subnetworks{', {distinct} of them distinct' if same else ''}"
    text += f" ({{core}}); {expected} "
    text += "(probability of as many or more: {core_tail:probability}): "
    text += "they share a core" if above else "not more than chance would give"
    return write(facts, text + (instead if size == 1 else "."), above)


def say_ranks(facts: Facts) -> Sentence:
    """Whether the same heads are kept at both sparsities."""
    agree = facts["spearman"] > 0 and facts["spearman_p"] < CHANCE
    text = (
        "Heads that are kept more often at {first_sparsity:percent} are kept more often at "
        "{second_sparsity:percent} too "
        if agree
        else "How often a head is kept at {first_sparsity:percent} does not clearly tell how often "
        "it is at {second_sparsity:percent} "
    )
    if math.isnan(facts["spearman"]):
        return write(facts, text + "(one of the two is the same for all heads).", False)
    text += (
        "(Spearman {spearman:two}, p {spearman_p:probability}); two subnetworks, of one or "
        "of both sparsities, share on average {jaccard:two} of their heads (Jaccard; chance "
        "{jaccard_expected:two})."
    )
    return write(facts, text, agree)


def say_early(facts: Facts) -> Sentence:
    """Whether the core was there before generalisation."""
    if facts["early_size"] == 0:
        return write(facts, "The early checkpoint has no core to compare with.", False)
    text = (
        "{early_shared} of the {early_size} core heads of the early checkpoint ({early_core}) are "
        "in the final core (a random set of its size would hold {early_expected:percent} of them; "
        "probability of as many or more: {early_tail:probability}): "
    )
    if facts["early_shared"] == facts["early_size"]:
        sure = facts["early_tail"] < CHANCE
        text += "the early core survives whole"
        return write(facts, text + ("." if sure else ", which chance may do."), sure or None)
    text += "it survives in part." if facts["early_shared"] else "none of it survives."
    return write(facts, text, False)


def ablation_facts(excess: pd.DataFrame, scan: pd.DataFrame, heads: Sequence[str]) -> Facts:
    """What removing the heads together costs, against each of them alone.

    Whether a case is super-additive is the verdict of the table. Shown is the super-additive case
    with the largest excess; if there is none, the case with the largest of those that were tested.
    """
    joint = excess.loc[excess["size"] == len(heads)]
    outside = joint.loc[joint["dataset"] == "ood"]
    sure = outside.loc[outside["verdict"] == SUPERADDITIVE]
    tested = outside.loc[outside["p"].notna()]
    shown = next((part for part in (sure, tested) if len(part)), outside)
    top = shown.loc[shown["excess"].idxmax()]
    alone = scan["set"].str.fullmatch(r"L\d+\.H\d+")
    single = scan.loc[alone & (scan["dataset"] == "ood")]
    core = single["set"].isin(list(heads))
    return {
        "joint_id_drop": joint.loc[joint["dataset"] == "id", "drop"].mean(),
        "joint_case": top["case"],
        "joint_drop": top["drop"],
        "joint_losses": top["sum_of_losses"],
        "joint_excess": top["excess"],
        "joint_low": top["low"],
        "joint_high": top["high"],
        "superadditive_cases": len(sure),
        "untold_cases": int((outside["verdict"] == CANNOT_TELL).sum()),
        "spent_cases": int((outside["verdict"].eq(CANNOT_TELL) & nothing_is_left(outside)).sum()),
        "ablation_cases": len(outside),
        "core_head_change": single.loc[core, "accuracy_change"].mean(),
        "other_head_change": single.loc[~core, "accuracy_change"].mean(),
    }


def say_joint(facts: Facts) -> Sentence:
    """Whether the core heads lose more together than the sum of what each loses alone."""
    some = facts["superadditive_cases"] > 0
    text = "The core heads" if facts["core_size"] > 1 else "The heads"
    text += " are super-additive on " + ("{superadditive_cases}" if some else "none")
    text += " of {ablation_cases} {cases} cases"
    if facts["untold_cases"]:
        text += " ({untold_cases} cannot tell; in {spent_cases} of these the heads alone already "
        text += "lose all that there is)"
    text += ": " if some else "; nearest, "
    text += (
        "on {joint_case} removing them together costs {joint_drop:span} points, the losses of each "
        "alone sum to {joint_losses:span}, the excess is {joint_excess:span} (95% interval "
        "{joint_low:span} to {joint_high:span}). In domain it costs {joint_id_drop:span}."
    )
    untold = facts["untold_cases"] == facts["ablation_cases"]
    return write(facts, text, None if untold else some)


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
        "overlap_others": len(sure) - len(named),
        "other_heads": int((~inside).sum()),
        "overlap_p": more_often(len(named), int(inside.sum()), len(sure), len(overlap)),
        "overlap_least": ROLE_MASS,
        "overlap_core_mass": overlap.loc[inside, "value"].mean(),
        "overlap_other_mass": overlap.loc[~inside, "value"].mean(),
        "overlap_chance": overlap["chance"].iloc[0],
    }


def say_attention(facts: Facts) -> Sentence:
    """Whether core heads look for the same word in the other sentence."""
    if of_prompts(facts):
        text = "Attention to words that two sentences share is left out: a prompt is one text."
        return write(facts, text, None)
    if math.isnan(facts["overlap_core_mass"]):
        return write(facts, "The rows have no word that stands in two sentences.", None)
    some = facts["overlap_core"] > 0
    text = "On in-domain rows "
    text += (
        "{overlap_core} of these heads ({overlap_heads}) look"
        if some
        else "none of these heads looks"
    )
    text += (
        " at the same content word in the other sentence (with {overlap_least:percent} of their "
        "attention or more, twice chance and twice what is left with another row's hypothesis, "
        "whatever else they look at), and {overlap_others} of the {other_heads} other heads (they "
        "do so more often with p {overlap_p:probability}, Fisher, one-sided); on average these "
        "heads give it {overlap_core_mass:percent} of their attention, other "
        "heads {overlap_other_mass:percent}, uniform attention {overlap_chance:percent}."
    )
    return write(facts, text, facts["overlap_p"] < LIKELY or (None if some else False))


def more_often(named: int, heads: int, sure: int, every: int) -> float:
    """Fisher's one-sided p-value that the heads in question do something more often."""
    # The heads are a draw from all of them, of which `sure` do it.
    return float(hypergeom.sf(named - 1, every, sure, heads))


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
            "edges_heads": list(top["sender"].unique()),
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
        facts["dependent_kl"] = by_head.loc[head, "kl"]
        facts["dependent_rows"] = int(cut.loc[cut["head"] == head, "n"].sum())
        facts["dependent_change"] = by_head.loc[head, "accuracy_change"]
    return facts


def say_trace(facts: Facts) -> Sentence:
    """Whether a few edges carry what the core does."""
    readers = {
        "mlp": "{edge_receiver}",
        "classifier": "the classifier",
        "unembed": "the unembedding",
    }
    text = "On {cases} rows the strongest edge from these heads leads from {edge_sender} to "
    text += readers.get(facts["edge_kind"], "the {edge_kind} of {edge_receiver}")
    carried = None
    if "edges_explained" in facts:
        carried = facts["edges_explained"] > CARRIED
        one = facts["edges_fewest"] == facts["edges_most"]
        edges = "{edges_most}" if one else "{edges_fewest} to {edges_most}"
        text += (
            f"; of {{edges_heads}}, with {edges} edges each, the {{edges_patched}} strongest "
            "together do {edges_explained:percent} of what removing the head does (KL, on the rows "
            "on which they are the strongest): "
        )
        text += "a few wires carry most of it" if carried else "it is spread over many wires"
    text += "."
    if "dependent_head" in facts:
        text += (
            " The head that depends on them most is {dependent_head} (KL {dependent_kl:two}): "
            "cutting it off from them alone changes accuracy there by {dependent_change:points} "
            "points on average over the cases ({dependent_rows} rows)."
        )
    return write(facts, text, carried)


def size_facts(table: pd.DataFrame, grid: Sequence[float]) -> Facts:
    """The effective size at every checkpoint of the series."""
    facts: Facts = {
        "size_checkpoints": list(table["checkpoint"].unique()),
        "size_seeds": int(table["seeds"].min()),
        # A size cannot be told more finely than the grid.
        "size_step": 100 * max(b - a for a, b in pairwise([*grid, 1.0])),
    }
    for target, part in table.groupby("target", sort=False):
        if target not in TARGETS:
            continue
        sizes = part["effective_size"]
        facts[f"size_{target}"] = [f"{size:g}%" for size in sizes]
        facts[f"size_{target}_range"] = sizes.max() - sizes.min()
        facts[f"size_{target}_rise"] = sizes.iloc[-1] - sizes.iloc[0]
        # A floor is missing where there is no chance level.
        facts[f"size_{target}_doubts"] = [
            f"{TARGETS[str(target)]} at checkpoint {row['checkpoint']} {FLAGS[flag]}"
            for row in part.to_dict(orient="records")
            for flag in FLAGS
            if pd.notna(row[flag]) and row[flag]
        ]
    return facts


def say_sizes(facts: Facts) -> Sentence:
    """Whether generalising took more of the network while the in-domain part stayed."""
    least = max(FLAT, facts["size_step"])
    flat, rises = facts["size_id_range"] <= least, facts["size_ood_rise"] > least
    text = (
        "At the checkpoints {size_checkpoints} the effective size is {size_id} of the units in "
        "domain and {size_ood} on the {cases} cases"
    )
    text += ", balanced with the friendly ones {size_balanced}" if "size_balanced" in facts else ""
    text += " ({size_seeds} seeds, a grid in steps of {size_step}%): "
    text += "in domain it stays about the same, " if flat else "in domain it moves too, "
    text += "outside it rises." if rises else "outside it does not rise."
    doubts = [doubt for name in TARGETS for doubt in facts.get(f"size_{name}_doubts", [])]
    if doubts:
        text += f" To be read with care: {'; '.join(doubts)}."
    return write(facts, text, None if doubts else flat and rises)
