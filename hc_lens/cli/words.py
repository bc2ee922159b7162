"""Messages of the library in the words of the command line.

An error of the library says what to do in Python, such as ``labels=[...]``. On the command line the
same is an option. The table below has both for every such phrase that can reach a terminal; longer
phrases stand before those that they contain.
"""

from __future__ import annotations

import re

LOADED = "put the files of its tokenizer into the folder of the checkpoint"
OPTIONS = {
    "hc.load(..., labels=[...]), or model_labels of a sweep": "--model-labels A,B,...",
    "read other rows with Task.from_files, Task.from_hub or Task.from_rows": (
        "give --path and --columns for rows of your own"
    ),
    "path= alone": "--path alone",
    "path= and columns=": "--path and --columns",
    "path=": "--path (--ood-path for those of --ood)",
    ", or say which with Task.from_files({split: file})": ", or name one of them",
    "columns=..., label=... and case=... of Task.from_files": "--columns, --label and --case",
    "prompt=..., right=..., wrong=... of Prompts.from_rows": "--case",
    "load a causal or masked language model, or use hc.Task": (
        "name the checkpoint of a language model, or a task of texts with labels"
    ),
    "write prompts of your own with hc.Prompts.from_rows": "give --path for prompts of your own",
    "; lower n": "; lower --limit",
    ", or pass hc.Counterfactual both sides": "",
    "expected no max_length for prompts": "expected no --max-length for prompts",
    ", or set separator=": "",
    "columns=('premise', 'hypothesis')": "--columns premise,hypothesis",
    "label=...": "--label",
    "labels=[...]": "--labels A,B,...",
    "labels= out": "--labels out",
    "max_length=": "--max-length ",
    "token_budget=": "--token-budget",
    "memory=": "--memory",
    "heads=, or draw them with .figure()": "--heads",
    "heads=": "--heads",
    "core=['L0.H6', ...]": "--core L0.H6,...",
    "engine='ray'": "--engine ray",
    "hc.collect_means(model, batches)": "hc-lens means",
    "save means with means.save(path)": "write means with hc-lens means",
    "a folder that Subnetwork.save wrote": "a folder of hc-lens prune",
    ", or use hc.masked(model, sub.mask, means)": "",
    "prune again, use hc.masked(model, sub.mask, means) if it is the same checkpoint": (
        "prune again"
    ),
    " The last good subnetwork is in the error's `finished`": "",
    "list the units with hc.UnitSpace.of(model).labels": "layers and heads count from 0",
    "name heads of hc.UnitSpace.of(model).heads": "name heads such as L0.H0",
    "pass hc.UnitSpace.of(model) for every unit of the model": "leave --units out for every unit",
    "load the checkpoint with hc.load or HookedTransformer.from_pretrained": (
        "name the checkpoint of a language model"
    ),
    "load the checkpoint's fast tokenizer (AutoTokenizer.from_pretrained with a tokenizer.json) "
    "and pass tokenizer= to hc.load": LOADED,
    "pass tokenizer=...": LOADED,
}
"""What a message says in Python -> what it says on the command line."""
_PYTHON = re.compile("|".join(map(re.escape, OPTIONS)))


def in_options(message: str) -> str:
    """A message with the options of the command line instead of arguments in Python."""
    return _PYTHON.sub(lambda found: OPTIONS[found[0]], message)
