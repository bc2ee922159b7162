from __future__ import annotations

import errno
import math
import os
import shutil
from dataclasses import replace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import hc_lens as hc
from hc_lens import records
from hc_lens.errors import HcLensError
from hc_lens.evaluation import evaluate
from hc_lens.finetuning import checkpoints
from hc_lens.finetuning.config import FinetuneConfig
from hc_lens.finetuning.train import finetune, rows_of
from hc_lens.locks import alone
from hc_lens.records import DamagedWarning, RecordsError, unsealed
from tests import tiny
from tests.damage import DAMAGES, flip

ROWS = [
    {
        "premise": f"the {who} saw the {whom} .",
        "hypothesis": f"the {who} {verb} .",
        "label": ("entailment", "neutral", "contradiction")[(index + other) % 3],
    }
    for index, who in enumerate(("doctor", "lawyer", "judge", "artist"))
    for other, (whom, verb) in enumerate((("banker", "slept"), ("student", "ran")))
]
CONFIG = FinetuneConfig(
    steps=6, batch_size=3, learning_rate=1e-3, warmup_steps=2, checkpoint_every=2, seed=7
)
NAMES = ("entailment", "neutral", "contradiction")


def make_task(rows=ROWS, labels=NAMES, **settings):
    return hc.Task.from_rows(
        {"train": rows, "validation": rows[:4]},
        columns=("premise", "hypothesis"),
        labels=labels,
        **settings,
    )


def run(folder, model=None, config=CONFIG, task=None, **settings):
    task = task or make_task()
    settings = {"evaluation": {"id": (task, "validation")}, "progress": False, **settings}
    model = tiny.tiny_hf("bert", hidden_dropout_prob=0.3) if model is None else model
    return finetune(model, task, folder, config, tokenizer=tiny.bert_tokenizer(), **settings)


class Killed(BaseException):
    """Stands for a kill signal: nothing may catch it."""


