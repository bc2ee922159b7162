"""Kills, damage, two writers and full disks: is finished work kept, and is wrong work never used?

    python docs/benchmarks/reliability.py --minutes 60

1. A tiny model and a few rows are written to a folder, and every kind of work (a command of
   hc-lens) is done twice, undisturbed: all its files, and what it printed, must be the same bytes
   both times. That is what the result must be.
2. A trial is decided by the seed and its number. All of them are processes forked from this one,
   which has imported everything. Pruning happens in that process too, so that a kill hits it.
3. *Kill*: the work is killed one to four times in a row, at a random moment, before or after one
   of its renames, flushes, removals or opened files, or in the middle of a write; then it is done
   to its end. The result must be the same, and records that were finished before a kill must be
   the same files after it (else they are lost).
4. *Mutation*: a file of finished or killed work, of the token cache, or of a subnetwork that the
   work reads is damaged (`damage.py`), and the work is done again. It must end with the same result
   (redone, or the file was not read), or refuse in one clear line. Another result is silent, any
   other error is unclear. What is still refused when the same command is repeated needs a hand,
   except a subnetwork that the user gave.
5. *Two writers*: the same work twice at once, one sometimes killed. Each has the right result or
   says who else writes, and afterwards the result is the same.
6. *Full disk*: the work on a file system with too little room, then with enough. Without the right
   to mount one, a limit on the size of files stands for it.
7. One table is printed. What went wrong is listed with the command that repeats it, and the exit
   code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import damage
import pandas as pd
import torch
import transformers
from disturbed import (
    DONE,
    KILLED,
    LONGEST,
    REFUSED,
    UNCLEAR,
    Disturb,
    Ended,
    Noon,
    finish,
    kill_at,
    limit_files,
    note_down,
    small_disk,
    start,
)
from tokenizers import processors

from hc_lens import organism
from hc_lens.analyses.study import page
from hc_lens.records import COPY, MARKER
from hc_lens.sweeps import engines
from hc_lens.sweeps.runs import FULL_TABLE, TABLE

OUT, CACHE, PRUNED = "out", "cache/hc_lens", "given/pruned"
"""Below the folder of a trial: the work, the token cache, a subnetwork of the user's own."""
STORE = f"{OUT}/runs/"
LISTS = tuple(STORE + name for name in (TABLE, FULL_TABLE))
"""The store of a study's runs, and its lists of those that are whole."""
ROWS = "--task organism --limit 12 --token-budget 128"
MODEL = f"--model given/model {ROWS}"
SERIES = "--checkpoints early=given/early,late=given/model"
WORKS = {
    "scan": (5, f"scan {MODEL} --out out"),
    "language": (2, "scan --model given/language --task own --path given/prompts "
                 "--token-budget 24 --out out"),
    "prune": (3, f"prune {MODEL} --sparsity 0.5 --steps 3 --out out"),
    "evaluate": (3, f"evaluate {MODEL} --subnetwork {PRUNED} --out out"),
    "sweep": (4, f"sweep {SERIES} {ROWS} --evaluation-limit 6 --sparsity 0.5 --seeds 0,1 "
              "--steps 1 --workers 1 --out out"),
    "finetune": (4, "finetune --model given/model --task own --path given/rows --columns "
                 "premise,hypothesis --labels entailment,neutral,contradiction --steps 4 "
                 "--batch-size 2 --checkpoint-every 1 --out out"),
    "composition": (3, "analyse composition --model given/model --limit 4 --core L0.H0 "
                    "--ood-limit 16 --means-limit 8 --top 2 --threads 1 --out out"),
    "study": (1.5, f"study --model given/model {SERIES} --task organism --ood organism-ood "
              "--limit 6 --evaluation-limit 8 --ood-limit-per-case 1 --sparsity 0.3,0.5 --seeds 0 "
              "--grid-seeds 0 --grid 0.5 --steps 1 --scan-rows 4 --attention-rows 4 "
              "--trace-rows 4 --examples 1 --workers 1 --out out"),
}  # fmt: skip
"""How often each kind of work is drawn, and its command."""
MARKERS = {MARKER: COPY, COPY: MARKER}
"""One of these is enough to know a folder, so only one of them is damaged."""
TRIALS = {"kill": 12, "mutation": 14, "two writers": 2, "full disk": 1}
"""How often each kind of trial is drawn."""
COLUMNS = {
    "kill": ("kills tried", "lost", "differing"),
    "mutation": ("mutations tried", "redone", "not read", "refused", "silent"),
    "two writers": ("two writers tried",),
    "full disk": ("full disks tried",),
    "every": ("unclear", "needs a hand"),
}


