"""Self-repair against hooks that hold every unit, and on a model whose backup is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses import self_repair, superadditive
from hc_lens.analyses.self_repair import RepairConfig, repair_rows
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import mlp_name, z_name
from hc_lens.units import as_units
from tests import tiny
from tests.batches import Batches, Rows, random_batches
from tests.lens import HookedTransformer, HookedTransformerConfig, hooked_only, hooks_on

SETS = ["L0.H1", "L0.MLP", "L1.H2", "L0.H1+L1.H0"]


def names_of(model) -> list[str]:
    return [name(layer) for layer in range(model.cfg.n_layers) for name in (z_name, mlp_name)]


def outputs(model, inputs, edits=()) -> dict[str, torch.Tensor]:
    """What every unit writes, with some hooks put on first."""
    seen = {}
    keep = [
        (name, lambda x, hook, name=name: seen.update({name: x.clone()}))
        for name in names_of(model)
    ]
    with torch.no_grad():
        model.run_with_hooks(**inputs, fwd_hooks=[*edits, *keep])
    return seen


def held_at(model, inputs, values, scales=()) -> torch.Tensor:
    """The logits if every unit writes given values."""
    hold = [(name, lambda x, hook, name=name: values[name]) for name in names_of(model)]
    with torch.no_grad():
        return model.run_with_hooks(**inputs, fwd_hooks=[*hold, *scales])


def mixed(clean, ablated, units) -> dict[str, torch.Tensor]:
    """Some units as in the ablated run, all others as in the clean one."""
    values = {name: value.clone() for name, value in clean.items()}
    for unit in units:
        if unit.is_head:
            name = z_name(unit.layer)
            values[name][:, :, unit.head] = ablated[name][:, :, unit.head]
        else:
            values[mlp_name(unit.layer)] = ablated[mlp_name(unit.layer)]
    return values


def log_odds(batches, batch, logits) -> np.ndarray:
    """Of each row's label."""
    log_probs = batches.log_probs(logits, batch).double()
    own = log_probs[torch.arange(len(batch.labels)), batch.labels]
    return (own - torch.log(-torch.expm1(own))).numpy()


@pytest.fixture
def case(hooked):
    batches = random_batches(hooked)
    return hooked, batches, hc.collect_means(hooked, batches, progress=False)


def test_every_step_is_a_forward_pass_in_which_hooks_hold_every_unit(case) -> None:
    model, batches, means = case
    found = repair_rows(model, batches, means, SETS, progress=False)
    start = 0
    for batch in batches:
        here = slice(start, start + len(batch.labels))
        clean = outputs(model, batch.inputs)
        full = log_odds(batches, batch, model(**batch.inputs))
        np.testing.assert_allclose(found.full[here], full, atol=1e-8)
        for index, label in enumerate(found.sets):
            units = as_units(label)
            with hc.ablate(model, units, means):
                ablated = outputs(model, batch.inputs)
                total = log_odds(batches, batch, model(**batch.inputs))
            changed = list(units)
            value = log_odds(
                batches, batch, held_at(model, batch.inputs, mixed(clean, ablated, changed))
            )
            ours = full + found.direct[index, here] + found.norm[index, here]
            np.testing.assert_allclose(ours, value, atol=1e-8)
            for place, name in enumerate(found.units):
                if name in label.split("+"):
                    assert not found.later[index, place].any()
                    continue
                changed += as_units(name)
                logits = held_at(model, batch.inputs, mixed(clean, ablated, changed))
                ours = ours + found.later[index, place, here]
                np.testing.assert_allclose(ours, log_odds(batches, batch, logits), atol=1e-8)
            np.testing.assert_allclose(full + found.total[index, here], total, atol=1e-8)
        start += len(batch.labels)
    assert hooks_on(model) == []


@hooked_only
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_direct_effect_holds_the_scale_of_every_norm(kind) -> None:
    model = hc.load(tiny.tiny_hf(kind), dtype=torch.float64)
    batches = random_batches(model)
    found = repair_rows(model, batches, "zero", ["L0.H1"], progress=False)
    batch, scales = batches[0], {}
    points = [
        name for name in model.hook_dict if name.endswith("hook_scale") and "embed" not in name
    ]
    keep = [(name, lambda x, hook: scales.update({hook.name: x.clone()})) for name in points]
    model.run_with_hooks(**batch.inputs, fwd_hooks=keep)
    clean = outputs(model, batch.inputs)
    with hc.ablate(model, ["L0.H1"], "zero"):
        ablated = outputs(model, batch.inputs)
    held = [(name, lambda x, hook: scales[hook.name]) for name in points]
    logits = held_at(model, batch.inputs, mixed(clean, ablated, as_units("L0.H1")), held)
    change = log_odds(batches, batch, logits) - found.full[: len(batch.labels)]
    np.testing.assert_allclose(found.direct[0, : len(batch.labels)], change, atol=1e-8)
    assert np.abs(found.norm[0]).max() > 1e-4


