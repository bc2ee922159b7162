"""The identities of the scores, on GPT-2, Pythia, Llama and Gemma shapes with random weights."""

from __future__ import annotations

import copy

import jaxtyping
import pytest
import torch
import transformers

from hc_lens.analyses.extractive.desk import word_tokenizer
from hc_lens.analyses.extractive.models import components, parameters, swap, with_weights
from hc_lens.analyses.extractive.passes import Exact, Linear, record
from hc_lens.analyses.extractive.prompts import Question, align, encode, token_ids
from hc_lens.analyses.extractive.scoring import scores, upstream
from hc_lens.analyses.extractive.settings import ScoreConfig
from hc_lens.errors import HcLensError
from tests.analyses.extractive.shapes import SENTENCES, SHAPES, moved, random_model

OPTIONS = ("Latin", "German", "French", "Norse")
QUESTIONS = [
    Question(f"The people in the city {name} is from speak", answer)
    for name, answer in zip(("Ann", "Bob", "old Cay"), OPTIONS, strict=False)
]
shapes = pytest.mark.parametrize("shape", list(SHAPES))


def table(before, after, method="exact", by="component", which=("informative",), **options):
    config = ScoreConfig(method=method, by=by, which=which, n_counterfactuals=2, **options)
    return scores(before, after, QUESTIONS, OPTIONS, config, progress=False)


def reward(model, question=None):
    """Reward of one question, or the sum over all, from the model's own forward pass."""
    asked = QUESTIONS if question is None else [question]
    total = torch.zeros((), dtype=torch.float64)
    for each in asked:
        logits = model(torch.tensor([token_ids(model, each.prompt)]))[0, -1]
        ids = {option: model.tokenizer.convert_tokens_to_ids(option) for option in OPTIONS}
        total = total + logits[ids[each.answer]] - logits[list(ids.values())].mean()
    return total


@shapes
def test_a_record_ends_in_the_models_own_logits(shape):
    model = random_model(shape)
    tokens = encode(model, QUESTIONS, OPTIONS)[0].tokens
    *_, read_out = record(model, tokens).values()
    torch.testing.assert_close(read_out.output[:, -1], model(tokens)[:, -1])


@shapes
def test_every_parameter_belongs_to_exactly_one_component(shape):
    model = random_model(shape)
    count = {name: torch.zeros_like(value) for name, value in parameters(model).items()}
    for component in components(model):
        for name in component.parameters:
            component.part(count[name]).add_(1)
    assert all(bool((value == 1).all()) for value in count.values())


@shapes
def test_swapping_all_components_gives_the_reward_of_the_other_model(shape):
    before = random_model(shape)
    after = moved(before)
    state = swap(parameters(before), parameters(after), components(before))
    rise = reward(with_weights(before, state)) - reward(before)
    assert float(rise) == pytest.approx(float(reward(after) - reward(before)), abs=1e-10)
    assert abs(float(rise)) > 1e-3


@pytest.mark.slow
@shapes
def test_the_exact_informative_score_is_the_rise_under_a_weight_swap(shape):
    before = random_model(shape)
    after = moved(before)
    found = table(before, after).groupby("component")["value"].sum()
    for component in components(before):
        state = swap(parameters(before), parameters(after), [component])
        rise = float(reward(with_weights(before, state)) - reward(before))
        assert found[component.name] == pytest.approx(rise, abs=1e-10), component.name


@pytest.mark.slow
@shapes
def test_linear_informative_scores_sum_to_the_gradient_times_the_change(shape):
    before = random_model(shape).requires_grad_(True)
    after = moved(before)
    slopes = torch.autograd.grad(reward(before), list(before.parameters()))
    change = [new - old for new, old in zip(after.parameters(), before.parameters(), strict=True)]
    expected = sum(float((s * c).sum().detach()) for s, c in zip(slopes, change, strict=True))
    whole = table(before, after, "linear")["value"].sum()
    by_position = table(before, after, "linear", "position")["value"].sum()
    assert whole == pytest.approx(expected, abs=1e-10)
    assert by_position == pytest.approx(expected, abs=1e-10)


@pytest.mark.slow
@shapes
def test_no_change_of_weights_gives_no_score(shape):
    model = random_model(shape)
    every = ("informative", "downstream", "upstream")
    for method in ("linear", "exact"):
        assert table(model, model, method, which=every)["value"].abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "pythia", "llama"])