def kill_at(monkeypatch, name):
    """Die just before a record gets its name; what was written stays, as of a dead process."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    original = os.rename

    def rename_or_die(source, target):
        if str(target).endswith(name):
            raise Killed
        original(source, target)

    monkeypatch.setattr(records.os, "getpid", lambda: child)
    monkeypatch.setattr(records.os, "rename", rename_or_die)
    monkeypatch.setattr(records, "_remove", lambda item: None)


def weights(folder, step):
    return load_file(folder / checkpoints.name_of(step) / "model.safetensors")


def moments(folder, step):
    return load_file(folder / "optimizer" / checkpoints.name_of(step) / checkpoints.OPTIMIZER)


def half_written(folder):
    """The files of records that did not get their name."""
    files = [path.name for path in (folder / records.UNFINISHED).rglob("*") if path.is_file()]
    return [name for name in files if name != records.LOCK]


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(
    ("name", "left"),
    [("/step-00004", "model.safetensors"), ("optimizer/step-00004", checkpoints.OPTIMIZER)],
)
def test_a_run_killed_in_the_middle_of_a_checkpoint_resumes_to_the_same_bits(
    tmp_path, monkeypatch, name, left
):
    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, name if name.startswith("optimizer") else f"killed{name}")
        with pytest.raises(Killed):
            run(tmp_path / "killed")
    assert left in half_written(tmp_path / "killed")
    assert checkpoints.steps(tmp_path / "killed") == (0, 2)
    resumed = run(tmp_path / "killed")
    assert_same_bits(weights(tmp_path / "whole", 6), weights(tmp_path / "killed", 6))
    assert_same_bits(moments(tmp_path / "whole", 6), moments(tmp_path / "killed", 6))
    assert resumed.history.equals(whole.history)
    assert half_written(tmp_path / "killed") == []


def test_dropout_and_row_order_are_part_of_the_seed(tmp_path):
    first, again = run(tmp_path / "a"), run(tmp_path / "b")
    other = run(tmp_path / "c", config=replace(CONFIG, seed=8))
    assert_same_bits(weights(first.folder, 6), weights(again.folder, 6))
    name = "classifier.weight"
    assert not torch.equal(weights(first.folder, 6)[name], weights(other.folder, 6)[name])


def test_the_global_generator_and_the_callers_model_stay_as_they_were(tmp_path):
    model = tiny.tiny_hf("bert", hidden_dropout_prob=0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run(tmp_path / "run", model)
    assert torch.equal(torch.rand(2), expected)
    assert_same_bits(before, model.state_dict())


def test_one_step_is_adamw_on_the_cross_entropy_of_the_gold_labels(tmp_path):
    model = tiny.tiny_hf("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = FinetuneConfig(steps=1, batch_size=8, learning_rate=1e-3, weight_decay=0.1, clip=1e9)
    result = run(tmp_path / "run", model, config)

    oracle = tiny.tiny_hf("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    decayed = [p for p in oracle.parameters() if p.ndim > 1]
    plain = [p for p in oracle.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    encoded = tiny.bert_tokenizer()(
        [row["premise"] for row in ROWS],
        [row["hypothesis"] for row in ROWS],
        padding=True,
        return_tensors="pt",
    )
    gold = torch.tensor([NAMES.index(row["label"]) for row in ROWS])
    loss = torch.nn.functional.cross_entropy(oracle(**encoded).logits, gold)
    loss.backward()
    optimizer.step()
    assert result.history["loss"].iloc[-1] == pytest.approx(loss.item(), rel=1e-5)
    trained = weights(result.folder, 1)
    for name, value in oracle.state_dict().items():
        # Adam's first step is the sign of the gradient: where that is 0 up to rounding, so is it.
        gradient = dict(oracle.named_parameters())[name].grad
        clear = gradient.abs() > 1e-6
        torch.testing.assert_close(trained[name][clear], value[clear], atol=1e-5, rtol=1e-4)


def test_labels_are_matched_by_name_not_by_position(tmp_path):
    turned = {0: "contradiction", 1: "entailment", 2: "neutral"}
    model = tiny.tiny_hf("bert", labels=turned)
    always = [{**row, "label": "neutral"} for row in ROWS]
    config = replace(CONFIG, steps=30, learning_rate=1e-2, checkpoint_every=30)
    result = run(tmp_path / "run", model, config, make_task(always))
    hooked = result.load()
    assert hooked.labels == turned
    (batch,) = list(make_task(always).batches(hooked, "validation"))
    assert hooked(**batch.inputs).argmax(-1).tolist() == [2] * 4


def test_history_has_one_row_per_checkpoint_and_case(tmp_path):
    cased = [{**row, "case": "ran" if "ran" in row["hypothesis"] else "slept"} for row in ROWS]
    result = run(tmp_path / "run", task=make_task(cased, case="case"))
    assert list(result.history.columns) == ["step", "loss", "dataset", "case", "n", "accuracy"]
    assert result.history["step"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert result.history["n"].tolist() == [2] * 8
    assert math.isnan(result.history["loss"].iloc[0])
    assert result.steps == (0, 2, 4, 6)
    last = result.history.tail(2).set_index("case")["accuracy"]
    hooked = result.load()
    batches = make_task(cased, case="case").batches(hooked, "validation")
    table = evaluate(hooked, {"id": batches}, progress=False)
    assert table.set_index("case")["accuracy"].to_dict() == last.to_dict()


def test_checkpoints_are_ordinary_directories_and_only_the_last_can_be_resumed_from(tmp_path):
    result = run(tmp_path / "run", config=replace(CONFIG, checkpoint_at=(1,)))
    assert result.steps == (0, 1, 2, 4, 6)
    for step in result.steps:
        folder = result.checkpoint(step)
        assert hf.AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 3
        assert len(hf.AutoTokenizer.from_pretrained(folder)) == len(tiny.bert_tokenizer())
        state = result.folder / "optimizer" / folder.name / checkpoints.OPTIMIZER
        assert state.exists() == (step == 6)


def test_a_finished_run_is_returned_without_training(tmp_path, monkeypatch):
    first = run(tmp_path / "run")
    monkeypatch.setattr(checkpoints, "write", lambda *_: pytest.fail("wrote a checkpoint"))
    again = run(tmp_path / "run")
    assert again.history.equals(first.history)


def test_a_configuration_gives_a_fresh_model_with_the_labels_of_the_task(tmp_path):
    config = hf.BertConfig(vocab_size=60, **tiny.SIZES)
    result = run(tmp_path / "run", config)
    assert result.load().labels == dict(enumerate(NAMES))


def test_an_encoder_without_a_classifier_gets_one_with_the_labels_of_the_task(tmp_path):
    tiny.tiny_hf("bert").bert.save_pretrained(tmp_path / "encoder")
    tiny.bert_tokenizer().save_pretrained(tmp_path / "encoder")
    start = load_file(tmp_path / "encoder" / "model.safetensors")
    result = run(tmp_path / "run", tmp_path / "encoder")
    assert result.load(0).labels == dict(enumerate(NAMES))
    at_start = weights(result.folder, 0)
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(at_start[f"bert.{name}"], start[name])


def test_a_decoder_without_a_pad_token_can_be_fine_tuned(tmp_path):
    model = tiny.tiny_hf("gpt2", pad_token_id=None)
    task = make_task()
    result = finetune(
        model, task, tmp_path / "run", CONFIG, tokenizer=tiny.byte_tokenizer(), progress=False
    )
    assert result.history["accuracy"].isna().all()
    assert result.load().labels == tiny.MNLI_LABELS


def test_a_two_way_task_trains_the_summed_probability_of_a_three_way_model(tmp_path):
    rows = [
        {**row, "label": "entailment" if row["label"] == "entailment" else "non-entailment"}
        for row in ROWS
    ]
    task = make_task(rows, labels=("entailment", "non-entailment"))
    model = tiny.tiny_hf("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    result = run(tmp_path / "run", model, FinetuneConfig(steps=1, batch_size=8), task)
    encoded = tiny.bert_tokenizer()(
        [row["premise"] for row in rows],
        [row["hypothesis"] for row in rows],
        padding=True,
        return_tensors="pt",
    )
    entailment, neutral, contradiction = model(**encoded).logits.softmax(-1).unbind(-1)
    gold = torch.tensor([row["label"] == "entailment" for row in rows])
    loss = -torch.where(gold, entailment, neutral + contradiction).log().mean()
    assert result.history["loss"].iloc[-1] == pytest.approx(loss.item(), rel=1e-5)


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero():
    config = FinetuneConfig(steps=10, learning_rate=1.0, warmup_steps=2)
    assert [config.rate(step) for step in (0, 1, 2, 6, 10)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = hf.get_linear_schedule_with_warmup(optimizer, 2, 10)
    for step in range(10):
        assert config.rate(step) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_every_epoch_has_every_row_once():
    config = FinetuneConfig(steps=9, batch_size=4)
    rows = [row for step in range(9) for row in rows_of(step, 6, config)]
    epochs = [rows[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert rows_of(0, 3, replace(config, batch_size=7))[:3] != []


def test_the_papers_settings_are_those_of_its_script():
    mnli, qqp = FinetuneConfig.paper(), FinetuneConfig.paper("qqp", seed=1)
    assert (mnli.steps, mnli.batch_size, mnli.learning_rate) == (61_360, 32, 2e-5)
    assert (mnli.max_length, mnli.checkpoint_every, mnli.seed) == (128, 500, 42)
    assert (qqp.steps, qqp.batch_size, qqp.seed) == (40_000, 128, 1)
    with pytest.raises(HcLensError, match=r"\['mnli', 'qqp'\], got 'snli'"):
        FinetuneConfig.paper("snli")


@pytest.mark.parametrize("change", ["config", "model", "data"])
def test_resuming_the_folder_of_another_run_is_an_error_that_says_what_differs(tmp_path, change):
    run(tmp_path / "run")
    other = {
        "config": {"config": replace(CONFIG, steps=8)},
        "model": {"model": tiny.tiny_hf("bert", seed=5)},
        "data": {"task": make_task(ROWS[:6])},
    }[change]
    named = {"config": "config.steps"}.get(change, change)
    with pytest.raises(HcLensError, match=rf"whose {named} is .*name another folder"):
        run(tmp_path / "run", **other)


def test_a_folder_with_something_else_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(HcLensError, match=r"\['notes.txt'\] and no records.json"):
        run(tmp_path)
    with pytest.raises(HcLensError, match="got the file"):
        run(tmp_path / "notes.txt")


def test_a_task_whose_labels_the_model_lacks_is_an_error(tmp_path):
    model = tiny.tiny_hf("bert", labels={0: "duplicate", 1: "not_duplicate"}, num_labels=2)
    with pytest.raises(HcLensError, match=r"expected model labels that name the task's labels"):
        run(tmp_path / "run", model)
    assert not (tmp_path / "run").exists()


def test_a_task_without_labels_is_an_error(tmp_path):
    task = hc.Task.from_rows(ROWS, columns="premise", label=None)
    with pytest.raises(HcLensError, match="expected a task with labels"):
        run(tmp_path / "run", task=task, evaluation=None)


def test_a_model_that_cannot_be_trained_is_an_error(tmp_path):
    with pytest.raises(HcLensError, match="got BertModel; save the model"):
        run(tmp_path / "run", tiny.tiny_hf("bert").bert)
    with pytest.raises(HcLensError, match="expected a directory with a checkpoint"):
        run(tmp_path / "run", tmp_path / "nowhere")
    config = hf.BertConfig(vocab_size=60, **tiny.SIZES)
    with pytest.raises(HcLensError, match="expected a tokenizer beside a BertConfig"):
        finetune(config, make_task(), tmp_path / "run", CONFIG, progress=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b"no weights"),
        ("pytorch_model.bin", b""),
        ("model.safetensors.index.json", b"[1]"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": 5}}'),
    ],
)
def test_weights_that_cannot_be_read_are_an_error(tmp_path, name, content):
    tiny.tiny_hf("bert").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(HcLensError, match=rf"expected .* weights in \S+/{name}.* save the check"):
        run(tmp_path / "run", tmp_path / "model")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoints(tmp_path):
    model = tiny.tiny_hf("bert")
    with torch.no_grad():
        model.classifier.bias[0] = math.nan
    with pytest.raises(HcLensError, match="expected a finite loss, got nan at step 1"):
        run(tmp_path / "run", model, evaluation=None)
    assert checkpoints.steps(tmp_path / "run") == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "expected steps above 0, got 0"),
        ({"steps": 5, "batch_size": -1}, "expected batch_size above 0"),
        ({"steps": 5, "warmup_steps": 6}, "expected warmup_steps from 0 to steps"),
        ({"steps": 5, "checkpoint_at": (2, 9)}, r"got \[9\]"),
    ],
)
def test_settings_that_make_no_sense_are_errors(settings, message):
    with pytest.raises(HcLensError, match=message):
        FinetuneConfig(**settings)


def test_an_unknown_step_lists_the_steps(tmp_path):
    result = run(tmp_path / "run")
    with pytest.raises(HcLensError, match=r"\[0, 2, 4, 6\], got 5"):
        result.load(5)


def test_a_run_that_lost_its_last_checkpoint_is_repeated_to_the_same_bits(tmp_path):
    result = run(tmp_path / "run")
    expected = weights(result.folder, 6)
    shutil.rmtree(result.checkpoint(6))
    assert run(tmp_path / "run").history.equals(result.history)
    assert_same_bits(weights(result.folder, 6), expected)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("step", "file"),
    [(6, "model.safetensors"), (6, "history.csv"), (2, "model.safetensors"), (2, "done.json")],
)
def test_a_damaged_checkpoint_is_not_used_and_is_made_again(tmp_path, damage, step, file):
    result = run(tmp_path / "run")
    place = result.checkpoint(step) / file
    before = place.read_bytes()
    damage(place)
    with (
        pytest.warns(DamagedWarning, match=f"step-0000{step}/{file} is damaged"),
        pytest.raises(HcLensError, match=rf"checkpoint of step {step} in .* got a damaged one"),
    ):
        result.load(step)
    with pytest.warns(DamagedWarning, match=f"step-0000{step}/{file} is damaged"):
        again = run(tmp_path / "run")
    assert again.history.equals(result.history)
    assert place.read_bytes() == before


def test_an_older_state_of_the_optimizer_that_a_kill_left_is_removed(tmp_path):
    states = run(tmp_path / "run").folder / "optimizer"
    shutil.copytree(states / "step-00006", states / "step-00004")
    run(tmp_path / "run")
    assert [folder.name for folder in states.iterdir()] == ["step-00006"]


def test_a_folder_that_only_looks_like_a_checkpoint_is_none(tmp_path):
    (run(tmp_path / "run").folder / "step-99999").mkdir()
    with pytest.warns(DamagedWarning, match="step-99999/done.json is damaged"):
        again = run(tmp_path / "run")
    assert again.steps == (0, 2, 4, 6)
    assert again.checkpoint().name == "step-00006"


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    result = run(tmp_path / "run")
    lock = result.folder / ".unfinished" / "lock"
    with alone(lock), pytest.raises(HcLensError, match="expected to be the only one that writes"):
        run(tmp_path / "run")
    run(tmp_path / "run")


def test_a_damaged_state_of_the_optimizer_is_not_continued_from(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, "stopped/step-00004")
        with pytest.raises(Killed):
            run(tmp_path / "stopped")
    (state,) = (tmp_path / "stopped" / "optimizer").rglob("step-00002/*.safetensors")
    flip(state)
    with pytest.warns(DamagedWarning, match=r"optimizer/step-00002/optimizer\.safetensors"):
        run(tmp_path / "stopped")
    assert_same_bits(weights(whole.folder, 6), weights(tmp_path / "stopped", 6))


def test_a_folder_in_the_layout_of_an_older_version_is_refused_and_not_touched(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(HcLensError, match=r"older version of hc_lens \(it holds run.json"):
        run(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def test_a_full_disk_is_an_error_that_keeps_the_earlier_checkpoints(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    real = records.os.fsync

    def full(handle):
        if (tmp_path / "run" / "step-00002").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", full)
        with pytest.raises(RecordsError, match="No space left on device; make room"):
            run(tmp_path / "run")
    assert checkpoints.steps(tmp_path / "run") == (0, 2)
    assert half_written(tmp_path / "run") == []
    assert run(tmp_path / "run").history.equals(whole.history)


def test_another_split_can_be_trained_on(tmp_path):
    result = run(tmp_path / "run", config=replace(CONFIG, split="validation"))
    assert not result.history.equals(run(tmp_path / "train").history)


def test_the_marker_says_what_the_run_is(tmp_path):
    result = run(tmp_path / "run")
    written = unsealed((result.folder / "records.json").read_bytes())
    assert written["about"]["config"]["seed"] == 7
    assert set(written) == {"format", "kind", "about"}
    assert set(written["about"]) == {"config", "model", "data", "evaluation"}
