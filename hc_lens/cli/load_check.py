"""``hc-lens load-check``: does this checkpoint load, and are its logits Hugging Face's?

1. Load the checkpoint with ``hc.load``, and again with Hugging Face alone.
2. Compare the logits of a few texts, of rows of random tokens padded on the right and on the left,
   and of the user's rows, if there are any (`hc_lens.models.check`).
3. A difference above the tolerance is exit code 1.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.data.specs import checkpoint_of
from hc_lens.errors import HcLensError

PAIRS = (
    ("the old doctor saw the judge near the lawyer .", "the doctor saw the judge ."),
    ("if the artist slept , the banker ran .", "the artist slept ."),
    ("the student said that the judge called", "the judge called the student today ."),
    ("a dog", "no"),
)
"""The texts: pairs of unequal length."""


@options.section("Rows")
class OwnRows(options.HeldOutRows):
    """Rows to compare on beside the texts."""

    task: str = ""
    """mnli, snli, qqp, hans, paws-qqp, organism, organism-ood, or any name for rows of your own; by
    default no rows beside the texts and random tokens."""


@options.section()
class Settings:
    """Which checkpoint."""

    checkpoint: options.Checkpoint
    rows: OwnRows = field(default_factory=OwnRows)
    tolerance: float = 1e-4
    """Largest difference that passes."""
    output: options.Output = field(default_factory=options.Output)


def run(settings: Settings, work: Work) -> None:
    """Does a checkpoint load, with Hugging Face's logits?"""
    from transformers import __version__

    from hc_lens.models.check import Reference, padded_left
    from hc_lens.models.inputs import mask_of
    from hc_lens.units import UnitSpace

    name, tolerance, rows = settings.checkpoint.model, settings.tolerance, settings.rows
    if rows.path is not None and not rows.task:
        raise HcLensError(f"expected --task with --path, got {rows.path} alone; name the task")
    model: Any = work.model(settings.checkpoint)
    own = work.rows(model, work.held_out(rows)) if rows.task else None
    work.begin(resumes=True)
    reference = Reference(model, checkpoint_of(name))
    found = {
        "largest_logit_difference": reference.on_texts(PAIRS),
        "random_rows_padded_right": reference.on_random_rows("right"),
        "random_rows_padded_left": reference.on_random_rows("left"),
    }
    if own is not None:
        found["your_rows"] = reference.on_batches(batch.inputs for batch in own)
        # The batches of a decoder may have their pads on the left already.
        right = (batch.inputs for batch in own if mask_of(batch.inputs)[:, 0].all())
        found["your_rows_padded_left"] = reference.on_batches(map(padded_left, right))
    passed = max(found.values()) <= tolerance
    # A language model has no labels, and a decoder no line of the table of encoders.
    more = {
        "exact": reference.exact,
        "labels": {str(k): v for k, v in (model.labels or {}).items()},
    }
    work.finish(
        checkpoint=name,
        kind=type(model).__name__,
        family=reference.family,
        transformers=__version__,
        dtype=str(model.cfg.dtype).removeprefix("torch."),
        fingerprint=work.fingerprint,
        **{name: value for name, value in more.items() if value},
        units=str(UnitSpace.of(model)),
        context=f"{model.cfg.n_ctx} tokens",
        texts=len(PAIRS),
        **found,
        tolerance=tolerance,
        parity=passed,
    )
    if not passed:
        raise HcLensError(
            f"expected logits within {tolerance:g} of Hugging Face's, got a difference of "
            f"{max(found.values()):.3g}; raise --tolerance only for a model in low precision"
        )