def test_linear_over_exact_goes_to_one_as_the_change_shrinks(shape):
    before = random_model(shape)
    which = ("informative", "downstream")
    errors = []
    for scale in (1e-2, 1e-4):
        after = moved(before, scale)
        exact_, linear_ = (
            table(before, after, m, which=which)["value"] for m in ("exact", "linear")
        )
        errors.append(float((linear_ - exact_).abs().sum() / exact_.abs().sum()))
    assert errors[1] < 1e-3
    assert errors[1] < errors[0] / 30


@shapes
def test_layer_0_attention_uses_nothing_while_the_embeddings_are_frozen(shape):
    before = random_model(shape)
    after = moved(before, only=lambda name: not name.startswith(("embed", "pos_embed")))
    for method in ("linear", "exact"):
        found = table(before, after, method, which=("downstream",))
        first = found["component"].str.startswith("L0.H")
        assert found[first]["value"].abs().max() < 1e-12
        assert found[~first]["value"].abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "pythia", "llama", "gemma"])
def test_nothing_is_queried_by_the_last_mlp(shape):
    before = random_model(shape)
    found = table(before, moved(before), which=("upstream",)).groupby("component")["value"]
    last = f"L{before.cfg.n_layers - 1}.MLP"
    assert found.get_group(last).abs().max() == 0
    assert found.get_group("L0.MLP").abs().max() > 1e-3


def test_downstream_is_old_weights_on_new_inputs_by_hand():
    before = random_model("gpt2")
    after = moved(before)
    tokens = torch.tensor([token_ids(before, QUESTIONS[0].prompt)])
    _, cache = after.run_with_cache(tokens)
    read = before.blocks[1].ln2(cache["blocks.1.hook_resid_mid"])
    output = before.blocks[1].mlp(read)
    logits = before.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda value, hook: output)]
    )
    batch = encode(before, QUESTIONS[:1], OPTIONS)[0]
    expected = float(batch.reward(logits[:, -1]) - reward(before, QUESTIONS[0]))
    found = table(before, after, which=("downstream",)).set_index(["question", "component"])
    assert found.loc[(0, "L1.MLP"), "value"] == pytest.approx(expected, abs=1e-10)


def test_upstream_is_four_rewards_by_hand():
    before = random_model("gpt2")
    after = moved(before)
    asked = QUESTIONS[:2]
    ids = [token_ids(before, each.prompt) for each in asked]
    _, other = before.run_with_cache(torch.tensor([ids[1]]))
    patch = [("blocks.1.attn.hook_z", lambda z, hook: _with_head(z, other[hook.name], 2))]
    # What follows the attention of layer 1 in the blocks is new; the read-out stays old.
    new = {
        name: parameters(after)[name]
        if name.startswith(("blocks.2.", "blocks.1.mlp", "blocks.1.ln2"))
        else value
        for name, value in parameters(before).items()
    }
    tokens, batch = torch.tensor([ids[0]]), encode(before, asked[:1], OPTIONS)[0]

    def rewards(model):
        plain, patched = model(tokens), model.run_with_hooks(tokens, fwd_hooks=patch)
        return float(batch.reward(plain[:, -1])), float(batch.reward(patched[:, -1]))

    (old, old_patched), (late, late_patched) = rewards(before), rewards(with_weights(before, new))
    expected = (late - late_patched) - (old - old_patched)
    config = ScoreConfig(method="exact", which=("upstream",), n_counterfactuals=1)
    found = scores(before, after, asked, OPTIONS, config, progress=False)
    found = found.set_index(["question", "component"])
    assert found.loc[(0, "L1.H2"), "value"] == pytest.approx(expected, abs=1e-10)
    assert abs(expected) > 1e-6


def _with_head(z, other, head):
    z = z.clone()
    z[:, :, head] = other[:, :, head]
    return z


def test_linear_upstream_is_exact_for_late_changes_and_a_near_counterfactual():
    before = random_model("gpt2")
    after = moved(before, 1e-3, only=lambda name: name.startswith("blocks.2."))
    batch = encode(before, QUESTIONS, OPTIONS)[0]
    with torch.no_grad():
        ways = [Linear(before, after, batch), Exact(before, after, batch, ScoreConfig())]
        generator = torch.Generator().manual_seed(0)
        near = {
            site: 1e-5 * torch.randn(each.parts.shape, generator=generator, dtype=each.parts.dtype)
            for site, each in ways[0].kept.items()
        }
        guess, truth = (upstream(way, [near]) for way in ways)
    for name in ("embed", "L0.H1", "L0.MLP", "L1.H0", "L1.MLP"):
        torch.testing.assert_close(guess[name].sum(1), truth[name][:, 0], rtol=5e-3, atol=1e-12)