@dataclass
class Expected:
    """What a kind of work gives when nothing disturbs it."""

    shown: str
    files: dict[str, bytes]
    folder: Path
    calls: int
    seconds: float


@dataclass
class Trial:
    """One trial: what is tried on what, and what came of it."""

    number: int
    kind: str
    work: str
    draw: Random
    folder: Path
    expected: Expected
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def call(self, disturb: Disturb = lambda: None, wait: bool = True) -> Any:
        """Do the work, in this folder."""
        started = start(WORKS[self.work][1], self.folder, disturb)
        return finish(*started) if wait else started

    def fail(self, how: str, why: str) -> None:
        """Note what went wrong."""
        self.counts[how] += 1
        self.wrong.append(f"{how}: {why}")


def files_below(folder: Path) -> dict[str, bytes]:
    """The work, the token cache and what is in the temporary folder, without locks."""
    found = (path for name in (OUT, "cache", "tmp") for path in (folder / name).rglob("*"))
    kept = (path for path in found if path.is_file() and path.name != "lock")
    own = str(folder).encode()
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().replace(own, b"FOLDER")
        for path in kept
    }


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """The records that are finished, each with numbers that a new file would not have."""
    done = (folder / OUT).glob("*/**/done.json")
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in done
    }


def compare(trial: Trial, ended: Ended, damaged: tuple[str, ...] = ()) -> str:
    """What differs from the undisturbed result; nothing if it is the same.

    A file below the top of the work, or of the cache, that was damaged and that nobody read may be
    as it was. The lists of a study's runs leave out a damaged run of which no step needs more.
    """
    expected, found = trial.expected, files_below(trial.folder)
    if ended.shown != expected.shown:
        return f"printed {ended.shown[:400]!r}"
    for name, content in expected.files.items():
        deep = not re.fullmatch(rf"{OUT}/[^/]*", name)
        if deep and any(name == other or name.startswith(f"{other}/") for other in damaged):
            continue
        if name in LISTS and any(other.startswith(STORE) for other in damaged):
            continue
        if found.get(name) != content:
            return f"{name} is {'another' if name in found else 'missing'}"
    more = [name for name in found if name not in expected.files]
    more = [name for name in more if not name.startswith(damaged) and ".other-" not in name]
    return f"left behind: {more[:3]}" if more else ""


def check(trial: Trial, how: str, damaged: tuple[str, ...] = ()) -> Ended:
    """Do the work to its end and compare; `how` is what a difference counts as."""
    ended = trial.call()
    if ended.how == UNCLEAR or "Traceback" in ended.said:
        trial.fail("unclear", ended.said[-1500:])
    elif ended.how == DONE:
        differing = compare(trial, ended, damaged)
        if differing:
            trial.fail(how, f"{differing}; said {ended.said[-600:]!r}")
    return ended


def kill(trial: Trial) -> None:
    """Kill the work at one moment."""
    draw, expected = trial.draw, trial.expected
    way = draw.choice(("call", "call", "moment", "write"))
    if way == "call":
        at = draw.randint(1, expected.calls), draw.random() < 0.5
        ended = trial.call(lambda: kill_at(*at))
    elif way == "write":
        at = draw.randint(1, max(map(len, expected.files.values())))
        ended = trial.call(lambda: limit_files(at, kill=True))
    else:
        at = draw.random() * expected.seconds
        ended = finish(*trial.call(wait=False), after=at)
    trial.steps.append(f"kill at {way} {at}: {ended.how}")
    trial.counts["kills tried"] += ended.how == KILLED
    if ended.how not in (KILLED, DONE):
        trial.fail("needs a hand" if ended.how == REFUSED else "unclear", ended.said[-1500:])


