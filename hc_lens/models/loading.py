"""`hc.load`: a Hugging Face checkpoint as a hooked model with the original's logits.

1. `source` is a local directory, a Hub id or a Hugging Face model object.
2. The configuration names the family and the head; anything else is refused with the known list.
3. Hugging Face reads the weights: safetensors, or a ``.bin`` as plain tensors if that is all there
   is, from this folder alone. A weight that the file lacks is an error, never a random start.
   Python code that comes with the checkpoint is never run, and nobody is asked whether it may be.
   Nor is code of the Hub, by which a configuration may ask to attend: every model attends as its
   class does, and weights in a quantised form, which need such code, are refused.
   A folder that has been kept as a record (`hc_lens.records`) is read only as it was written.
4. The family's file converts the weights; the model also gets the tokenizer, the
   label names and the pad id. Its logits on a few tokens must be Hugging Face's
   (`hc_lens.models.probe`).
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hc_lens.data.labels import name_labels
from hc_lens.errors import HcLensError, first_line
from hc_lens.models.families import ARCHITECTURES, FAMILIES, MASKED
from hc_lens.models.inputs import is_encoder
from hc_lens.models.installed import BRIDGES, INSTALLED
from hc_lens.models.lens import HookedModel, convert
from hc_lens.models.probe import check_logits
from hc_lens.models.quiet import quiet
from hc_lens.records import changed_file

LONGEST_ID = 193
"""Most characters of a Hub id: 96 of the user's name, a slash, and 96 of the repository's."""
MOST_LAYERS = 1000
"""Most layers that a configuration may ask for."""
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where Hugging Face looks for weights, in this order."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
)


def load(
    source: Any,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    labels: Sequence[str] | None = None,
) -> HookedModel:
    """Load a sequence classifier, or a causal or masked language model, as a hooked model.

    Args:
        source: a local directory, a Hub id, or a Hugging Face model object.
        device: where the model goes, such as cpu or cuda:0; by default TransformerLens's choice.
        dtype: the type of the weights; float64 is exact to about 1e-14 against Hugging Face.
        tokenizer: the tokenizer to use instead of the checkpoint's own.
        labels: names of the classifier's logits in order, for a checkpoint whose own are
            placeholders such as ``LABEL_0``; they may not contradict its own.

    Returns:
        An `EncoderClassifier` (a HookedEncoder) for BERT, RoBERTa, DistilBERT, ELECTRA, DeBERTa-v2
        and v3, ModernBERT, ALBERT and MPNet; a `DecoderClassifier` (a HookedTransformer) for
        decoders; a `DecoderLanguageModel` (a
        HookedTransformer) for a causal language model; an `EncoderLanguageModel` (a HookedEncoder)
        for a masked language model of BERT or RoBERTa. With TransformerLens 4 a `BridgeClassifier`
        or a `BridgeLanguageModel` (a TransformerBridge). Each carries `tokenizer`, `labels` (empty
        for a language model) and `fingerprint`.
    """
    check_device(device)
    with quiet():
        if isinstance(source, (str, Path)):
            hf_model = read_checkpoint(source, dtype)
            tokenizer = read_tokenizer(source) if tokenizer is None else tokenizer
        elif hasattr(source, "config") and hasattr(source, "state_dict"):
            hf_model = source
            _check_kind(source.config, type(source).__name__)
        else:
            raise HcLensError(
                "expected a directory, a Hub id or a Hugging Face model, got "
                f"{type(source).__name__}; pass the path of a saved checkpoint"
            )
        model = _convert(hf_model, None if device is None else str(device), dtype)
        _carry(model, hf_model.config, tokenizer, labels)
        model.requires_grad_(False).eval()
        check_logits(hf_model, model)
    return model


def _convert(hf_model: Any, device: str | None, dtype: torch.dtype) -> HookedModel:
    """The hooked model; what its TransformerLens cannot take is an HcLensError."""
    try:
        return convert(hf_model, FAMILIES[hf_model.config.model_type], device=device, dtype=dtype)
    except HcLensError:
        raise
    except Exception as error:  # each converter fails in its own way
        raise HcLensError(
            f"expected a {type(hf_model).__name__} that TransformerLens {INSTALLED} can take, got "
            f"one with which it fails: {first_line(error)}; try it with TransformerLens "
            f"{3 if BRIDGES else 4}, and open an issue"
        ) from error


def check_device(device: str | torch.device | None) -> None:
    """Refuse a device that PyTorch does not know, or that is not there; None is any."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each kind of device fails in its own way
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise HcLensError(
            f"expected a device that is there ({', '.join(there)}), got {str(device)!r}; choose "
            "one of these"
        ) from error