@pytest.mark.parametrize("shape", ["gpt2", "llama", "gemma"])
def test_upstream_scores_at_z_are_those_of_autograd_at_z(shape):
    before = random_model(shape)
    after = moved(before)
    asked = QUESTIONS[:2]
    ids = [torch.tensor([token_ids(before, each.prompt)]) for each in asked]
    name = "blocks.1.attn.hook_z"
    own, other = (before.run_with_cache(each)[1][name] for each in ids)
    batch = encode(before, asked[:1], OPTIONS)[0]

    def slope(model):
        """The gradient of the reward of the first prompt at z, in the whole model."""
        kept = []

        def keep(z, hook):
            kept.append(z.detach().requires_grad_())
            return kept[0]

        with torch.enable_grad():
            logits = model.run_with_hooks(ids[0], fwd_hooks=[(name, keep)])
            return torch.autograd.grad(batch.reward(logits[:, -1]).sum(), kept)[0]

    # Both prompts are of one length, so position stands against position.
    expected = ((slope(after) - slope(before)) * (own - other)).sum(-1)[0]
    which = {"which": ("upstream",), "n_counterfactuals": 1, "by": "position"}
    theirs, ours = (
        scores(before, after, asked, OPTIONS, ScoreConfig(gradient_at_z=at_z, **which),
               progress=False).set_index(["question", "component"])["value"]
        for at_z in (True, False)
    )  # fmt: skip
    for head in range(before.cfg.n_heads):
        found = theirs.loc[(0, f"L1.H{head}")].to_numpy()
        assert found == pytest.approx(expected[:, head].numpy(), abs=1e-10)
        # Ours keeps the old W_O on both sides.
        assert abs(found - ours.loc[(0, f"L1.H{head}")].to_numpy()).max() > 1e-6
    for component in ("embed", "L0.MLP", "L1.MLP"):
        assert (theirs.loc[(0, component)] == ours.loc[(0, component)]).all()


def test_upstream_scores_at_z_are_ours_if_no_w_o_has_changed():
    before = random_model("gpt2")
    after = moved(before, only=lambda name: not name.endswith("W_O"))
    found = [
        table(before, after, "linear", which=("upstream",), gradient_at_z=at_z)["value"]
        for at_z in (True, False)
    ]
    assert (found[0] - found[1]).abs().max() < 1e-12
    assert found[0].abs().max() > 1e-6


def test_gradients_at_z_without_gradients_are_an_error():
    with pytest.raises(HcLensError, match=r"gradient_at_z with method='linear', .*method='exact'"):
        ScoreConfig(method="exact", gradient_at_z=True)


def test_an_exact_score_of_one_position_changes_only_that_position():
    before = random_model("gpt2")
    found = table(before, moved(before), by="position", which=("informative",))
    last = before.cfg.n_layers - 1
    mlp = found[(found["component"] == f"L{last}.MLP") & (found["question"] == 0)]
    # Nothing reads the last MLP's output at earlier positions.
    assert mlp["value"].iloc[:-1].abs().max() == 0
    assert abs(mlp["value"].iloc[-1]) > 1e-6
    whole = table(before, moved(before)).set_index(["question", "component"])["value"]
    assert mlp["value"].iloc[-1] == pytest.approx(whole[(0, f"L{last}.MLP")], abs=1e-12)


@pytest.mark.slow
def test_stacking_fewer_rows_at_once_changes_nothing():
    before = random_model("llama")
    after = moved(before)
    every = ("informative", "downstream", "upstream")
    few = table(before, after, which=every, max_rows=1)
    many = table(before, after, which=every, max_rows=512)
    order = ["score", "question", "component"]
    assert list(few[order].itertuples()) == list(many[order].itertuples())
    assert (few["value"] - many["value"]).abs().max() < 1e-12


def test_grouped_keys_and_values_are_components_of_their_own():
    names = [str(component) for component in components(random_model("llama"))]
    assert names[:9] == [
        "embed", "L0.H0", "L0.H1", "L0.H2", "L0.H3", "L0.KV0", "L0.KV1", "L0.b_O", "L0.ln1"
    ]  # fmt: skip
    assert names[-2:] == ["ln_final", "unembed"]


