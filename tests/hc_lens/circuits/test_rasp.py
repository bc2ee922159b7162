"""Compiled programs: TransformerLens computes what Tracr computed, and unused units are zeros."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.circuits.rasp import PROGRAMS, compiled, read_program, true_units
from hc_lens.errors import HcLensError
from tests.lens import BRIDGES, bridges_only, hooked_only

each_program = pytest.mark.parametrize("name", PROGRAMS)


@hooked_only
@each_program
def test_the_residual_stream_is_the_one_that_tracr_computed(name) -> None:
    program, model = read_program(name), compiled(name).model
    streams = [key for key in program.tensors if key.startswith("stream.")]
    assert len(streams) == 6
    for number in range(len(streams)):
        tokens = torch.tensor([program.examples[number].tokens])
        ours = model(tokens, stop_at_layer=model.cfg.n_layers)[0]
        torch.testing.assert_close(ours, program.tensors[f"stream.{number}"], atol=2e-5, rtol=0)


@hooked_only
@each_program
@pytest.mark.parametrize("spare_heads", [0, 2])
def test_every_output_is_that_of_tracr(name, spare_heads) -> None:
    known = compiled(name, spare_heads=spare_heads)
    table = hc.evaluate(known.model, known.batches, progress=False)
    assert (table["accuracy"] == 1.0).all()
    assert table["n"].sum() == known.batches.n_rows > 100


@hooked_only
def test_a_number_is_told_by_the_nearest_value() -> None:
    program = read_program("frac-prevs")
    known = compiled("frac-prevs")
    assert program.values == [0.0, 0.2, 0.25, 0.3333, 0.4, 0.5, 0.6, 0.6667, 0.75, 0.8, 1.0]
    (batch,) = [batch for batch in known.batches if batch.tokens.shape[1] == 3]
    logits = known.model(batch.tokens)[torch.arange(len(batch)), batch.reads]
    # 0.2 and 0.25 are nearest: each is 4 nats less likely than the other where it is wrong.
    gaps = logits.topk(2).values.diff().abs()
    assert gaps.min() > 3.9


@hooked_only
@each_program
def test_units_that_are_not_true_write_exactly_nothing(name) -> None:
    known = compiled(name, spare_heads=1, limit=8)
    others = [unit for unit in known.space if unit not in known.units]
    assert len(others) >= known.model.cfg.n_layers
    for batch in known.batches:
        before = known.model(batch.tokens)
        with hc.ablate(known.model, others, "zero"):
            assert torch.equal(known.model(batch.tokens), before)


@hooked_only
@each_program
@pytest.mark.parametrize("replacement", ["zero", "means"])
def test_exact_ablation_puts_every_true_unit_above_every_other(name, replacement) -> None:
    known = compiled(name, spare_heads=1, limit=20)
    source = replacement
    if replacement == "means":
        source = hc.collect_means(known.model, known.batches, progress=False)
    table = hc.scan(known.model, {"rows": known.batches}, source, progress=False)
    moved = table.groupby("set")["kl"].mean()
    labels = [str(unit) for unit in known.units]
    others = moved.drop(["full", *labels])
    assert len(others) > 0
    assert others.abs().max() < 1e-9 < 0.1 < moved[labels].min()


@hooked_only
def test_the_model_may_be_exact_in_double_precision() -> None:
    known = compiled("sort", dtype=torch.float64)
    assert known.model.cfg.dtype == torch.float64
    assert known.model(known.batches[0].tokens).dtype == torch.float64


def test_the_true_units_of_reverse_are_those_that_the_program_needs() -> None:
    # Lengths are counted in layer 0; positions are subtracted by two MLPs; then tokens are moved.
    found = [str(unit) for unit in true_units(read_program("reverse"))]
    assert found == ["L0.H0", "L3.H0", "L0.MLP", "L1.MLP", "L2.MLP"]


@hooked_only
def test_rows_may_be_fewer_and_bad_input_is_named() -> None:
    assert compiled("sort", limit=3).batches.n_rows < compiled("sort").batches.n_rows
    with pytest.raises(HcLensError, match="limit"):
        compiled("sort", limit=0)
    with pytest.raises(HcLensError, match="spare_heads"):
        compiled("sort", spare_heads=-1)


def test_an_unknown_program_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(HcLensError, match="pair-balance"):
        compiled("dyck")


@bridges_only
def test_transformerlens_4_is_told_to_go_back() -> None:
    assert BRIDGES
    with pytest.raises(HcLensError, match="TransformerLens 3"):
        compiled("sort")