def _check_kind(config: Any, architecture: str) -> None:
    """Refuse all but sequence classifiers and language models of known families."""
    family = config.model_type
    if family not in FAMILIES:
        raise HcLensError(
            f"expected a model of one of the families {sorted(FAMILIES)}, got {family!r}; "
            "convert the checkpoint to one of these or open an issue for its family"
        )
    if architecture in (ARCHITECTURES.get(family), MASKED.get(family)):
        return
    if not architecture.endswith("ForSequenceClassification"):
        raise HcLensError(
            "expected a sequence classifier (...ForSequenceClassification), a causal language "
            f"model or one of the masked language models {sorted(MASKED.values())}, got "
            f"{architecture}; fine-tune it with a classification head first"
        )
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise HcLensError(
            "expected a classifier of which one label is right, got one for several at once "
            "(problem_type multi_label_classification); load a checkpoint trained for one label"
        )
    if config.num_labels < 2 or getattr(config, "problem_type", None) == "regression":
        raise HcLensError(
            "expected a classifier with at least 2 labels, got a regression head "
            f"(num_labels={config.num_labels}, problem_type={config.problem_type!r}); "
            "load a checkpoint trained for classification"
        )


def read_checkpoint(source: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The Hugging Face model of a directory or Hub id, with every weight from its file."""
    import transformers as hf

    config = read_config(source)
    architecture = str((config.architectures or ["none named in config.json"])[0])
    _check_kind(config, architecture)
    language_models = {
        ARCHITECTURES.get(config.model_type): hf.AutoModelForCausalLM,
        MASKED.get(config.model_type): hf.AutoModelForMaskedLM,
    }
    auto = language_models.get(architecture, hf.AutoModelForSequenceClassification)
    hf_model, missing = read_weights(auto, source, config, dtype)
    _check_layers(source, config, missing)
    if missing:
        raise HcLensError(
            f"expected every weight of {type(hf_model).__name__} in {source}, missing "
            f"{missing[:3]}; pass a checkpoint that was saved with its head, or fine-tune this one"
        )
    return hf_model


def read_weights(
    auto: Any, source: str | Path, config: Any, dtype: torch.dtype
) -> tuple[Any, list[str]]:
    """The model that one of Hugging Face's ``Auto...`` classes reads, and the weights it lacks."""
    name = _named(source, "weights (model.safetensors)", ("*.safetensors", "*.bin", "*.index.json"))
    files = _weight_files(Path(name), config)
    try:
        hf_model, report = auto.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            weights_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told below, with their names
            output_loading_info=True,
        )
    except Exception as error:  # each kind of file fails in its own way
        # Its own text advises to read the file by running it.
        unsafe = "something other than plain tensors, which is not read"
        told = unsafe if type(error).__name__ == "UnpicklingError" else first_line(error)
        raise HcLensError(
            f"expected readable weights in {_unreadable(files) or source}, got {told}; download "
            "or save the checkpoint again"
        ) from error
    if report["mismatched_keys"]:
        names = sorted(str(each[0]) for each in report["mismatched_keys"])
        raise HcLensError(
            f"expected weights in {source} of the shapes that its config.json describes, got "
            f"others for {names[:3]} ({len(names)} in all); correct its config.json, or download "
            "or save the checkpoint again"
        )
    layers = config.num_hidden_layers
    if beyond := [number for number in _layers_in(report["unexpected_keys"]) if number >= layers]:
        name = _name_of_layers(config)
        raise HcLensError(
            f"expected weights of {layers} layers in {source} ({name} of its config.json), got "
            f"{beyond[-1] + 1}; set {name} to {beyond[-1] + 1}, or save the checkpoint again"
        )
    return hf_model, sorted(report["missing_keys"])