def try_kills(trial: Trial) -> None:
    """Kill one to four times, then finish."""
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(trial.draw.choice((1, 2, 3, 4))):
        kill(trial)
        kept = finished(trial.folder) | kept
    ended = check(trial, "differing")
    if ended.how == REFUSED:
        trial.fail("needs a hand", ended.said[-600:])
    now = finished(trial.folder)
    lost = [name for name, number in kept.items() if now.get(name) != number]
    if any(name in trial.expected.files for name in lost):
        trial.fail("lost", f"{lost[:3]}; said {ended.said[-600:]!r}")


def try_mutation(trial: Trial) -> None:
    """Damage a file of finished or of killed work, and do it again."""
    shutil.copytree(trial.expected.folder, trial.folder, dirs_exist_ok=True)
    if trial.draw.random() < 0.5:
        shutil.rmtree(trial.folder / OUT)
        kill(trial)
        trial.counts.clear()
    kinds = kinds_of_files(trial)
    if not kinds:  # killed before anything was kept
        return
    damaged = mutate(trial, kinds)
    trial.counts["mutations tried"] += 1
    ended = check(trial, "silent", damaged)
    if ended.how == REFUSED:
        trial.counts["refused"] += 1
        again = trial.call()
        if again.how != DONE and not damaged[0].startswith("given"):
            trial.fail("needs a hand", again.said[-600:])
    elif ended.how == DONE and not trial.wrong:
        trial.counts["redone" if "damaged" in ended.said else "not read"] += 1


def kinds_of_files(trial: Trial) -> dict[str, list[Path]]:
    """The files that are kept, by their names without numbers."""
    root = trial.folder
    kinds: dict[str, list[Path]] = {}
    for place in (OUT, CACHE, *((PRUNED,) if trial.work == "evaluate" else ())):
        for path in sorted((root / place).rglob("*")):
            other = MARKERS.get(path.name, path.name)
            if (
                path.is_file()
                and path.with_name(other).is_file()
                and path.name != "lock"
                and (".unfinished" not in path.parts)
            ):
                name = path.relative_to(root).as_posix()
                kinds.setdefault(re.sub(r"[0-9a-f]{32}|[0-9]+", "*", name), []).append(path)
    return kinds


def mutate(trial: Trial, kinds: dict[str, list[Path]]) -> tuple[str, ...]:
    """Damage a file, every kind of file equally often; the paths that are touched."""
    draw, root = trial.draw, trial.folder
    chosen = draw.choice(kinds[draw.choice(sorted(kinds))])
    others = [
        path
        for paths in kinds.values()
        for path in paths
        if path.suffix == chosen.suffix and path != chosen
    ]
    change = draw.choice([*damage.EVERY, *damage.PAIRS, add])
    if change in damage.PAIRS and others:
        same = [path for path in others if path.name == chosen.name] or others
        touched = (chosen, draw.choice(same))
        change(*touched)
    else:
        change = damage.flip if change in damage.PAIRS else change
        touched = (change(chosen, draw.random()) or chosen,)
    names = tuple(path.relative_to(root).as_posix() for path in touched)
    trial.steps.append(f"{change.__name__} {' '.join(names)}")
    return names


def add(path: Path, at: float) -> Path:
    """Put a file of no kind, or a folder that looks like work, beside a file."""
    names = ("notes.txt", ".hidden", f"{path.name}.tmp", f"{path.parent.name}x", "step-99999")
    new = path.with_name(names[int(len(names) * at)])
    if at * len(names) % 1 < 0.5:
        new.mkdir(exist_ok=True)
        (new / path.name).write_bytes(path.read_bytes())
    else:
        new.write_bytes(b"something else")
    return new


