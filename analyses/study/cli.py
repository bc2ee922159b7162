"""``hc-lens demo``, ``hc-lens study`` and ``hc-lens report``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from analyses.study.config import StudyConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Out = Annotated[Path, typer.Option(help="Run folder; the same folder goes on where it stopped.")]
Workers = Annotated[int | None, typer.Option(help="Processes that prune at once; one a core.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command()
def demo(
    out: Out = Path("hc-lens-demo"),
    full: Annotated[bool, typer.Option("--full", help="The paper's size, not minutes.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Study the bundled model, without a network, and write one HTML page."""
    from analyses.study.config import demo as settings

    _run(settings(full), out, workers, as_json)


@app.command()
def study(
    context: Context,
    out: Out,
    model: Annotated[str | None, typer.Option(help="organism, a directory or a Hub id.")] = None,
    task: Annotated[
        str | None, typer.Option(help="In-domain task, or a name for own rows.")
    ] = None,
    task_path: Annotated[Path | None, typer.Option(help="File or folder of its rows.")] = None,
    train_split: Annotated[str | None, typer.Option(help="Split to prune on.")] = None,
    id_split: Annotated[str | None, typer.Option(help="Split to evaluate in domain.")] = None,
    ood: Annotated[str | None, typer.Option(help="Out-of-domain task.")] = None,
    ood_path: Annotated[Path | None, typer.Option(help="File or folder of its rows.")] = None,
    ood_split: Annotated[str | None, typer.Option(help="Split of it to evaluate.")] = None,
    columns: Annotated[str | None, typer.Option(help="Text columns of own rows: a,b.")] = None,
    label: Annotated[str, typer.Option(help="Label column of own rows.")] = "label",
    labels: Annotated[str | None, typer.Option(help="Label names of own rows, in order.")] = None,
    case: Annotated[str | None, typer.Option(help="Case column of own out-of-domain rows.")] = None,
    adversarial: Annotated[
        str | None, typer.Option(help="Cases that the heuristic gets wrong: a,b.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="NAME=MODEL of the training series; repeatable.")
    ] = None,
    early: Annotated[str | None, typer.Option(help="Checkpoint before generalisation.")] = None,
    sparsity: Annotated[list[float] | None, typer.Option(help="Twice or more: 0.5, 0.7.")] = None,
    seeds: Annotated[int, typer.Option(help="Subnetworks at each sparsity.")] = 12,
    steps: Annotated[int | None, typer.Option(help="Pruning steps.")] = None,
    limit: Annotated[int, typer.Option(help="Most rows to prune on.")] = 20_000,
    rows: Annotated[int | None, typer.Option(help="Most rows of each evaluation set.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut rows to so many tokens.")] = 128,
    token_budget: Annotated[int, typer.Option(help="Most tokens in a pruning batch.")] = 4096,
    config: Annotated[
        Path | None, typer.Option(help="A study.toml; beside it only --out and --workers count.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Study a fine-tuned classifier of your own and write one HTML page."""
    from analyses.study import read_settings

    if config is not None:
        _alone(context)
        return _run(read_settings(config), out, workers, as_json)
    if not (model and task and ood):
        raise HcLensError(
            "expected --model, --task and --ood (or --config), got "
            f"model {model!r}, task {task!r}, ood {ood!r}; name all three"
        )
    own = {"columns": _names(columns), "label": label, "labels": _names(labels), "case": case}
    shared = {"max_length": max_length}
    inside = shared | _rows(task, task_path, own | {"case": None})
    outside = shared | _rows(ood, ood_path, own)
    evaluation = {
        "id": {**inside, "split": id_split, "limit": rows},
        "ood": {**outside, "split": ood_split, "limit": rows},
    }
    settings: dict[str, Any] = {
        "model": model,
        "title": f"The heuristic core of {Path(model).name}",
        "train": {**inside, "split": train_split, "limit": limit, "token_budget": token_budget},
        "evaluation": evaluation,
        "adversarial": list(_names(adversarial) or ()),
        "checkpoints": _series(checkpoint or []),
        "early": early,
        "sparsities": sparsity or [0.5, 0.7],
        "seeds": list(range(42, 42 + seeds)),
        "prune": {} if steps is None else {"steps": steps},
    }
    return _run(_from(settings), out, workers, as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished study.")],
    out: Annotated[Path, typer.Option(help="The page to write.")],
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Write the page of a finished study again."""
    from analyses.study import report as write

    typer.echo(str(write(run, out, command=_command(), force=force)))


def _run(config: StudyConfig, out: Path, workers: int | None, as_json: bool) -> None:
    from analyses.study import FACTS
    from analyses.study import run as run_study
    from hc_lens.cli.screen import quiet_reading

    progress = sys.stderr.isatty()
    with quiet_reading(progress):
        page = run_study(
            config,
            out,
            command=_command(),
            workers=workers,
            progress=progress,
            say=lambda line: typer.echo(line, err=True),
        )
    facts = json.loads((out / FACTS).read_text(encoding="utf-8"))
    if as_json:
        typer.echo(json.dumps({"report": str(page), "run": str(out), "facts": facts}))
        return
    from analyses.study.page import Results
    from analyses.study.sentences import findings

    marks = {True: "+", False: "-", None: " "}
    for said in findings(Results(out, config).facts()):
        typer.echo(f"{marks[said.found]} {said.plain}")
    typer.echo(f"\nreport: {page.resolve()}")


def _from(settings: dict[str, Any]) -> StudyConfig:
    from analyses.study.config import PAPER_CASES, StudyConfig

    settings = {key: value for key, value in settings.items() if value is not None}
    if not settings["adversarial"]:
        settings["adversarial"] = list(PAPER_CASES.get(settings["evaluation"]["ood"]["task"], ()))
    for spec in (settings["train"], *settings["evaluation"].values()):
        for key in [key for key, value in spec.items() if value is None]:
            del spec[key]
    _held_out(settings)
    return StudyConfig.from_dict(settings, "the command line")


def _held_out(settings: dict[str, Any]) -> None:
    """Choose the splits that were not named: train to prune on, a held-out one to evaluate."""
    from hc_lens.cli.sweep import held_out
    from hc_lens.spec import DataSpec

    for spec in settings["evaluation"].values():
        if "split" not in spec:
            spec["split"] = held_out(DataSpec.from_dict(spec).read())
    train = DataSpec.from_dict(settings["train"])
    splits = train.read().splits
    used = train.split or (splits[0] if len(splits) == 1 else "train")
    if settings["evaluation"]["id"]["split"] == used:
        typer.echo(
            f"note: in domain is evaluated on the rows that are pruned on ({used}); name another "
            "split with --id-split",
            err=True,
        )


def _rows(task: str, path: Path | None, own: dict[str, Any]) -> dict[str, Any]:
    """Where a task's rows are; columns of your own do not hold for a named task."""
    from hc_lens.data.known import KNOWN

    named = task in KNOWN or (path is None and task.startswith("organism"))
    place = {"task": task, "path": None if path is None else str(path)}
    return place if named else {**place, **own}


def _alone(context: Context) -> None:
    """Refuse options beside --config that would be ignored."""
    free = ("out", "workers", "as_json", "config")
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in free
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise HcLensError(
            f"expected only --out and --workers beside --config, got {', '.join(given)}; change "
            "the file, or leave --config out"
        )


def _series(given: list[str]) -> dict[str, str]:
    for entry in given:
        if "=" not in entry:
            raise HcLensError(
                f"expected --checkpoint NAME=MODEL, got {entry!r}; write such as 400=step-400"
            )
    return dict(entry.split("=", 1) for entry in given)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _command() -> str:
    return shlex.join(["hc-lens", *sys.argv[1:]])
