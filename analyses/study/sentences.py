"""What the numbers say, in words: every finding has a wording for when it is there and one for when
it is not.

A sentence takes its numbers from the facts alone (`analyses.study.facts`), so that each can be
looked up. The thresholds that decide the wording stand here by name.
"""

from __future__ import annotations

import math
from typing import Any

from hc_lens.show.report import Fact, Part, Sentence

FAITHFUL = 0.05
"""Subnetworks are faithful in domain if none is further below the full model than this."""
WIDE = 0.15
"""Seeds differ on a case if their accuracies span more than this."""
COLLAPSE = 0.10
"""The sparser subnetworks fall back on the heuristic if adversarial accuracy is lower by this."""
CHANCE = 0.01
"""A core is larger than chance if its tail probability is below this."""
CARRIED = 0.5
"""A few edges carry the effect if they make up more than this share of it."""
ADVERSARIAL = "adversarial"
"""How cases are called that the heuristic gets wrong; others are out of domain only."""
FLAGS = {
    "floor": "the model is at its floor, where any subnetwork is faithful",
    "ceiling": "the largest sparsity of the grid still passes",
    "none_passes": "no sparsity of the grid passes",
}
"""What makes an effective size doubtful."""
NEAR = 0.05
"""Out of domain the model does about as well if it is at most this much below in domain."""
FLAT = 10.0
"""An effective size that moves by at most so many percent of the units is flat."""

STYLES = {
    "_accuracy": "percent",
    "_mean": "percent",
    "_lowest": "percent",
    "_low": "percent",
    "_high": "percent",
    "_sparsity": "percent",
    "_share": "percent",
    "explained": "percent",
    "_mass": "percent",
    "overlap_chance": "percent",
    "overlap_least": "percent",
    "_spread": "span",
    "_drop": "span",
    "_change": "points",
    "joint_sum": "span",
    "joint_excess": "span",
    "joint_low": "span",
    "joint_high": "span",
    "_tail": "probability",
    "_p": "probability",
    "spearman": "two",
    "jaccard": "two",
    "jaccard_expected": "two",
    "core_expected": "probability",
    "core_fraction": "percent",
    "early_expected": "percent",
}
"""How a fact is shown, by the end of its name; the longest end that fits decides."""


def style_of(name: str) -> str:
    """The style in which a fact is shown."""
    ends = [end for end in STYLES if name.endswith(end)]
    return STYLES[max(ends, key=len)] if ends else "number"


def write(facts: dict[str, Any], text: str, found: bool | None) -> Sentence:
    """A sentence from a text with names of facts in braces."""
    parts: list[Part] = []
    for piece in text.replace("}", "{").split("{"):
        if piece not in facts:
            parts.append(piece)
        elif isinstance(facts[piece], (int, float)):
            parts.append(Fact(piece, facts[piece], style_of(piece)))
        else:
            value = facts[piece]
            parts.append(", ".join(value) if isinstance(value, list) else str(value))
    return Sentence(tuple(part for part in parts if part != ""), found)


def findings(facts: dict[str, Any]) -> list[Sentence]:
    """Every finding that there are facts for, in the order of the study."""
    said = [of_model(facts), of_spread(facts, "first"), of_spread(facts, "second")]
    said += [of_collapse(facts), of_core(facts), of_ranks(facts)]
    if "early_size" in facts:
        said.append(of_early(facts))
    said += [of_joint(facts), of_attention(facts), of_trace(facts)]
    if "size_last_id" in facts:
        said.append(of_sizes(facts))
    return said


def of_model(facts: dict[str, Any]) -> Sentence:
    """How the full model does."""
    gap = facts["id_accuracy"] - facts["adversarial_accuracy"]
    text = (
        "The full model is right on {id_accuracy} of {id_rows} in-domain rows and, on average over "
        "{adversarial_cases} {cases} cases, on {adversarial_accuracy} (from {worst_case_accuracy} "
        "on {worst_case} to {best_case_accuracy} on {best_case})"
    )
    if gap <= NEAR:
        return write(facts, text + ": out of domain it does about as well.", False)
    if facts["cases"] != ADVERSARIAL:
        return write(facts, text + ": out of domain it does worse.", None)
    if facts["best_case_accuracy"] > 0.5:
        return write(facts, text + ": out of domain it generalises in part.", True)
    return write(facts, text + ": out of domain it follows the heuristic.", False)


