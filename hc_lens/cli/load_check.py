"""``hc-lens load-check``: does this checkpoint load, and are its logits Hugging Face's?

1. Load the checkpoint with ``hc.load``, and again with Hugging Face alone.
2. Run a few texts: here in one padded batch, there one by one without padding.
3. Compare the logits. A difference above the tolerance is exit code 1.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.data.specs import ORGANISM
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

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
    difference = largest_difference(model, folder_of(name))
    passed = difference <= tolerance
    work.finish(
        checkpoint=name,
        kind=type(model).__name__,
        fingerprint=work.fingerprint,
        labels={str(index): label for index, label in (model.labels or {}).items()},
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


def folder_of(name: str) -> str:
    """Where Hugging Face finds the checkpoint that a model string names."""
    from hc_lens import organism

    bundled, _, step = name.partition(":")
    if bundled != ORGANISM or Path(name).exists():
        folder = Path(name).expanduser()
        return str(folder) if folder.is_dir() else name
    return str(organism.WEIGHTS / f"step-{int(step) if step else organism.steps()[-1]:05d}")


def largest_difference(model: HookedModel, folder: str) -> float:
    """Largest difference of a logit between a hooked model and Hugging Face's own, on `PAIRS`."""
    import torch

    from hc_lens.models.inputs import encode, mask_of, tokenizer_of

    inputs = encode(model, list(PAIRS))
    with torch.no_grad():
        ours = model(**inputs).double().cpu()
    mask = mask_of(inputs).bool().cpu()
    largest = 0.0
    for row, theirs in enumerate(_reference_logits(tokenizer_of(model), folder)):
        # A language model has logits at every token, and none that matter at pads.
        own = ours[row] if ours.ndim == 2 else ours[row][mask[row]]
        largest = max(largest, (own - theirs).abs().max().item())
    return largest


def _reference_logits(tokenizer: PreTrainedTokenizerBase, folder: str) -> list[Tensor]:
    """Hugging Face's logits of each pair, alone and without padding."""
    import torch
    import transformers

    from hc_lens.models.quiet import quiet

    with quiet(), torch.no_grad():
        architecture = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
        classifies = architecture.endswith("ForSequenceClassification")
        auto: Any = (
            transformers.AutoModelForSequenceClassification
            if classifies
            else transformers.AutoModelForCausalLM
        )
        reference = auto.from_pretrained(folder).float().eval()
        names = {"input_ids", "attention_mask", "token_type_ids"} & set(tokenizer.model_input_names)
        logits = []
        for pair in PAIRS:
            encoded = tokenizer(*pair, return_tensors="pt")
            inputs = {name: encoded[name] for name in names if name in encoded}
            logits.append(reference(**inputs).logits[0].double())
    return logits
