from __future__ import annotations

from collections import Counter

import datasets
import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.data import readers
from hc_lens.errors import HcLensError

HANS = {
    "gold_label": ["non-entailment", "entailment"],
    "sentence1_binary_parse": ["( x )", "( y )"],
    "sentence1": ['The doctor saw the "judge" .', "The judge ran ."],
    "sentence2": ["The judge saw the doctor .", "The judge ran ."],
    "pairID": ["ex0", "ex1"],
    "heuristic": ["lexical_overlap", "subsequence"],
    "subcase": ["ln_subject/object_swap", "se_adjective"],
    "template": ["temp1", "temp2"],
}


def pairs(**columns):
    first, second, label = columns
    return pd.DataFrame({first: ["a b", "c", "d"], second: ["b", "c", "e"], label: columns[label]})


def test_hans_is_read_in_its_original_form(tmp_path):
    path = tmp_path / "heuristics_evaluation_set.txt"
    lines = [list(HANS), *zip(*HANS.values(), strict=True)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    rows = hc.Task.named("hans", path).dataset("validation")
    assert rows[0] == {
        "premise": 'The doctor saw the "judge" .',
        "hypothesis": "The judge saw the doctor .",
        "label": 1,
        "case": "lexical_overlap_ln_subject-object_swap",
        "id": "ex0",
    }
    assert rows["label"][:] == [1, 0]


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("mnli", pairs(premise=0, hypothesis=0, label=[2, 0, 1])),
        (
            "mnli",
            pairs(sentence1=0, sentence2=0, gold_label=["contradiction", "entailment", "neutral"]),
        ),
        ("snli", pairs(sentence1=0, sentence2=0, label=["2", "0", "1"])),
        ("qqp", pairs(question1=0, question2=0, is_duplicate=[1, 0, 1])),
        ("qqp", pairs(sentence1=0, sentence2=0, label=["duplicate", "not_duplicate", "Duplicate"])),
        ("paws-qqp", pairs(sentence1=0, sentence2=0, label=[1, 0, 1])),
    ],
)
def test_the_columns_and_labels_of_public_copies_are_known(tmp_path, name, frame):
    frame.to_parquet(tmp_path / "train.parquet")
    rows = hc.Task.named(name, tmp_path).dataset("train")
    assert rows["label"][:] == ([2, 0, 1] if name.endswith("nli") else [1, 0, 1])
    assert rows.column_names[2:] == ["label", "case", "id"]
    by_label = ["duplicate", "not_duplicate", "duplicate"]
    assert rows["case"][:] == (by_label if name == "paws-qqp" else ["all"] * 3)
    assert rows["id"][:] == ["0", "1", "2"]


def test_the_names_of_a_class_label_win_over_its_order(tmp_path):
    names = ["contradiction", "entailment", "neutral"]
    rows = datasets.Dataset.from_pandas(pairs(premise=0, hypothesis=0, label=[0, 1, -1]))
    rows.cast_column("label", datasets.ClassLabel(names=names)).save_to_disk(str(tmp_path))
    task = hc.Task.named("mnli", tmp_path)
    assert task.dataset()["label"][:] == [2, 0]
    assert task.n_dropped() == 1


def test_labels_name_the_integers_of_a_file_in_another_order(tmp_path):
    pairs(premise=0, hypothesis=0, label=[0, 1, 2]).to_parquet(tmp_path / "train.parquet")
    names = ["contradiction", "neutral", "entailment"]
    task = hc.Task.named("mnli", tmp_path, labels=names)
    assert [task.labels[label] for label in task.dataset()["label"]] == names
    with pytest.raises(HcLensError, match=r"labels of mnli.*got \['yes', 'no'\]"):
        hc.Task.named("mnli", tmp_path, labels=["yes", "no"])


def test_rows_without_gold_label_are_dropped_and_counted(tmp_path):
    frame = pairs(sentence1=0, sentence2=0, gold_label=["neutral", "-", "entailment"])
    frame.to_json(tmp_path / "snli_1.0_train.jsonl", orient="records", lines=True)
    task = hc.Task.named("snli", tmp_path)
    assert task.n_dropped("train") == 1
    assert task.dataset("train")["id"][:] == ["0", "2"]


def test_python_byte_literals_of_the_paws_script_are_unwrapped(tmp_path):
    (tmp_path / "train.tsv").write_text(
        "id\tsentence1\tsentence2\tlabel\n7\tb'caf\\xc3\\xa9 ?'\tb\"it's\"\t0\n"
    )
    row = hc.Task.named("paws-qqp", tmp_path).dataset("train")[0]
    assert (row["question1"], row["question2"], row["id"]) == ("café ?", "it's", "7")


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(HcLensError, match=r"mnli, snli, qqp, hans, paws-qqp, got 'rte'"):
        hc.Task.named("rte")


