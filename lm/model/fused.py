"""Which matrices stand one above the other in a fused one: `layers` and `attention` multiply them at once, for speed.

Who treats matrices one by one, as `muon` does, asks here where they begin and end.
"""

from lm.model.config import DecoderConfig


def fused_rows(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The end of a fused weight's name -> the rows of each matrix in it, from the top: q, k, v; gate, up."""
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        "qkv_proj.weight": (heads, kv_heads, kv_heads),
        "gate_up_proj.weight": (config.intermediate_size, config.intermediate_size),
    }
