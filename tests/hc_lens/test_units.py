from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hc_lens as hc
from hc_lens.units import Unit, UnitSpace, resolve_sets, set_label

TWO_BY_THREE = UnitSpace((3, 3), (0, 1))


def test_heads_come_first_layer_by_layer_then_the_mlps():
    assert TWO_BY_THREE.labels == [
        "L0.H0", "L0.H1", "L0.H2", "L1.H0", "L1.H1", "L1.H2", "L0.MLP", "L1.MLP",
    ]  # fmt: skip
    assert len(TWO_BY_THREE) == 8


def test_bert_base_has_144_heads_and_12_mlps():
    space = UnitSpace.of(SimpleNamespace(cfg=SimpleNamespace(n_layers=12, n_heads=12)))
    assert len(space) == 156
    assert space.index("L11.H11") == 143
    assert space.index("L0.MLP") == 144


def test_an_attention_only_model_has_no_mlp_units():
    cfg = SimpleNamespace(n_layers=2, n_heads=3, attn_only=True)
    assert UnitSpace.of(SimpleNamespace(cfg=cfg)).labels[-1] == "L1.H2"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_index_and_position_are_inverse_for_every_unit(heads):
    space = UnitSpace(tuple(heads), tuple(range(len(heads))))
    for place, unit in enumerate(space):
        assert space.index(unit) == place
        assert space[place] == unit
        assert Unit.parse(str(unit)) == unit


def test_a_head_slice_is_where_the_heads_of_a_layer_stand():
    space = UnitSpace((2, 5, 3), (0, 1, 2))
    assert space.head_slice(1) == slice(2, 7)
    assert [str(space[place]) for place in range(2, 7)] == [f"L1.H{h}" for h in range(5)]


def test_units_sort_in_mask_order():
    shuffled = [Unit(1), Unit(0, 2), Unit(0), Unit(1, 0)]
    assert [str(unit) for unit in sorted(shuffled)] == ["L0.H2", "L1.H0", "L0.MLP", "L1.MLP"]


def test_spaces_of_the_same_shape_are_equal():
    assert UnitSpace((3, 3), (0, 1)) == TWO_BY_THREE
    assert UnitSpace((3, 2), (0, 1)) != TWO_BY_THREE


@pytest.mark.parametrize("label", ["L4H0", "4.0", "L4.H", "MLP4", "l4.h0", "L-1.H0", ""])
def test_a_label_of_another_form_is_an_error_that_shows_the_form(label):
    with pytest.raises(hc.HcLensError, match=r"'L4\.H0' or 'L4\.MLP'"):
        Unit.parse(label)


@pytest.mark.parametrize("label", ["L0.H3", "L2.H0", "L2.MLP"])
def test_a_unit_outside_the_model_is_an_error_that_names_the_model(label):
    with pytest.raises(hc.HcLensError, match="2 layers, 6 heads and 2 MLPs"):
        TWO_BY_THREE.index(label)


def test_a_unit_named_twice_is_an_error():
    with pytest.raises(hc.HcLensError, match=r"L1\.H0 more than once"):
        TWO_BY_THREE.indices(["L1.H0", "L0.MLP", "L1.H0"])


def test_a_thing_without_a_config_is_an_error():
    with pytest.raises(hc.HcLensError, match="TransformerLens config"):
        UnitSpace.of(object())


def test_pairs_are_every_unit_alone_and_every_two_of_them():
    found = [set_label(units) for units in hc.pairs(["L1.H0", "L0.MLP", hc.Unit(0, 2)])]
    assert found[:3] == ["L1.H0", "L0.MLP", "L0.H2"]
    assert found[3:] == ["L0.MLP+L1.H0", "L0.H2+L1.H0", "L0.H2+L0.MLP"]
    assert len(hc.pairs(TWO_BY_THREE)) == 8 + 28
    with pytest.raises(hc.HcLensError, match="at least 2 units to pair, got 1"):
        hc.pairs(["L0.H0"])
    with pytest.raises(hc.HcLensError, match=r"each unit once, got L0.H1 more than once"):
        hc.pairs(["L0.H1", "L0.H2", hc.Unit(0, 1)])


def test_sets_to_ablate_are_every_unit_alone_unless_some_are_named():
    assert resolve_sets(TWO_BY_THREE, None) == [(unit,) for unit in TWO_BY_THREE]
    named = resolve_sets(TWO_BY_THREE, ["L0.H0", ["L1.MLP", "L0.H1"], "L0.H2+L1.H0"])
    assert [set_label(units) for units in named] == ["L0.H0", "L0.H1+L1.MLP", "L0.H2+L1.H0"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("L0.H0", "expected a list of sets, got the one set L0.H0"),
        ([], "at least one set to ablate, got none"),
        ([["L0.H0"], []], "set 1 is empty"),
        (["L0.H0", ["L0.H0"]], "each set once, got L0.H0 more than once, again at index 1"),
        ([["L0.H0", "L0.H0"]], "L0.H0 more than once"),
        (["L9.H0"], "2 layers, 6 heads and 2 MLPs, got L9.H0"),
    ],
)
def test_a_doubtful_set_is_an_error_that_says_what_is_wrong(sets, message):
    with pytest.raises(hc.HcLensError, match=message):
        resolve_sets(TWO_BY_THREE, sets)


def test_a_space_is_shown_in_one_short_line():
    space = UnitSpace((12,) * 12, tuple(range(12)))
    assert repr(space) == "UnitSpace(12 layers, 144 heads and 12 MLPs)"
