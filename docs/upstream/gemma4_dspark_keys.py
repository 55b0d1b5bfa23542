"""mlx-vlm: a DSpark drafter of Gemma 4 whose layers share one projection can't draft.

`DFlashDraftModel._project_context_kv` asks each layer for `v_proj`, which those of
`Gemma4DSparkAttention` with `attention_k_eq_v`, its default, do not have: AttributeError. They have
`_project_kv`, which `DFlashAttention` calls.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.speculative.drafters.gemma4_dspark import Model, ModelConfig

config = ModelConfig.from_dict(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 100,
        "block_size": 4,
        "mask_token_id": 3,
        "markov_rank": 8,
        "target_layer_ids": [0],
        "num_target_layers": 1,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
    }
)
drafter = Model(config)
drafter.embed_tokens = nn.Embedding(100, 64)
print(drafter.draft_block(1, mx.zeros((1, 3, 64)), drafter.make_cache(), 4, mx.argmax))
