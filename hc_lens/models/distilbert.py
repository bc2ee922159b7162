"""DistilBERT: BERT without token types; the head is a ReLU layer at position 0 and a classifier."""

from torch import nn

from hc_lens.models.encoders import EncoderFamily

FAMILY = EncoderFamily(
    pooler="pre_classifier",
    layer="transformer.layer.{l}.",
    parts={
        "attn.W_Q": "attention.q_lin",
        "attn.W_K": "attention.k_lin",
        "attn.W_V": "attention.v_lin",
        "attn.W_O": "attention.out_lin",
        "ln1.w": "sa_layer_norm",
        "mlp.W_in": "ffn.lin1",
        "mlp.W_out": "ffn.lin2",
        "ln2.w": "output_layer_norm",
    },
    d_mlp="hidden_dim",
    act_fn="activation",
    activation=lambda config: nn.ReLU(),
)
