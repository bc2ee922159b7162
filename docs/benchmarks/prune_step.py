"""Cost of one pruning step on MNLI-length rows.

    python docs/benchmarks/prune_step.py [--model FOLDER] [--rows FILE]

Against (a) a plain forward and backward pass of the same hooked model on the same batch, and (b)
the way of the public code: the full model runs again beside the masked one, rows padded to 128, one
shared draw of the gates. Without options: a random-weight BERT of MiniLM's size and random rows
with the lengths of MNLI. The ways take turns; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import hc_lens as hc
from hc_lens.models.inputs import mask_name
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import GateTraining, frozen

WIDTH = 128


def model_and_batches(options: argparse.Namespace) -> tuple:
    """The model to prune and its batches."""
    if options.model:
        model = hc.load(options.model)
    else:
        config = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        config.num_labels = 3
        model = hc.load(transformers.BertForSequenceClassification(config))
    if options.rows:
        task = hc.Task.named("mnli", options.rows)
        return model, task.batches(model, limit=2000, max_length=WIDTH)
    generator = torch.Generator().manual_seed(0)
    # MNLI pairs have a median of 36 tokens and a long right tail.
    lengths = (36 * torch.exp(0.45 * torch.randn(2000, generator=generator))).clamp(8, WIDTH)
    return model, bucketed(model, sorted(int(length) for length in lengths), generator)


def bucketed(model: object, lengths: list[int], generator: torch.Generator) -> list:
    """Random rows in batches of about 4096 tokens, in a shuffled order."""
    batches, start = [], 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and lengths[end] * (end + 1 - start) <= 4096:
            end += 1
        rows = lengths[start:end]
        ids = torch.randint(1000, 30000, (len(rows), rows[-1]), generator=generator)
        mask = (torch.arange(rows[-1])[None] < torch.tensor(rows)[:, None]).long()
        ids, mask = (ids * mask).to(model.cfg.device), mask.to(model.cfg.device)
        inputs = {"input": ids, mask_name(model): mask}
        labels, cases = torch.zeros(len(rows), dtype=torch.long), ("all",) * len(rows)
        batches.append(hc.Batch(inputs, labels, cases, torch.arange(start, end)))
        start = end
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in order]


def padded(model: object, batch: hc.Batch) -> hc.Batch:
    """The same rows, padded to 128."""
    tokens = torch.nn.functional.pad(batch.inputs["input"], (0, WIDTH))[:, :WIDTH]
    mask = torch.nn.functional.pad(batch.inputs["one_zero_attention_mask"], (0, WIDTH))[:, :WIDTH]
    return dataclasses.replace(batch, inputs={"input": tokens, mask_name(model): mask})


def seconds(way: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


class Forgetful(Teacher):
    """A full model that runs at each step, as in the public code."""

    @torch.no_grad()
    def held(self, batch: object) -> torch.Tensor:
        return self.model(**batch.inputs)


def main() -> None:
    """Print the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint directory")
    parser.add_argument("--rows", help="file with MNLI rows")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, batches = model_and_batches(options)
    batches = [batch for batch, _ in zip(batches, range(options.rounds + 1), strict=False)]
    means = hc.collect_means(model, batches, progress=False)
    teacher = Teacher(model)
    ours = GateTraining(Job(model, batches, means, hc.PruneConfig(0.5, 0, steps=100), teacher))
    reference_config = hc.PruneConfig.reference(0.5, 0, steps=100)
    theirs = GateTraining(Job(model, batches, means, reference_config, Forgetful(model)))

    def plain(batch: object) -> None:
        point = model.hook_dict["hook_full_embed"]
        point.add_hook(lambda value, hook: value.requires_grad_())
        model(**batch.inputs).log_softmax(-1)[:, 0].mean().backward()
        point.remove_hooks()

    def reference(batch: object) -> None:
        wide = padded(model, batch)
        theirs.step(50, [wide])

    times = []
    with frozen(model):
        for index, batch in enumerate(batches):
            teacher.held(batch)
            step = lambda batch=batch: ours.step(50, [batch])  # noqa: E731
            turn = [seconds(step), seconds(lambda batch=batch: plain(batch))]
            turn.append(seconds(lambda batch=batch: reference(batch)))
            if index > 0:
                times.append(turn)
    to_plain = statistics.median(mine / bare for mine, bare, _ in times)
    to_reference = statistics.median(slow / mine for mine, _, slow in times)
    print(f"a pruning step / plain forward + backward          {to_plain:.2f}")
    print(f"the public code's way / a pruning step             {to_reference:.1f}")


if __name__ == "__main__":
    main()
