"""Checkpoints as TransformerBridges of TransformerLens 4, with the logits of Hugging Face.

1. A bridge is put around the Hugging Face model itself, with the adapter of its architecture: ours
   for classifiers (`hc_lens.models.adapters`), TransformerLens's own for language models.
2. A classifier's logits are [batch, labels]. A decoder is read at the rightmost token that is not a
   pad, on whichever side the pads are and whether the checkpoint names a pad or not.
3. An encoder counts its positions as Hugging Face does, whatever the mask; a decoder from the first
   token that is not a pad.
4. Weights stay the checkpoint's own: no folding, no centring, no compatibility mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.sources import build_bridge_config_from_hf
from transformer_lens.utilities.devices import get_device

from hc_lens.errors import HcLensError, check_choice
from hc_lens.models.adapters import ADAPTERS, CLASSIFIERS, EncoderAdapter, register
from hc_lens.models.encoders import EncoderFamily
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.inputs import Text, encode, is_encoder
from hc_lens.models.installed import only_before_bridges
from hc_lens.models.parts import last_real
from hc_lens.protocols import Model

Input = Int[Tensor, "batch pos"] | Text | Sequence[Text]
"""What a model reads: token ids, a sentence or a pair, or several of either."""


class _Bridge(TransformerBridge):
    """A bridge of `hc.load`: it names its own weights, and reads what its tokenizer reads."""

    labels: dict[int, str]
    """Label names by id, as the checkpoint spells them; empty for a language model."""
    pad_token_id: int | None
    """The pad id of the checkpoint's configuration, if it names one."""

    @property
    def fingerprint(self) -> str:
        """Hash of weights, architecture and labels; the same in every process."""
        return fingerprint(cast(Model, self))

    def run_with_cache(self, input: Any = None, *args: Any, **given: Any) -> Any:
        """TransformerBridge's own, which also takes Hugging Face's name of the token ids."""
        tokens = given.pop("input_ids", None)
        return super().run_with_cache(tokens if input is None else input, *args, **given)

    def _run(self, input: Any, **given: Any) -> Any:
        """What TransformerBridge answers, without arguments that the model has no use for."""
        if is_encoder(self):
            _check_whole(given)
            # Given, though None: else the bridge would count positions from the mask.
            given.setdefault("position_ids", None)
            if "token_type_embed" not in self.adapter.components:
                given.pop("token_type_ids", None)
        else:
            given.setdefault("use_cache", False)
        named = {name: value for name, value in given.items() if value is not None}
        keep = {name: None for name in ("position_ids", "return_type") if name in given}
        run = partial(TransformerBridge.forward, self, input, **{**keep, **named})
        own = [block.attn for block in self.blocks if type(block.attn) is AttentionBridge]
        points = [point for attn in own for point in (attn.hook_pattern, attn.hook_attn_scores)]
        hooked = [point for point in points if point.fwd_hooks]
        return _refusing_edits(run, hooked) if hooked else run()


class BridgeClassifier(_Bridge):
    """A TransformerBridge whose output is [batch, labels]."""

    def read_positions(
        self, tokens: Int[Tensor, "batch pos"] | None, mask: Int[Tensor, "batch pos"] | None, like
    ) -> Int[Tensor, "batch"]:
        """Where a decoder's classifier reads: the rightmost token that is not a pad."""
        return last_real(tokens, mask, self.pad_token_id, like)

    def forward(  # type: ignore[override]
        self,
        input: Input | Float[Tensor, "batch pos d_model"] | None = None,
        return_type: str | None = "logits",
        *,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        **given: Any,
    ) -> Float[Tensor, "..."] | list[str] | None:
        """Logits [batch, labels] of token ids, sentences or (premise, hypothesis) pairs.

        Further arguments are TransformerBridge's and the Hugging Face model's. With
        `start_at_layer` the input is a residual stream, and a decoder is also given its `tokens`.
        """
        check_choice("a classifier's return_type", return_type, ("logits", "predictions", None))
        read = encode(self, input_ids if input is None else input)
        mask = (
            given.pop("one_zero_attention_mask", None) if attention_mask is None else attention_mask
        )
        given = {"attention_mask": mask, **given, **read}
        logits = self._logits(given.pop("input"), **given)
        if given.get("stop_at_layer") is not None:
            return logits
        if return_type == "predictions":
            return [self.labels[label] for label in logits.argmax(-1).tolist()]
        return logits if return_type else None

    def _logits(self, read: Tensor, **given: Any) -> Tensor:
        """The logits, of a decoder at the token where it is read; the stream of a stopped run."""
        ids = given.pop("tokens", None) if read.is_floating_point() else read
        if is_encoder(self) or given.get("stop_at_layer") is not None:
            return self._run(read, **given)
        everywhere: list[Tensor] = []
        handle = self.unembed.register_forward_hook(lambda *seen: everywhere.append(seen[-1]))
        try:
            self._run(read, **given)
        finally:
            handle.remove()
        logits = everywhere[-1]
        at = self.read_positions(ids, given.get("attention_mask"), logits)
        return logits[torch.arange(len(at), device=at.device), at]