def try_two_writers(trial: Trial) -> None:
    """Do the work twice at once; sometimes the first is killed."""
    trial.counts["two writers tried"] += 1
    first = trial.call(wait=False)
    time.sleep(trial.draw.random() * trial.expected.seconds)
    second = trial.call(wait=False)
    killed = trial.draw.random() < 0.5
    after = trial.draw.random() * trial.expected.seconds if killed else LONGEST
    for ended in (finish(*first, after=after), finish(*second)):
        trial.steps.append(f"writer: {ended.how}")
        refused = ended.how == REFUSED and "the only one that writes" not in ended.said
        if ended.how == UNCLEAR or refused:
            trial.fail("unclear", ended.said[-1500:])
        elif ended.how == DONE and ended.shown != trial.expected.shown:
            trial.fail("differing", ended.shown[:400])
    if check(trial, "differing").how == REFUSED:
        trial.fail("needs a hand", "refused after two writers")


def try_full_disk(trial: Trial) -> None:
    """Do the work with too little room, then with enough."""
    trial.counts["full disks tried"] += 1
    used = sum(path.stat().st_size for path in trial.folder.rglob("*") if path.is_file())
    need = sum(map(len, trial.expected.files.values()))
    room = int(trial.draw.random() * need)
    with small_disk(trial.folder, used + 400_000 + room) as grow:
        limit = (lambda: limit_files(room, kill=False)) if grow is None else lambda: None
        ended = trial.call(limit)
        trial.steps.append(f"room for {room} of {need} bytes: {ended.how}")
        if ended.how == UNCLEAR:
            trial.fail("unclear", ended.said[-1500:])
        if grow is not None:
            grow()
        if check(trial, "differing").how == REFUSED:
            trial.fail("needs a hand", "refused after a full disk")


TRY = {
    "kill": try_kills,
    "mutation": try_mutation,
    "two writers": try_two_writers,
    "full disk": try_full_disk,
}


def prepare(root: Path, works: list[str]) -> dict[str, Expected]:
    """Write what the work reads, and do every kind of work undisturbed, twice."""
    given = root / "given"
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(organism.checkpoint())
    rows = organism.task().dataset("train").to_pandas()
    for name, seed in (("model", 0), ("early", 1)):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=64,
            id2label=dict(enumerate(("entailment", "neutral", "contradiction"))),
        )
        transformers.BertForSequenceClassification(config).save_pretrained(given / name)
        tokenizer.save_pretrained(given / name)
    (given / "rows").mkdir()
    for split, some in (("train", rows.head(12)), ("validation", rows.tail(6))):
        columns = ["premise", "hypothesis", "label"]
        some[columns].to_csv(given / "rows" / f"{split}.csv", index=False)
    write_language_model(given, rows["premise"].head(12).str.split())
    made = {"prune": undisturbed(root, "prune")}
    shutil.copytree(made["prune"].folder / OUT, root / PRUNED)
    return {work: made.get(work) or undisturbed(root, work) for work in works}