def of_spread(facts: dict[str, Any], name: str) -> Sentence:
    """Whether subnetworks that agree in domain differ outside."""
    if facts[f"{name}_seeds"] < 2:
        text = "With {N_sparsity} of the units removed there is one subnetwork: nothing to compare."
        return write(facts, text.replace("N_", f"{name}_"), None)
    faithful = facts[f"{name}_id_worst_drop"] <= FAITHFUL
    wide = facts[f"{name}_widest_spread"] > WIDE
    text = (
        "With {N_sparsity} of the units removed, the subnetworks of {N_seeds} seeds are right "
        "in domain on {N_id_mean} on average and {N_id_lowest} at least"
    )
    text += " (faithful to the full model)" if faithful else " (not all are faithful)"
    text += (
        ", and their accuracy on {N_widest_case} ranges from {N_widest_low} to {N_widest_high}: "
        if wide
        else ", and on no {cases} case do their accuracies lie further apart than "
        "{N_widest_spread} points ({N_widest_case}): "
    )
    text += {
        (True, True): "close in domain, they generalise differently.",
        (True, False): "close in domain, they also generalise alike.",
        (False, True): "they differ, but not at equal in-domain accuracy.",
        (False, False): "outside the seeds agree, in domain some are lost.",
    }[faithful, wide]
    return write(facts, text.replace("N_", f"{name}_"), faithful and wide)


def of_collapse(facts: dict[str, Any]) -> Sentence:
    """Whether sparser subnetworks lose what goes beyond the heuristic."""
    lost = facts["first_adversarial_mean"] - facts["second_adversarial_mean"] > COLLAPSE
    text = (
        "From {first_sparsity} to {second_sparsity} removed, mean accuracy on the {cases} "
        "cases goes from {first_adversarial_mean} to {second_adversarial_mean}"
    )
    if not lost:
        return write(facts, text + ": no clear loss.", False)
    if facts["cases"] != ADVERSARIAL:
        return write(facts, text + ": smaller subnetworks do worse outside.", None)
    return write(facts, text + ": smaller subnetworks lose what goes beyond the heuristic.", True)


def of_core(facts: dict[str, Any]) -> Sentence:
    """Whether subnetworks share more heads than chance."""
    size = facts["core_size"]
    which = "all" if facts["core_fraction"] == 1 else "at least {core_fraction} of the"
    instead = "; what follows looks at the most frequent ones: {looked_at}."
    if size == 0:
        text = f"No head is in {which} {{subnetworks}} subnetworks (chance expects "
        return write(facts, f"{text}{{core_expected}}){instead}", False)
    above = facts["core_tail"] < CHANCE
    text = "{core_size} of {heads} heads " + ("appears in " if size == 1 else "appear in ")
    text += f"{which} {{subnetworks}} subnetworks ({{core}}); chance expects {{core_expected}} "
    text += "(probability of as many or more: {core_tail}): "
    text += "they share a core" if above else "not more than chance would give"
    return write(facts, text + (instead if size == 1 else "."), above)


def of_ranks(facts: dict[str, Any]) -> Sentence:
    """Whether the same heads are kept at both sparsities."""
    agree = facts["spearman"] > 0 and facts["spearman_p"] < CHANCE
    text = (
        "Heads that are often kept at {first_sparsity} are often kept at {second_sparsity} too "
        if agree
        else "How often a head is kept at {first_sparsity} does not clearly tell how often it is "
        "at {second_sparsity} "
    )
    if math.isnan(facts["spearman"]):
        return write(facts, text + "(one of the two is the same for all heads).", False)
    text += "(Spearman {spearman}, p {spearman_p}); two subnetworks share {jaccard} of their heads "
    return write(facts, text + "(Jaccard; chance {jaccard_expected}).", agree)