def test_paws_qqp_without_path_says_how_to_get_it():
    with pytest.raises(
        HcLensError, match=r"files for paws-qqp.*google-research-datasets/paws.*path="
    ):
        hc.Task.named("paws-qqp")


def test_a_named_task_without_network_says_how_to_pass_a_path(monkeypatch):
    monkeypatch.setattr(readers, "_reachable", lambda repo: False)
    with pytest.raises(HcLensError, match=r"no connection.*pass path= with heuristics_evaluation"):
        hc.Task.named("hans")


def test_a_named_task_asks_the_hub_for_the_right_repository(monkeypatch):
    asked = []
    table = datasets.Dataset.from_pandas(pairs(premise=0, hypothesis=0, label=[0, 1, 1]))

    def load_dataset(repo, config, revision, trust_remote_code):
        assert trust_remote_code is False
        asked.append((repo, config, revision))
        return {"validation": table}

    monkeypatch.setattr(readers, "_reachable", lambda repo: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hc.Task.named("mnli")
    hc.Task.from_hub("me/mine", "small", columns="premise", labels=["no", "yes"])
    assert asked == [("nyu-mll/glue", "mnli", None), ("me/mine", "small", None)]


def test_own_single_sentences_are_read_with_cases(tmp_path):
    (tmp_path / "mine.csv").write_text("text,mood,kind\ngood day,up,a/b\nbad day,down,c\n")
    task = hc.Task.from_files(tmp_path / "mine.csv", columns="text", label="mood", case="kind")
    assert (task.name, task.labels, task.columns) == ("mine", ("down", "up"), ("text",))
    assert task.splits == ("all",)
    assert task.dataset()[:] == {
        "text": ["good day", "bad day"],
        "label": [1, 0],
        "case": ["a-b", "c"],
        "id": ["0", "1"],
    }


def test_rows_without_labels_get_minus_one():
    task = hc.Task.from_rows([{"text": "a"}, {"text": "b"}], columns="text", label=None)
    assert task.labels == ()
    assert task.dataset()["label"][:] == [-1, -1]


def test_integer_labels_without_names_ask_for_names():
    rows = [{"text": "a", "label": 1}]
    with pytest.raises(
        HcLensError, match=r"label names in column 'label', got \[1\]; pass labels="
    ):
        hc.Task.from_rows(rows, columns="text")
    assert hc.Task.from_rows(rows, columns="text", labels=["no", "yes"]).dataset()["label"][:] == [
        1
    ]


def test_a_missing_column_lists_the_columns_there_are():
    rows = [{"premise": "a", "gold": "x"}]
    with pytest.raises(HcLensError, match=r"'premise' \+ 'hypothesis' in .*\['premise', 'gold'\]"):
        hc.Task.from_rows(rows, columns=("premise", "hypothesis"))
    with pytest.raises(HcLensError, match=r"column 'label'.*\['premise', 'gold'\]"):
        hc.Task.from_rows(rows, columns="premise")
    task = hc.Task.from_rows(rows, columns="premise", label="gold", case="kind")
    with pytest.raises(HcLensError, match=r"column 'kind' in rows/all"):
        task.dataset()


def test_a_label_outside_the_given_names_is_an_error_with_its_row():
    rows = [{"text": "a", "label": "yes"}, {"text": "b", "label": "perhaps"}]
    task = hc.Task.from_rows(rows, columns="text", labels=["no", "yes"])
    with pytest.raises(HcLensError, match=r"row 1 of rows/all: .*\['no', 'yes'\].*'perhaps'"):
        task.dataset()


@pytest.mark.parametrize("columns", [(), ("a", "b", "c"), ("label",), ("a", "a")])
def test_one_or_two_text_columns_are_expected(columns):
    with pytest.raises(HcLensError, match="one or two text columns"):
        hc.Task.from_rows([{"a": "x"}], columns=columns)


def test_a_row_without_text_is_an_error():
    rows = [{"text": "a", "label": "x"}, {"text": None, "label": "x"}]
    with pytest.raises(HcLensError, match=r"text in column 'text' of rows/all, got None in row 1"):
        hc.Task.from_rows(rows, columns="text").dataset()


def test_an_unknown_split_lists_the_splits(task):
    with pytest.raises(HcLensError, match=r"among \['train'\], got 'test'"):
        task.dataset("test")


def test_a_split_goes_by_its_hub_name_or_its_short_name():
    rows = [{"text": "a", "label": "x"}]
    task = hc.Task.from_rows({"train": rows, "validation": rows * 2}, columns="text")
    assert len(task.dataset()) == 1
    assert len(task.dataset("dev")) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows in every split of rows, got none in \['all'\]"),
        ({}, "got none in any"),
        (pd.DataFrame({"text": [], "label": []}), "got an empty split"),
        ([{"text": "a", "label": "-"}] * 2, "got 2 rows without a gold label"),
    ],
)
def test_an_empty_split_is_an_error(rows, message):
    with pytest.raises(HcLensError, match=message):
        hc.Task.from_rows(rows, columns="text", labels=["no", "yes"]).dataset()