def write_language_model(given: Path, words: pd.Series) -> None:
    """A tiny language model, and the first words of sentences as its prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(organism.checkpoint())
    alone = processors.TemplateProcessing(single="$A", pair="$A $B")  # a prompt has no end token
    tokenizer.backend_tokenizer.post_processor = alone
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(given / "language")
    tokenizer.save_pretrained(given / "language")
    (given / "prompts").mkdir()
    columns = {"prompt": words.str[:3].str.join(" "), "right": words.str[3], "wrong": "never"}
    pd.DataFrame(columns).to_csv(given / "prompts" / "validation.csv", index=False)


def undisturbed(root: Path, work: str) -> Expected:
    """Do a kind of work twice in folders of their own."""
    found: list[tuple[Ended, dict[str, bytes]]] = []
    notes = root / "notes"
    for turn in ("first", "second"):
        folder = fresh(root, f"{work}-{turn}")
        ended = finish(*start(WORKS[work][1], folder, lambda: note_down(notes)))
        if ended.how != DONE:
            raise SystemExit(f"{work} fails undisturbed: {ended.said}")
        found.append((ended, files_below(folder)))
        calls, modules = json.loads(notes.read_text())
        for module in modules:  # the next process will have them already
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    (first, files), (second, again) = found
    differing = [name for name in {**files, **again} if files.get(name) != again.get(name)]
    if first.shown != second.shown or differing:
        raise SystemExit(f"{work} gives other results the second time: {differing}")
    return Expected(first.shown, files, root / f"{work}-first", calls, second.seconds)


def fresh(root: Path, name: str) -> Path:
    """A new folder of a trial with what the work reads."""
    folder = root / name
    shutil.copytree(root / "given", folder / "given")
    (folder / "tmp").mkdir()
    return folder


def draw_trial(root: Path, expected: dict[str, Expected], seed: int, number: int) -> Trial:
    """The trial of a number: its kind, its work and a folder for it."""
    draw = Random(f"{seed} {number}")
    kind = draw.choices(list(TRIALS), list(TRIALS.values()))[0]
    work = draw.choices(list(expected), [WORKS[work][0] for work in expected])[0]
    folder = fresh(root, f"trial-{number}")
    return Trial(number, kind, work, draw, folder, expected[work])


def run_trials(
    root: Path, expected: dict[str, Expected], seed: int, numbers: Iterator[int], until: float
) -> None:
    """Try one number after the other, and write what came of each on a line of a file."""
    with open(root / f"results-{os.getpid()}", "w") as results:
        for number in numbers:
            if time.monotonic() > until:
                break
            trial = draw_trial(root, expected, seed, number)
            TRY[trial.kind](trial)
            line = [trial.number, trial.kind, trial.work, trial.counts, trial.wrong, trial.steps]
            results.write(json.dumps(line) + "\n")
            results.flush()
            shutil.rmtree(trial.folder)


def report(lines: list[list[Any]], seed: int, works: list[str]) -> bool:
    """Print the table and what went wrong; whether all was right."""
    columns = [name for names in COLUMNS.values() for name in names]
    table = pd.DataFrame(0, index=[*works, "all"], columns=columns)
    wrong = []
    for number, kind, work, counts, why, steps in lines:
        for name, count in counts.items():
            table.loc[[work, "all"], name] += count
        wrong += [f"--seed {seed} --trial {number}: {work}, {kind} ({'; '.join(steps)}) {text}"
                  for text in why]  # fmt: skip
    for row in (["work", *columns], ["---"] * (len(columns) + 1), *table.itertuples()):
        print("|", " | ".join(map(str, row)), "|")
    print(f"\n{len(lines)} trials, {len(wrong)} wrong")
    for text in wrong:
        print(f"\n{text}")
    return not wrong


def main() -> None:
    """Read the options, fork the workers, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--trials", type=int, help="end after this many instead")
    parser.add_argument("--trial", type=int, help="only the trial of this number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    # A process a run would import torch anew each time, and would outlive the kill of its parent.
    engines.Local.open = lambda self, n_runs: engines.Pool()  # type: ignore[method-assign]
    page.datetime = Noon
    for name in ("id", "ood"):
        organism.task(name).dataset(organism.task(name).held_out_split())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        root = Path(name)
        expected = prepare(root, given.works)
        with small_disk(root / "given", 10**8) as grow:
            disk = "a limit on the size of files" if grow is None else "a file system in memory"
        gc.freeze()  # else every process would copy the memory of this one
        until = time.monotonic() + given.minutes * 60
        workers = []
        for worker in range(given.workers):
            numbers = range(worker, given.trials or 10**9, given.workers)
            if given.trial is not None:
                numbers = range(given.trial, given.trial + (worker == 0))
            workers.append(os.fork())
            if not workers[-1]:
                code = 1
                try:
                    run_trials(root, expected, given.seed, iter(numbers), until)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        lines = [json.loads(line) for path in root.glob("results-*") for line in path.open()]
        right = report(sorted(lines), given.seed, given.works)
        print(f"full disks: {disk}")
    sys.exit(0 if right and not any(codes) else 1)


if __name__ == "__main__":
    main()
