"""`hc.load`: a Hugging Face checkpoint as a hooked model with the original's logits.

1. `source` is a local directory, a Hub id or a Hugging Face model object.
2. The configuration names the family and the head; anything else is refused with the known list.
3. Hugging Face reads the weights: safetensors, or a ``.bin`` as plain tensors if that is all there
   is. A weight that the file lacks is an error, never a random start.
4. The family's file converts the weights; the model also gets the tokenizer, the
   label names and the pad id.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformer_lens import HookedTransformer

from hc_lens.errors import HcLensError, first_line
from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.decoders import ARCHITECTURES, convert_decoder, convert_language_model
from hc_lens.models.encoders import FAMILIES, convert_encoder
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.quiet import quiet

HookedModel = EncoderClassifier | DecoderClassifier | HookedTransformer

CLASSIFIERS = {
    **dict.fromkeys(FAMILIES, convert_encoder),
    **dict.fromkeys(ARCHITECTURES, convert_decoder),
}
"""Hugging Face model type -> the converter of its sequence classifier."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def load(
    source: Any,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    labels: Sequence[str] | None = None,
) -> HookedModel:
    """Load a sequence classifier, or a causal language model, as a hooked model.

    Args:
        source: a local directory, a Hub id, or a Hugging Face model object.
        device: where the model goes; by default TransformerLens's choice.
        dtype: the type of the weights; float64 is exact to about 1e-14 against Hugging Face.
        tokenizer: the tokenizer to use instead of the checkpoint's own.
        labels: names of the classifier's logits in order, for a checkpoint without them.

    Returns:
        An `EncoderClassifier` (a HookedEncoder) for BERT, RoBERTa, DistilBERT and ELECTRA; a
        `DecoderClassifier` (a HookedTransformer) for decoders; a plain HookedTransformer for a
        causal language model. Each carries `tokenizer`, `labels` and `fingerprint`.
    """
    named = isinstance(source, (str, Path))
    with quiet():
        config = _read_config(source) if named else _config_of(source)
        _check_head(config)
        hf_model = _read_weights(source, config, dtype) if named else source
        if named and tokenizer is None:
            tokenizer = read_tokenizer(source)
        convert = CLASSIFIERS[config.model_type]
        if _is_language_model(config):
            convert = convert_language_model
        model = convert(hf_model, device=None if device is None else str(device), dtype=dtype)
        model.to(model.cfg.device or "cpu", print_details=False)
    _carry(model, config, tokenizer, labels)
    return model.requires_grad_(False).eval()


def _config_of(hf_model: Any) -> Any:
    config = getattr(hf_model, "config", None)
    if config is None or not hasattr(hf_model, "state_dict"):
        raise HcLensError(
            "expected a directory, a Hub id or a Hugging Face model, got "
            f"{type(hf_model).__name__}; pass the path of a saved checkpoint"
        )
    config.architectures = [type(hf_model).__name__]
    return config


def _is_language_model(config: Any) -> bool:
    return (config.architectures or [""])[0] == ARCHITECTURES.get(config.model_type)


def _check_head(config: Any) -> None:
    """Refuse all but sequence classifiers and causal language models of known families."""
    family = config.model_type
    if family not in CLASSIFIERS:
        raise HcLensError(
            f"expected a model of one of the families {sorted(CLASSIFIERS)}, got {family!r}; "
            "convert the checkpoint to one of these or open an issue for its family"
        )
    architecture = (config.architectures or ["none named in config.json"])[0]
    if _is_language_model(config):
        return
    if not architecture.endswith("ForSequenceClassification"):
        raise HcLensError(
            "expected a sequence classifier (...ForSequenceClassification) or a causal language "
            f"model, got {architecture}; fine-tune it with a classification head first"
        )
    if config.num_labels < 2 or getattr(config, "problem_type", None) == "regression":
        raise HcLensError(
            "expected a classifier with at least 2 labels, got a regression head "
            f"(num_labels={config.num_labels}, problem_type={config.problem_type!r}); "
            "load a checkpoint trained for classification"
        )


