from __future__ import annotations

import json
import math

import datasets
import pandas as pd
import pytest

from hc_lens.data import readers
from hc_lens.errors import HcLensError

ROWS = [
    {"text": 'He said "NA", twice.', "label": "yes"},
    {"text": "None", "label": "no"},
    {"text": "tea, or coffee", "label": "yes"},
]


def texts(tables, split="all"):
    return tables[split]["text"][:]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("mnli_train", "train"),
        ("mnli_validation_matched", "validation_matched"),
        ("multinli_1.0_dev_mismatched", "validation_mismatched"),
        ("snli_1.0_test", "test"),
        ("heuristics_evaluation_set", "validation"),
        ("validation", "validation"),
        ("paws_qqp", None),
        ("testimony", None),
    ],
)
def test_the_last_split_word_of_a_name_is_the_split(name, split):
    assert readers.split_in(name) == split


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    frame, path = pd.DataFrame(ROWS), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        frame.to_parquet(path)
    elif suffix.startswith("json"):
        frame.to_json(path, orient="records", lines=suffix == "jsonl")
    else:
        frame.to_csv(path, index=False, sep="," if suffix == "csv" else "\t")
    tables = readers.read_files(path)
    assert texts(tables) == [row["text"] for row in ROWS]
    assert tables["all"]["label"][:] == ["yes", "no", "yes"]


def test_a_tab_file_keeps_the_quotes_of_glue(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text('text\tlabel\n"Well," he said.\tyes\na 5" nail\tno\n"quoted"\tno\n')
    assert texts(readers.read_files(path), "train") == ['"Well," he said.', 'a 5" nail', '"quoted"']


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\nhello,yes\n", encoding="utf-8-sig")
    assert readers.read_files(tmp_path / "rows.csv")["all"].column_names == ["text", "label"]


def test_a_folder_gives_one_split_a_file_and_joins_shards(tmp_path):
    frame = pd.DataFrame(ROWS)
    frame[:1].to_parquet(tmp_path / "train-00000-of-00002.parquet")
    frame[1:].to_parquet(tmp_path / "train-00001-of-00002.parquet")
    frame.to_csv(tmp_path / "my_dev.csv", index=False)
    frame.to_csv(tmp_path / "hard.csv", index=False)
    (tmp_path / "README.txt").write_text("not rows")
    (tmp_path / "dataset_info.json").write_text("{}")
    tables = readers.read_files(tmp_path)
    assert set(tables) == {"train", "validation", "hard"}
    assert texts(tables, "train") == [row["text"] for row in ROWS]


def test_a_named_task_takes_its_own_files_of_a_folder(tmp_path):
    for name in ("hans_train", "hans_validation", "mnli_train", "paws_qqp", "qqp"):
        pd.DataFrame(ROWS).to_parquet(tmp_path / f"{name}.parquet")
    assert set(readers.read_files(tmp_path, "hans")) == {"train", "validation"}
    assert set(readers.read_files(tmp_path, "mnli")) == {"train"}
    assert set(readers.read_files(tmp_path, "paws-qqp")) == {"all"}


def test_two_files_of_one_split_are_an_error_that_names_them(tmp_path):
    for name in ("dev.csv", "validation.csv"):
        pd.DataFrame(ROWS).to_csv(tmp_path / name, index=False)
    with pytest.raises(
        HcLensError, match=r"split 'validation', got \['dev.csv', 'validation.csv'\]"
    ):
        readers.read_files(tmp_path)


def test_a_mapping_keeps_its_split_names(tmp_path):
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv", index=False)
    tables = readers.read_files({"dev": tmp_path / "a.csv", "both": [tmp_path / "a.csv"] * 2})
    assert len(tables["dev"]) == 3
    assert len(tables["both"]) == 6


def test_saved_datasets_are_read(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "two"))
    assert texts(readers.read_files(tmp_path / "one")) == [row["text"] for row in ROWS]
    assert set(readers.read_files(tmp_path / "two")) == {"train", "test"}


def test_rows_in_memory_may_be_dicts_a_frame_or_a_dataset():
    forms = {"a": ROWS, "b": pd.DataFrame(ROWS), "c": datasets.Dataset.from_list(ROWS)}
    tables = readers.read_rows(forms)
    assert texts(tables, "a") == texts(tables, "b") == texts(tables, "c")
    assert texts(readers.read_rows(ROWS)) == texts(tables, "a")