def _weight_files(folder: Path, config: Any) -> list[Path]:
    """The files that Hugging Face will read from a local folder; an index must name its own."""
    chosen = getattr(config, "transformers_weights", None)
    names = _WEIGHT_FILES if chosen is None else (str(chosen),)
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None or file.suffix != ".json":
        return [] if file is None else [file]
    _check_json(file)
    index = json.loads(file.read_bytes())
    weights = index.get("weight_map") if isinstance(index, dict) else None
    shards = list(weights.values()) if isinstance(weights, dict) else []
    plain = all(
        isinstance(shard, str) and not Path(shard).is_absolute() and ".." not in Path(shard).parts
        for shard in shards
    )
    if not shards or not plain or not isinstance(index.get("metadata"), dict):
        raise HcLensError(
            f"expected an index of weights in {file}, with a weight_map that names files of its "
            "own folder, and metadata, got something else; download or save the checkpoint again"
        )
    files = [folder / shard for shard in dict.fromkeys(shards)]
    # Of any text, also of one that is too long for a path.
    if absent := [path.name[:80] for path in files if not os.path.isfile(path)]:
        raise HcLensError(
            f"expected the files that {file} names, missing {absent[:3]}; download or save the "
            "checkpoint again"
        )
    return files


def _unreadable(files: Sequence[Path]) -> Path | None:
    """The first file that cannot be read; the only one, if it can be."""
    from safetensors import safe_open

    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(str(file), framework="pt"):
                    pass
            else:
                content = torch.load(file, map_location="meta", weights_only=True)
                if not all(isinstance(each, torch.Tensor) for each in content.values()):
                    return file
        except Exception:  # as above
            return file
    return files[0] if len(files) == 1 else None


def _check_layers(source: str | Path, config: Any, missing: Sequence[str]) -> None:
    """Refuse a configuration with more layers than there are weights for."""
    without, layers = _layers_in(missing), config.num_hidden_layers
    if without and without == list(range(without[0], layers)):
        name = _name_of_layers(config)
        cure = f"set {name} to {without[0]}, or " if without[0] else ""
        raise HcLensError(
            f"expected weights of {layers} layers in {source} ({name} of its config.json), got "
            f"those of {without[0]}; {cure}save the checkpoint again"
        )