def test_prompts_of_several_lengths_share_their_slots():
    before = random_model("gpt2")
    found = table(before, moved(before), "linear", "position")
    first = found[found["component"] == "L0.MLP"].set_index(["question", "position"])
    assert first.loc[(0, 5), ["token", "slot", "label"]].tolist() == ["Ann", 6, "<-1>"]
    assert first.loc[(2, 6), ["token", "slot", "label"]].tolist() == ["Cay", 6, "<-1>"]
    assert first.loc[(2, 5), ["token", "slot", "label"]].tolist() == ["old", 5, "<-2>"]
    assert first.loc[(2, 9), ["token", "slot", "label"]].tolist() == ["speak", 9, "speak"]


def test_alignment_goes_by_prefix_suffix_and_the_right_end_of_the_middle():
    assert align([1, 2, 9], [1, 3, 9]) == [0, 1, 2]
    assert align([1, 2, 9], [1, 3, 4, 5, 9]) == [0, 3, 4]
    assert align([1, 2, 3, 4, 9], [1, 5, 9]) == [0, 1, 1, 1, 2]
    assert align([1, 1, 9], [1, 1, 1, 9]) == [0, 1, 3]


@pytest.mark.parametrize(
    ("tokens", "other"), [([1, 2], [3, 4]), ([1, 2], [1, 2]), ([1, 2, 3], [1, 3])]
)
def test_prompts_that_cannot_be_aligned_are_an_error(tokens, other):
    with pytest.raises(HcLensError, match="common beginning and a common end"):
        align(tokens, other)


def test_two_checkpoints_of_different_shapes_are_an_error():
    with pytest.raises(HcLensError, match="one architecture, got d_mlp 20 and 24"):
        table(random_model("gpt2"), random_model("gpt2", d_mlp=24))


def test_two_checkpoints_on_disk_are_loaded_and_scored(tmp_path):
    tokenizer = word_tokenizer(SENTENCES)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    for seed, name in enumerate(("before", "after")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes)
            transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    found = table(str(tmp_path / "before"), tmp_path / "after")
    assert set(found["component"]) >= {"embed", "L0.H1", "L0.MLP", "L0.b_O", "ln_final", "unembed"}
    assert found["value"].abs().max() > 1e-6


def test_two_tokenizers_are_an_error():
    before = random_model("gpt2")
    after = copy.deepcopy(before)
    words = before.tokenizer.get_vocab()
    after.tokenizer = word_tokenizer(f"{word}x" if word == "Ann" else word for word in words)
    with pytest.raises(HcLensError, match="one tokenizer, got two with different ids for"):
        table(before, after)


def test_a_hooked_model_is_an_error():
    before = random_model("gpt2")
    after = moved(before)
    after.add_hook("blocks.0.attn.hook_z", lambda z, hook: 0 * z)
    with pytest.raises(HcLensError, match="got hooks on the model after fine-tuning"):
        table(before, after)


def test_a_model_without_tokenizer_is_an_error():
    before = random_model("gpt2")
    before.tokenizer = None
    with pytest.raises(HcLensError, match="a tokenizer on the model before fine-tuning"):
        table(before, before)


def test_a_model_that_does_not_say_whether_a_bos_is_put_is_an_error():
    before = random_model("gpt2")
    before.cfg.tokenizer_prepends_bos = None
    with pytest.raises(HcLensError, match=r"call model\.set_tokenizer"):
        table(before, before)


def test_options_with_one_first_token_are_listed():
    model = random_model("gpt2")
    options = (*OPTIONS, "Latin old", "Norse old")
    with pytest.raises(HcLensError, match="Latin, Latin old all start with 'Latin'; Norse, Norse"):
        scores(model, model, QUESTIONS, options, progress=False)


def test_a_single_option_is_an_error():
    model = random_model("gpt2")
    with pytest.raises(HcLensError, match="at least 2 different options"):
        scores(model, model, QUESTIONS[:1], ["Latin"], progress=False)


def test_an_answer_outside_the_options_is_an_error():
    model = random_model("gpt2")
    with pytest.raises(HcLensError, match=r"every answer among the options, got \['Latin'\]"):
        scores(model, model, QUESTIONS, OPTIONS[1:], progress=False)


def test_a_lone_question_has_no_counterfactual():
    model = random_model("gpt2")
    with pytest.raises(HcLensError, match="serve as counterfactual"):
        scores(model, model, QUESTIONS[:1], OPTIONS, progress=False)


def test_an_unknown_method_is_an_error(monkeypatch):
    # The type checker of the tests would refuse it first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = random_model("gpt2")
    with pytest.raises(HcLensError, match="method among"):
        table(model, model, "quadratic")


def test_an_encoder_is_refused():
    with pytest.raises(HcLensError, match="expected a HookedTransformer language model"):
        table(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