def test_rows_with_different_keys_keep_all_columns():
    tables = readers.read_rows([{"text": "a"}, {"text": "b", "case": "x"}])
    assert tables["all"]["case"][:] == [None, "x"]


@pytest.mark.parametrize("kind", [list, pd.DataFrame])
def test_where_some_cells_are_lists_every_cell_is_one(kind):
    cells = ["a", ["b", "c"], ("d",), None, "", math.nan]
    table = readers.read_rows(kind([{"text": cell, "other": "x"} for cell in cells]))["all"]
    assert table["text"][:] == [["a"], ["b", "c"], ["d"], None, [""], None]
    assert table["other"][:] == ["x"] * 6


def test_rows_of_mixed_type_are_an_error():
    with pytest.raises(HcLensError, match="every column one type"):
        readers.read_rows([{"text": "a"}, {"text": 3}])


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(HcLensError, match="which does not exist"):
        readers.read_files(tmp_path / "absent.csv")


def test_an_unknown_suffix_is_an_error_that_lists_the_known_ones(tmp_path):
    (tmp_path / "rows.xlsx").write_text("x")
    with pytest.raises(HcLensError, match=r"\.parquet, \.jsonl.*rows\.xlsx"):
        readers.read_files(tmp_path / "rows.xlsx")


def test_a_folder_without_rows_is_an_error(tmp_path):
    with pytest.raises(HcLensError, match="without any"):
        readers.read_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.parquet", b"PAR1 but not really"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("list.json", json.dumps(["a", "b"]).encode()),
        ("latin.csv", "text,label\ncaf\xe9,yes\n".encode("latin-1")),
        ("quote.csv", b'text,label\n"open,yes\n'),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HcLensError, match=f"readable table, got .*{name}.*file is whole"):
        readers.read_files(tmp_path / name)


def test_a_row_with_too_many_cells_is_an_error_that_counts_them(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na,yes\nb,c,no\n")
    with pytest.raises(HcLensError, match=r"expected 2 cells.*got 3 in row 2"):
        readers.read_files(tmp_path / "rows.csv")


def test_an_empty_file_and_a_repeated_column_are_errors(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    with pytest.raises(HcLensError, match="got the empty file"):
        readers.read_files(tmp_path / "empty.csv")
    with pytest.raises(HcLensError, match="each column once"):
        readers.read_files(tmp_path / "twice.csv")


def test_a_hub_out_of_reach_is_an_error_that_says_how_to_go_on(monkeypatch):
    monkeypatch.setattr(readers, "_reachable", lambda repo: False)
    with pytest.raises(HcLensError, match=r"nyu-mll/glue \(mnli\).*no connection.*pass path="):
        readers.read_hub("nyu-mll/glue", "mnli", None, "pass path=")


def test_a_hub_without_network_is_out_of_reach(monkeypatch):
    from huggingface_hub import HfApi

    def fail(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "dataset_info", fail)
    assert not readers._reachable("nyu-mll/glue")


def test_a_cached_copy_is_read_without_network(monkeypatch, cache):
    loaded = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    monkeypatch.setattr(readers, "_reachable", lambda repo: False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: loaded)
    (cache / "nyu-mll___glue").mkdir(parents=True)
    assert set(readers.read_hub("nyu-mll/glue", "mnli", None, "pass path=")) == {"train"}


def test_a_failure_of_the_hub_is_an_error_with_its_reason(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Dataset scripts are no longer supported\nmore lines")

    monkeypatch.setattr(readers, "_reachable", lambda repo: True)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(HcLensError, match=r"RuntimeError: Dataset scripts.*supported; check"):
        readers.read_hub("some/repo", None, None, "pass path=")


@pytest.mark.parametrize(
    ("broken", "told"),
    [('{"text": "c",', "line 7 column 14: Expecting"), ("3", "line 7: '3' is no row")],
)
def test_a_broken_line_is_counted_with_the_blank_lines_before_it(tmp_path, broken, told):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["", "", '{"text": "a"}', "", '{"text": "b"}', "", broken]))
    with pytest.raises(HcLensError, match=told):
        readers.read_files(path)