def _layers_in(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that some weights belong to, in order."""
    found = (re.search(r"(?:^|\.)(?:layers?|h)\.(\d+)\.", name) for name in names)
    return sorted({int(each[1]) for each in found if each})


def _name_of_layers(config: Any) -> str:
    """What a family's config.json calls the number of its layers."""
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _check_json(path: Path) -> None:
    """Refuse a file that is there and is not JSON."""
    try:
        json.loads(path.read_bytes() if path.is_file() else "{}")
    except (ValueError, RecursionError) as error:
        raise HcLensError(
            f"expected JSON in {path}, got {first_line(error)}; correct it, or download or save "
            "the checkpoint again"
        ) from error


def read_config(source: str | Path) -> Any:
    """The configuration of a directory or Hub id."""
    from transformers import AutoConfig

    name = _named(source, "config.json", ("config.json",))
    if changed := changed_file(Path(name)):
        raise HcLensError(
            f"expected the checkpoint in {name} as it was written, got another {changed}; "
            "fine-tune again in the folder of the run, which repeats what is needed"
        )
    _check_json(Path(name) / "config.json")
    try:
        # Left out, it would be asked for on the terminal.
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise HcLensError(
            f"expected a local directory or a reachable Hub id, got {source!r}: "
            f"{first_line(error)}; without a network, pass the path of a downloaded checkpoint"
        ) from error
    except Exception as error:  # each family's configuration class fails in its own way
        raise HcLensError(
            f"expected a configuration of one of the families {sorted(FAMILIES)}, got one that "
            f"transformers cannot read from {source}: {first_line(error)}; correct its "
            "config.json. Python code that comes with a checkpoint is never run"
        ) from error
    _leave_out_hub_code(config, source)
    layers = getattr(config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise HcLensError(
            f"expected 1 to {MOST_LAYERS} layers in the config.json of {source} "
            f"({_name_of_layers(config)}), got {layers!r}; correct it"
        )
    return config


def _leave_out_hub_code(config: Any, source: str | Path) -> None:
    """Take out of a configuration what makes transformers fetch kernels from the Hub."""
    if getattr(config, "quantization_config", None) is not None:
        raise HcLensError(
            f"expected plain weights in {source}, got a quantization_config in its config.json; "
            "save the checkpoint again with weights that are not quantised"
        )
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a directory or Hub id; none there is an HcLensError."""
    from transformers import AutoTokenizer

    # transformers 5 builds an empty tokenizer where there is none, so the files are looked for.
    what = f"a tokenizer (one of {_TOKENIZER_FILES}; or pass tokenizer=...)"
    name = _named(source, what, _TOKENIZER_FILES)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # each kind of file fails in its own way
        raise HcLensError(
            f"expected a readable tokenizer in {source}: {first_line(error)}; pass tokenizer=..."
        ) from error


def with_pad(tokenizer: Any) -> Any:
    """A copy of a tokenizer that pads, with its end-of-text token if it has no pad token."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _named(source: str | Path, what: str, files: Sequence[str]) -> str:
    """A source as Hugging Face takes it: a Hub id, or a folder that has one of the files."""
    folder = Path(source).expanduser()
    if os.path.isdir(folder):
        if not any(any(folder.glob(name)) for name in files):
            found = sorted(item.name for item in folder.iterdir())[:5]
            raise HcLensError(
                f"expected {what} in {folder}, got {found}; pass the directory that "
                "save_pretrained wrote"
            )
        return str(folder)
    elsewhere = str(source).startswith(("/", ".", "~")) or str(source).count("/") > 1
    if os.path.exists(folder) or elsewhere or len(str(source)) > LONGEST_ID:
        raise HcLensError(
            f"expected a directory with a checkpoint, got {source}, which is not a directory; "
            "check the path"
        )
    return str(source)


def _carry(model: HookedModel, config: Any, tokenizer: Any, labels: Sequence[str] | None) -> None:
    """Give the model its tokenizer, pad id and labels."""
    carry_tokenizer(model, tokenizer)
    named: dict[int, str] = getattr(model, "labels", {})
    if labels is not None:
        named = name_labels(named, labels)
    for name, value in (("pad_token_id", config.pad_token_id), ("labels", named)):
        setattr(model, name, value)


def carry_tokenizer(model: Any, tokenizer: Any) -> None:
    """Give a model its tokenizer, with which it tokenises as Hugging Face does."""
    tokenizer = None if tokenizer is None else with_pad(tokenizer)
    if not is_encoder(model):
        # A BOS only where the tokenizer itself puts one.
        puts_bos = tokenizer is not None and len(tokenizer.encode("")) > 0
        model.cfg.tokenizer_prepends_bos = model.cfg.default_prepend_bos = puts_bos
    # In the place of another one, a bridge would change it.
    model.tokenizer = None
    model.tokenizer = tokenizer
