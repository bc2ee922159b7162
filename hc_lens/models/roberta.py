"""RoBERTa and XLM-RoBERTa: BERT with positions counted over real tokens and one token type.

1. Hugging Face gives the k-th token that is not a pad position ``pad_token_id + k`` (k from 1) and
   every pad position ``pad_token_id``. We drop the first ``pad_token_id + 1`` rows of the table, so
   that the first token has position 0; a pad gets the zero vector that the pad row holds.
2. The single token-type row is doubled, because HookedEncoder's table has two.
3. The classification head's dense layer is the pooler, its out_proj the unembedding.
4. The head of a masked language model has a GELU, whatever the activation of the blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.components.bert_embed import BertEmbed
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

from hc_lens.models.encoders import EncoderFamily


class PadAwareEmbed(BertEmbed):
    """BertEmbed whose positions count the tokens that are not pads."""

    def __init__(self, cfg: HookedTransformerConfig, pad_token_id: int):
        super().__init__(cfg)
        self.pad_token_id = pad_token_id

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Sum of token, position and token-type vectors, normalised."""
        real = input_ids != self.pad_token_id
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        words = self.hook_embed(self.embed(input_ids))
        where = torch.where(real.unsqueeze(-1), self.pos_embed.W_pos[positions], 0.0)
        summed = words + self.hook_pos_embed(where)
        return self.ln(summed + self.hook_token_type_embed(self.token_type_embed(types)))


FAMILY = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    masked={
        "mlm_head.W": "lm_head.dense",
        "mlm_head.ln.w": "lm_head.layer_norm",
        "unembed.W_U": "lm_head.decoder",
    },
    masked_act_fn=lambda config: "gelu",
    first_position=lambda config: config.pad_token_id + 1,
    embed=lambda cfg, config: PadAwareEmbed(cfg, config.pad_token_id),
)