def of_early(facts: dict[str, Any]) -> Sentence:
    """Whether the core was there before generalisation."""
    if facts["early_size"] == 0:
        return write(facts, "The early checkpoint has no core to compare with.", False)
    survives = facts["early_shared"] == facts["early_size"]
    text = "{early_shared} of the {early_size} core heads of the early checkpoint are in the final "
    text += "core (a random set of its size would hold {early_expected} of them): "
    text += {
        True: "the early core survives whole.",
        False: "it survives in part." if facts["early_shared"] else "none of it survives.",
    }[survives]
    return write(facts, text, survives)


def of_joint(facts: dict[str, Any]) -> Sentence:
    """Whether the core heads do more together than the sum of each alone."""
    some = facts["superadditive_cases"] > 0
    who = "core heads" if facts["core_size"] > 1 else "heads"
    numbers = (
        "on {joint_case} removing them together costs {joint_drop} points, the sum of each alone "
        "is {joint_sum}, the excess {joint_excess} (95% interval {joint_low} to {joint_high})"
    )
    if some:
        text = f"The {who} are super-additive on {{superadditive_cases}} of {{ablation_cases}} "
        text += f"{{cases}} cases: {numbers}. In domain it costs {{joint_id_drop}}."
    else:
        text = f"The {who} are super-additive on none of {{ablation_cases}} {{cases}} cases; "
        text += f"nearest, {numbers}. In domain it costs {{joint_id_drop}}."
    return write(facts, text, some)


def of_attention(facts: dict[str, Any]) -> Sentence:
    """Whether core heads look for the same word in the other sentence."""
    if math.isnan(facts["overlap_core_mass"]):
        return write(facts, "The rows have no word that stands in two sentences.", None)
    some = facts["overlap_core"] > 0
    mass = (
        "on average these heads give it {overlap_core_mass} of their attention, other heads "
        "{overlap_other_mass}, uniform attention {overlap_chance}"
    )
    where = (
        "at the same content word in the other sentence (with {overlap_least} of their attention "
    )
    where += "or more, twice chance and twice what is left with another row's hypothesis)"
    text = (
        f"{{overlap_core}} of these heads ({{overlap_heads}}) look {where}; {mass}."
        if some
        else f"None of these heads looks {where}; {mass}."
    )
    return write(facts, text, some)


def of_trace(facts: dict[str, Any]) -> Sentence:
    """Whether a few edges carry what the core does."""
    readers = {"mlp": "{edge_receiver}", "classifier": "the classifier"}
    reader = readers.get(facts["edge_kind"], "the {edge_kind} of {edge_receiver}")
    text = "On {cases} rows the strongest edge from these heads leads from {edge_sender} to "
    text += reader
    carried = None
    if "edges_explained" in facts:
        carried = facts["edges_explained"] > CARRIED
        one = facts["edges_fewest"] == facts["edges_most"]
        edges = "{edges_most}" if one else "{edges_fewest} to {edges_most}"
        text += f"; the {{edges_patched}} strongest of the {edges} edges of each head together "
        text += "make up {edges_explained} of what removing it changes (KL): "
        text += "a few wires carry most of it" if carried else "it is spread over many wires"
    text += "."
    if "dependent_head" in facts:
        text += (
            " The head that depends on them most is {dependent_head}: cutting it off from them "
            "alone changes accuracy there by {dependent_change} points on average."
        )
    return write(facts, text, carried)


def of_sizes(facts: dict[str, Any]) -> Sentence:
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
    told = [
        f"{where} at checkpoint {facts[f'size_{name}_checkpoint']} {FLAGS[flag]}"
        for name in ("first", "last")
        for target, where in (("id", "in domain"), ("ood", "outside"))
        for flag in facts[f"size_{name}_{target}_flags"]
    ]
    if told:
        text += f" To be read with care: {'; '.join(told)}."
    return write(facts, text, None if told else flat and rises)