def without_norms(n_layers: int = 2, **changes):
    """A random decoder without norms, two outputs, float64."""
    settings = {
        **{"n_layers": n_layers, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 12},
        **{"d_vocab": 20, "d_vocab_out": 2, "act_fn": "relu", "normalization_type": None},
        **{"seed": 0, "device": "cpu", "dtype": torch.float64},
    }
    model = HookedTransformer(HookedTransformerConfig(**{**settings, **changes}))
    return model.requires_grad_(False).eval()


def one_batch(rows: int = 6, pos: int = 5) -> Batches:
    ids = torch.randint(1, 20, (rows, pos), generator=torch.Generator().manual_seed(0))
    inputs = {"input": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.arange(rows) % 2
    return Batches([Rows(inputs, torch.arange(rows), labels, ("all",) * rows)])


@hooked_only
def test_without_norms_total_is_direct_plus_indirect_each_measured_alone() -> None:
    model, batches = without_norms(), one_batch()
    tiny.roughen(model)
    batch = batches[0]
    found = repair_rows(model, batches, "zero", ["L0.H1"], progress=False)
    # Two outputs: the log-odds are a difference of logits, linear in what the units write.
    assert np.abs(found.norm).max() < 1e-12
    clean = outputs(model, batch.inputs)
    with hc.ablate(model, ["L0.H1"], "zero"):
        ablated = outputs(model, batch.inputs)
        at_end = model(**batch.inputs)[:, -1]

    def change(units) -> np.ndarray:
        logits = held_at(model, batch.inputs, mixed(clean, ablated, as_units(units)))[:, -1]
        return log_odds(batches, batch, logits) - found.full

    later = ["L0.MLP", "L1.H0", "L1.H1", "L1.MLP"]
    np.testing.assert_allclose(found.direct[0], change("L0.H1"), atol=1e-10)
    for unit in later:
        place = found.units.index(unit)
        np.testing.assert_allclose(found.later[0, place], change(unit), atol=1e-10)
    indirect = change("+".join(later))
    total = log_odds(batches, batch, at_end) - found.full
    np.testing.assert_allclose(found.direct[0] + indirect, total, atol=1e-10)


def with_a_backup():
    """L0.H0 writes 1 along the answer; where it is missing, L1.MLP does."""
    model = without_norms(d_mlp=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.blocks[0].attn.b_V[0, 0] = 1.0
        model.blocks[0].attn.W_O[0, 0, 0] = 1.0
        model.blocks[1].mlp.W_in[0, 0] = -1.0
        model.blocks[1].mlp.b_in[0] = 1.0
        model.blocks[1].mlp.W_out[0, 0] = 1.0
        model.unembed.W_U[0, 1] = 1.0
    return model


@hooked_only
def test_a_backup_is_found_and_its_share_of_the_interaction_is_all_of_it() -> None:
    model, batches = with_a_backup(), one_batch()
    batches[0].labels.fill_(1)
    found = self_repair.analyse(model, batches, "zero", ["L0.H0", "L0.H0+L1.MLP"], progress=False)
    alone, joint, other = (
        found.effects.set_index("set").loc[name] for name in ("L0.H0", "L0.H0+L1.MLP", "L1.MLP")
    )
    assert (alone["full"], alone["direct"], alone["norm"], alone["later"]) == (1.0, -1.0, 0.0, 1.0)
    assert (alone["total"], alone["share"], alone["helpers"]) == (0.0, 1.0, "L1.MLP 1")
    assert (joint["total"], joint["given_back"], joint["helpers"]) == (-1.0, 0.0, "")
    assert other["total"] == 0.0
    assert np.isnan(other["share"])
    (line,) = found.backup.to_dict("records")
    assert (line["interaction"], line["backup"], line["backup_direct"]) == (1.0, 1.0, 0.0)
    assert line["backup_units"] == "L1.MLP 1"
    giver = found.givers.loc[found.givers["set"] == "L0.H0"].iloc[0]
    assert (giver["unit"], giver["change"], giver["low"], giver["high"]) == (
        "L1.MLP",
        1.0,
        1.0,
        1.0,
    )


@hooked_only
def test_super_additivity_says_that_its_interaction_is_backup() -> None:
    model, batches = with_a_backup(), one_batch()
    batches[0].labels.fill_(1)
    settings = {"joint": ("L0.H0+L1.MLP",), "measure": "logit", "n_resamples": 100}
    plain, more = (
        superadditive.analyse(
            model,
            batches,
            "zero",
            ["L0.H0", "L1.H0"],
            superadditive.SuperAdditiveConfig(**settings, backup=backup),
            progress=False,
        ).excess
        for backup in (False, True)
    )
    (line,) = more.to_dict("records")
    assert (line["drop"], line["sum_of_drops"], line["excess"]) == (1.0, 0.0, 1.0)
    assert (line["backup"], line["backup_share"], line["backup_units"]) == (1.0, 1.0, "L1.MLP 1")
    assert "backup" not in plain
    assert more[plain.columns].equals(plain)


def test_the_parts_add_up_for_a_measure_that_is_not_linear(case) -> None:
    model, batches, means = case
    sets = ["L0.H1+L1.H0", "L0.H1+L0.MLP"]
    for measure in ("accuracy", "kl", "probability"):
        config = RepairConfig(measure=measure, n_resamples=100)
        found = self_repair.analyse(model, {"a": batches}, means, sets, config, progress=False)
        table, split = found.effects, found.backup
        parts = table["direct"] + table["norm"] + table["later"]
        np.testing.assert_allclose(table["total"], parts, atol=1e-12)
        by_unit = found.givers.groupby("set")["change"].sum().reindex(table["set"], fill_value=0)
        np.testing.assert_allclose(by_unit, table["later"], atol=1e-8)
        whole = split["backup_direct"] + split["backup_norm"] + split["backup"]
        np.testing.assert_allclose(split["interaction"], whole, atol=1e-12)
        scanned = hc.scan(
            model,
            {"a": batches},
            means,
            sets=found.rows.sets,
            metrics=[measure] * (measure == "probability"),
            progress=False,
        )
        change = scanned.set_index("set")[measure]
        full = 0.0 if measure == "kl" else change["full"]
        np.testing.assert_allclose(
            table.set_index("set")["total"], change[list(found.rows.sets)] - full, atol=1e-8
        )


def test_a_unit_of_the_last_layer_has_no_later_units_but_its_mlp(case) -> None:
    model, batches, means = case
    found = repair_rows(model, batches, means, ["L1.MLP", "L1.H0"], progress=False)
    assert not found.later[0].any()
    moved = np.flatnonzero(found.later[1].any(1))
    assert [found.units[place] for place in moved] == ["L1.MLP"]


def test_bad_input_is_named(case) -> None:
    model, batches, means = case
    with pytest.raises(HcLensError, match="a measure among"):
        repair_rows(model, batches, means, measure="luck")
    with pytest.raises(HcLensError, match=r"L7\.H0"):
        repair_rows(model, batches, means, ["L7.H0"])
    found = repair_rows(model, batches, means, ["L0.H0"], progress=False)
    with pytest.raises(HcLensError, match="each member alone"):
        self_repair.backup(found, ["L0.H0+L0.H1"])
    with pytest.raises(HcLensError, match="at least 100 resamples"):
        RepairConfig(n_resamples=3)
    for batch in batches:
        batch.labels.fill_(-1)
    with pytest.raises(HcLensError, match="expected rows with labels"):
        repair_rows(model, batches, means, ["L0.H0"], progress=False)
    assert repair_rows(model, batches, means, ["L0.H0"], "margin", progress=False).total.any()


def test_the_figure_draws_the_sets_of_a_case(case) -> None:
    model, batches, means = case
    found = self_repair.analyse(
        model, batches, means, SETS, RepairConfig(n_resamples=100), progress=False
    )
    (axes,) = found.figure().axes
    named = {text.get_text() for text in axes.get_legend().get_texts()}
    assert named == {"direct effect", "norms", "later units", "total effect"}
    assert {text.get_text() for text in axes.get_xticklabels()} == {*SETS, "L1.H0"}
    with pytest.raises(HcLensError, match="a case of the table"):
        found.figure("swap")
