"""``hc-lens load-check``: does this checkpoint load, and are its logits Hugging Face's?

1. Load the checkpoint with ``hc.load``, and again with Hugging Face alone.
2. Run a few texts: here in one padded batch, there one by one without padding.
3. Compare the logits. A difference above the tolerance is exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hc_lens.cli import options
from hc_lens.cli.run import Run
from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError
from hc_lens.spec import ORGANISM

PAIRS = (
    ("the old doctor saw the judge near the lawyer .", "the doctor saw the judge ."),
    ("if the artist slept , the banker ran .", "the artist slept ."),
    ("the student said that the judge called", "the judge called the student today ."),
    ("a dog", "no"),
)
"""The texts: pairs of unequal length."""


def command(
    context: Context,
    model: options.Model,
    tolerance: Annotated[float, typer.Option(help="Largest difference that passes.")] = 1e-4,
    device: options.Device = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Does a checkpoint load, with Hugging Face's logits?"""
    from hc_lens.units import UnitSpace

    run = Run(context)
    hooked: Any = run.model()
    difference = largest_difference(hooked, place_of(model))
    passed = difference <= tolerance
    run.finish(
        checkpoint=model,
        kind=type(hooked).__name__,
        fingerprint=run.fingerprint,
        labels={str(place): name for place, name in (hooked.labels or {}).items()},
        units=str(UnitSpace.of(hooked)),
        context=f"{hooked.cfg.n_ctx} tokens",
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


def place_of(name: str) -> str:
    """Where Hugging Face finds the checkpoint that a model string names."""
    from hc_lens import organism

    bundled, _, step = name.partition(":")
    if bundled != ORGANISM or Path(name).exists():
        folder = Path(name).expanduser()
        return str(folder) if folder.is_dir() else name
    return str(organism.WEIGHTS / f"step-{int(step) if step else organism.steps()[-1]:05d}")


def largest_difference(hooked: Any, place: str) -> float:
    """Largest difference of a logit between a hooked model and Hugging Face's own, on `PAIRS`."""
    import torch

    from hc_lens.models import encode, mask_of

    inputs = encode(hooked, list(PAIRS))
    with torch.no_grad():
        ours = hooked(**inputs).double().cpu()
    mask = mask_of(inputs).bool().cpu()
    largest = 0.0
    for row, theirs in enumerate(_reference_logits(hooked.tokenizer, place)):
        # A language model has logits at every token, and none that matter at pads.
        own = ours[row] if ours.ndim == 2 else ours[row][mask[row]]
        largest = max(largest, (own - theirs).abs().max().item())
    return largest


def _reference_logits(tokenizer: Any, place: str) -> list[Any]:
    """Hugging Face's logits of each pair, alone and without padding."""
    import torch
    import transformers

    from hc_lens.models.quiet import quiet

    with quiet(), torch.no_grad():
        architecture = (transformers.AutoConfig.from_pretrained(place).architectures or [""])[0]
        classifies = architecture.endswith("ForSequenceClassification")
        auto: Any = (
            transformers.AutoModelForSequenceClassification
            if classifies
            else transformers.AutoModelForCausalLM
        )
        reference = auto.from_pretrained(place).float().eval()
        names = {"input_ids", "attention_mask", "token_type_ids"} & set(tokenizer.model_input_names)
        logits = []
        for pair in PAIRS:
            encoded = tokenizer(*pair, return_tensors="pt")
            inputs = {name: encoded[name] for name in names if name in encoded}
            logits.append(reference(**inputs).logits[0].double())
    return logits
