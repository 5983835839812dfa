"""The API for your own models, and for your own parts of a block. See docs/your-own-model.md.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.
"""

from mingpt_ddp.config.keys.model_config import PartConfig
from mingpt_ddp.models.block_parts import Attention, BlockSpec
from mingpt_ddp.models.kv_cache import CachePosition, KVCache
from mingpt_ddp.models.ops import (
    causal_attention,
    cross_entropy,
    dropout,
    relu_squared,
    rms_norm,
)
from mingpt_ddp.models.rotary import RotaryAttention

__all__ = [
    "Attention",
    "BlockSpec",
    "CachePosition",
    "KVCache",
    "PartConfig",
    "RotaryAttention",
    "causal_attention",
    "cross_entropy",
    "dropout",
    "relu_squared",
    "rms_norm",
]
