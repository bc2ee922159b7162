"""``hc-lens load-check``: does this checkpoint load, and are its logits Hugging Face's?

1. Load the checkpoint with ``hc.load``, and again with Hugging Face alone.
2. Run a few texts: here in one padded batch, there one by one without padding.
3. Compare the logits. A difference above the tolerance is exit code 1.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.data.specs import checkpoint_of
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.models.loading import HookedModel

PAIRS = (
    ("the old doctor saw the judge near the lawyer .", "the doctor saw the judge ."),
    ("if the artist slept , the banker ran .", "the artist slept ."),
    ("the student said that the judge called", "the judge called the student today ."),
    ("a dog", "no"),
)
"""The texts: pairs of unequal length."""


@options.section()
class Settings:
    """Which checkpoint."""

    checkpoint: options.Checkpoint
    tolerance: float = 1e-4
    """Largest difference that passes."""
    output: options.Output = field(default_factory=options.Output)


def run(settings: Settings, work: Work) -> None:
    """Does a checkpoint load, with Hugging Face's logits?"""
    from hc_lens.units import UnitSpace

    name, tolerance = settings.checkpoint.model, settings.tolerance
    model: Any = work.model(settings.checkpoint)
    work.begin(resumes=True)
    difference = largest_difference(model, checkpoint_of(name))
    passed = difference <= tolerance
    # A language model has none.
    labels = {str(index): label for index, label in (model.labels or {}).items()}
    work.finish(
        checkpoint=name,
        kind=type(model).__name__,
        fingerprint=work.fingerprint,
        **({"labels": labels} if labels else {}),
        units=str(UnitSpace.of(model)),
        context=f"{model.cfg.n_ctx} tokens",
        texts=len(PAIRS),
        largest_logit_difference=difference,
        tolerance=tolerance,
        parity=passed,
    )
    if not passed:
        raise HcLensError(
            f"expected logits within {tolerance:g} of Hugging Face's, got a difference of "
            f"{difference:.3g}; raise --tolerance only for a model in low precision"
        )


def largest_difference(model: HookedModel, checkpoint: str) -> float:
    """Largest difference of a logit between a hooked model and Hugging Face's own, on `PAIRS`."""
    import torch

    from hc_lens.models.inputs import encode, mask_of, tokenizer_of
    from hc_lens.models.loading import read_checkpoint
    from hc_lens.models.quiet import quiet

    with quiet():
        reference = read_checkpoint(checkpoint).eval()
    inputs, tokenizer = encode(model, list(PAIRS)), tokenizer_of(model)
    real = mask_of(inputs).bool().cpu()
    largest = 0.0
    with torch.no_grad():
        ours = model(**inputs).double().cpu()
        for row, pair in enumerate(PAIRS):
            theirs = reference(**tokenizer(*pair, return_tensors="pt")).logits[0].double()
            # A language model has logits at every token, and none that matter at pads.
            own = ours[row] if ours.ndim == 2 else ours[row][real[row]]
            largest = max(largest, (own - theirs).abs().max().item())
    return largest
