"""mlx-vlm's Qwen4-Exp writes before the start of an array for a call of two tokens.

Blocks that are not complete are -1, so their tokens have indices -4 to -1, into a mask of three
columns; `build_mask` checks the upper bound alone. On a CPU the byte before the array is part of
its size, as MLX's allocator notes it: the memory in use becomes absurd, and the process may die.

    python qwen4_exp_two_tokens.py
"""

import mlx.core as mx
from mlx_vlm.models.qwen4_exp.config import TextConfig
from mlx_vlm.models.qwen4_exp.language import Qwen4ExpAttention

CONFIG = {
    "model_type": "qwen4_exp",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "indexer_head_dim": 32,
}

indexer = Qwen4ExpAttention(TextConfig.from_dict(CONFIG)).indexer
selection = indexer.select(mx.random.normal((1, 2, CONFIG["hidden_size"])), None, None)
first = selection.selected_blocks.min().item() * indexer.compress_ratio
print("columns of the mask:", selection.key_len + 1, "- smallest index:", first)
for _ in range(1000):
    mx.eval(indexer.build_mask(selection))
print("bytes in use:", mx.get_active_memory())