class BridgeLanguageModel(_Bridge):
    """A TransformerBridge with a logit for every token of its vocabulary."""

    def forward(  # type: ignore[override]
        self,
        input: Any = None,
        return_type: str | None = "logits",
        *,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        **given: Any,
    ) -> Any:
        """TransformerBridge's own, which also takes Hugging Face's name of the token ids."""
        tokens = input_ids if input is None else input
        if is_encoder(self):
            choices = ("logits", None)
            check_choice("a masked language model's return_type", return_type, choices)
        if is_encoder(self) and not isinstance(tokens, Tensor):
            read = encode(self, tokens)
            tokens, given = read.pop("input"), {**given, **read}
        return self._run(tokens, return_type=return_type, **given)


def _check_whole(given: Mapping[str, Any]) -> None:
    """Refuse a part of an encoder: TransformerLens would run all of it and not say so."""
    for name in ("start_at_layer", "stop_at_layer"):
        if given.get(name) is not None:
            raise HcLensError(
                f"expected a run through all layers of an encoder, got {name}={given[name]}, which "
                "TransformerLens 4 does not heed; run_with_cache keeps the stream at "
                "blocks.0.hook_resid_pre and so on"
            )


HookedModel = BridgeClassifier | BridgeLanguageModel


def _refusing_edits(run: Callable[[], Any], points: Sequence[Any]) -> Any:
    """A forward pass in which a hook that edits what has been used before is an HcLensError."""
    versions: dict[Any, int] = {}

    def before(point: Any, args: tuple[Tensor]) -> None:
        if not args[0].is_inference():  # these do not count the edits in place
            versions[point] = args[0]._version

    def behind(point: Any, args: tuple[Tensor], out: Tensor) -> None:
        same = out is args[0] or torch.equal(out, args[0])
        if not same or (point in versions and versions[point] != args[0]._version):
            raise HcLensError(
                "expected hooks that read hook_pattern and hook_attn_scores, got one that changes "
                "the pattern, which has no effect on this model with TransformerLens 4: Hugging "
                "Face's own attention has used it before; change hook_z instead, or use "
                "TransformerLens 3"
            )

    handles = [point.register_forward_pre_hook(before) for point in points]
    handles += [point.register_forward_hook(behind) for point in points]
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


def convert(
    hf_model: Any, family: EncoderFamily | str, *, device: str | None, dtype: torch.dtype
) -> HookedModel:
    """A bridge around a copy of a Hugging Face model; the family of a decoder is a name."""
    if isinstance(family, EncoderFamily) and not family.bridged:
        kind = hf_model.config.model_type
        only_before_bridges(f"a {kind} checkpoint, whose blocks no component of a bridge knows")
    hf_model = copy.deepcopy(hf_model).eval()
    device = get_device() if device is None else device
    for parameter in hf_model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    hf_model.to(device)
    hf_model.set_attn_implementation("eager")  # else there are no patterns
    config, architecture = copy.deepcopy(hf_model.config), type(hf_model).__name__
    cfg = build_bridge_config_from_hf(config, architecture, config.model_type, dtype)
    cfg.device = device
    register()
    classifies = architecture.endswith("ForSequenceClassification")
    kind = CLASSIFIERS[config.model_type] if classifies else architecture
    known = ADAPTERS.get(kind, ArchitectureAdapterFactory.select_architecture_adapter)
    adapter: Any = known(cfg)
    if isinstance(family, EncoderFamily):
        family.check(hf_model.config)
    adapter.prepare_model(hf_model)
    model = (BridgeClassifier if classifies else BridgeLanguageModel)(hf_model, adapter, None)
    if dtype == torch.float64:
        # Else a pad that sees nothing is NaN, as its scores overflow in a softmax of float32.
        for block in model.blocks:
            if isinstance(block.attn, PositionEmbeddingsAttentionBridge):
                block.attn.compatibility_mode = True
    if isinstance(model, BridgeLanguageModel):
        return model
    if hf_model.config.pad_token_id is None and not isinstance(adapter, EncoderAdapter):
        # Hugging Face asks for one in its own answer, which is not used.
        hf_model.config.pad_token_id = 0
    return model
