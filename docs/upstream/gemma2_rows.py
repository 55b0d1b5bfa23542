"""mlx-vlm's Gemma 2 masks a batch wrongly: its mask has no axis for groups of heads.

Three rows fail. With as many rows as heads of keys, each group of heads gets another row's mask.

    python gemma2_rows.py
"""

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache
from mlx_vlm.models.gemma2 import Model, ModelConfig

CONFIG = {
    "model_type": "gemma2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
}

model = Model(ModelConfig.from_dict(CONFIG))
alone = model.language_model(mx.array([[4, 5, 6]]), cache=[BatchKVCache([0]) for _ in range(2)])
rows = mx.array([[1, 2, 3], [4, 5, 6]])
batched = model.language_model(rows, cache=[BatchKVCache([2, 0]) for _ in range(2)])
distance = mx.abs(batched.logits[1] - alone.logits[0]).max().item()
print("two rows: largest difference from the row alone:", distance)
rows = mx.array([[1, 2, 3]] * 3)
model.language_model(rows, cache=[BatchKVCache([0, 1, 2]) for _ in range(2)])