def test_a_task_does_not_change(task):
    with pytest.raises(AttributeError):
        task.name = "other"


def test_all_of_hans_is_read_in_thirty_cases(shared_data):
    rows = hc.Task.named("hans", shared_data).dataset("validation")
    assert len(rows) == 30_000
    assert list(Counter(rows["case"]).values()) == [1_000] * 30
    assert Counter(rows["label"]) == {0: 15_000, 1: 15_000}


def test_all_of_paws_qqp_is_read(shared_data):
    task = hc.Task.named("paws-qqp", shared_data / "paws_qqp.parquet")
    labels = Counter(task.labels[label] for label in task.dataset()["label"])
    assert labels == {"not_duplicate": 8_696, "duplicate": 12_663 - 8_696}
    assert Counter(task.dataset()["case"]) == labels


@pytest.mark.parametrize(
    ("splits", "training", "held_out"),
    [
        (("train", "validation_matched", "test"), "train", "validation_matched"),
        (("extra", "train", "dev"), "train", "dev"),
        (("first", "test"), "first", "test"),
        (("test", "train", "validation"), "train", "validation"),
        (("train", "hard"), "train", "hard"),
        (("train",), "train", "train"),
        (("validation",), "validation", "validation"),
    ],
)
def test_a_task_knows_which_split_is_for_training_and_which_is_held_out(splits, training, held_out):
    rows = {split: [{"text": "a", "label": "x"}] for split in splits}
    task = hc.Task.from_rows(rows, columns="text", labels=("x", "y"))
    assert task.training_split() == training
    assert task.held_out_split() == held_out


def test_a_task_names_the_label_that_its_heuristic_answers(tmp_path, bert):
    pd.DataFrame(HANS).to_csv(tmp_path / "hans.tsv", sep="\t", index=False)
    hans = hc.Task.named("hans", tmp_path / "hans.tsv")
    assert hans.heuristic == "entailment"
    assert hans.batches(bert).heuristic == "entailment"
    turned = hc.Task.named("hans", tmp_path / "hans.tsv", labels=["Non_Entailment", "Entailment"])
    assert turned.heuristic == "Entailment"
    pairs(question1="a", question2="b", label=[0, 1, 1]).to_csv(tmp_path / "qqp.csv", index=False)
    known = {name: hc.Task.named(name, tmp_path / "qqp.csv") for name in ("qqp", "paws-qqp")}
    assert known["qqp"].heuristic is None
    assert known["paws-qqp"].heuristic == "duplicate"


def test_without_cases_a_heuristic_makes_one_of_each_label():
    rows = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}]
    assert hc.Task.from_rows(rows, columns="text").dataset()["case"][:] == ["all", "all"]
    task = hc.Task.from_rows(rows, columns="text", heuristic="yes")
    assert task.dataset()["case"][:] == ["no", "yes"]


def test_an_empty_text_is_an_error_but_for_qqp_which_has_some(tmp_path):
    rows = pairs(question1=0, question2=0, label=[0, 1, 1])
    rows.assign(question2=["b", " ", "c"]).to_csv(tmp_path / "qqp.csv", index=False)
    qqp = hc.Task.named("qqp", tmp_path / "qqp.csv")
    assert qqp.dataset()["question2"][:] == ["b", "c"]
    assert qqp.n_dropped() == 1
    with pytest.raises(HcLensError, match=r"expected text in column 'question2' of .*' ' in row 1"):
        hc.Task.from_files(
            tmp_path / "qqp.csv", columns=("question1", "question2"), labels=("no", "yes")
        ).dataset()


def test_rows_of_ones_own_name_a_heuristic_among_their_labels():
    rows = [{"text": "a", "label": "No"}, {"text": "b", "label": "yes"}]
    assert hc.Task.from_rows(rows, columns="text", heuristic="no").heuristic == "No"
    assert hc.Task.from_rows(rows, columns="text").heuristic is None
    told = r"expected the heuristic's answer among the labels \['No', 'yes'\], got 'maybe'"
    with pytest.raises(HcLensError, match=told):
        hc.Task.from_rows(rows, columns="text", heuristic="maybe")
    with pytest.raises(HcLensError, match=r"among the labels \[\], got 'yes'"):
        hc.Task.from_rows(rows, columns="text", label=None, heuristic="yes")