def _read_config(source: str | Path) -> Any:
    from transformers import AutoConfig

    found = _local(source)
    if isinstance(found, Path):
        remedy = "pass the directory that save_pretrained wrote"
        _expect(found, "config.json", ("config.json",), remedy)
        _expect(found, "weights (model.safetensors)", ("*.safetensors", "*.bin"), remedy)
    try:
        return AutoConfig.from_pretrained(str(found))
    except OSError as error:
        raise HcLensError(
            f"expected a local directory or a reachable Hub id, got {source!r}: "
            f"{first_line(error)}; without a network, pass the path of a downloaded checkpoint"
        ) from error
    except Exception as error:  # each family's configuration class fails in its own way
        raise HcLensError(
            f"expected a configuration of one of the families {sorted(CLASSIFIERS)}, got one that "
            f"transformers cannot read from {source}: {first_line(error)}"
        ) from error


def _local(source: str | Path) -> str | Path:
    """The path of a local folder with ``~`` written out, or the Hub id as it is."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or str(source).startswith(("/", ".", "~")) or str(source).count("/") > 1:
        raise HcLensError(
            f"expected a directory with a checkpoint, got {source}, which is not a directory; "
            "check the path"
        )
    return str(source)


def _expect(folder: Path, what: str, files: Sequence[str], remedy: str) -> None:
    if not any(any(folder.glob(name)) for name in files):
        found = sorted(item.name for item in folder.iterdir())[:5]
        raise HcLensError(f"expected {what} in {folder}, got {found}; {remedy}")


def _read_weights(source: str | Path, config: Any, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    if _is_language_model(config):
        auto = AutoModelForCausalLM
    found = _local(source)
    local_bin = isinstance(found, Path) and not any(found.glob("*.safetensors"))
    try:
        hf_model, report = auto.from_pretrained(
            str(found),
            config=config,
            dtype=dtype,
            use_safetensors=False if local_bin else None,
            weights_only=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise HcLensError(
            f"expected readable weights in {source}, got {first_line(error)}; "
            "download or save the checkpoint again"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing or report.get("mismatched_keys"):
        raise HcLensError(
            f"expected every weight of {type(hf_model).__name__} in {source}, missing "
            f"{missing[:3]}, of another shape {sorted(map(str, report['mismatched_keys']))[:3]}; "
            "fine-tune the checkpoint so that its head is saved with it"
        )
    return hf_model


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a directory or Hub id; none there is an HcLensError."""
    from transformers import AutoTokenizer

    found = _local(source)
    # transformers 5 builds an empty tokenizer where there is none, so the files are looked for.
    if isinstance(found, Path):
        remedy = "save it there with tokenizer.save_pretrained, or pass tokenizer=..."
        _expect(found, f"a tokenizer (one of {_TOKENIZER_FILES})", _TOKENIZER_FILES, remedy)
    try:
        return AutoTokenizer.from_pretrained(str(found))
    except (OSError, ValueError) as error:
        raise HcLensError(
            f"expected a readable tokenizer in {source}: {first_line(error)}; pass tokenizer=..."
        ) from error


def _carry(model: HookedModel, config: Any, tokenizer: Any, labels: Sequence[str] | None) -> None:
    """Give the model its tokenizer, pad id, labels and fingerprint."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.tokenizer = tokenizer
    if isinstance(model, HookedTransformer):
        # Tokenise as Hugging Face does: a BOS only where the tokenizer itself puts one.
        puts_bos = tokenizer is not None and len(tokenizer.encode("")) > 0
        model.cfg.tokenizer_prepends_bos = model.cfg.default_prepend_bos = puts_bos
    model.pad_token_id = config.pad_token_id
    if not isinstance(model, (EncoderClassifier, DecoderClassifier)):
        vars(model).update(labels={}, fingerprint=fingerprint(model))
    if labels is None:
        return
    n_labels = len(vars(model)["labels"])
    if isinstance(labels, str) or len(labels) != n_labels:
        raise HcLensError(
            f"expected labels=[...] with one name for each of the model's {n_labels} labels, got "
            f"{labels!r}; name them in the order of the model's logits"
        )
    vars(model)["labels"] = dict(enumerate(labels))
