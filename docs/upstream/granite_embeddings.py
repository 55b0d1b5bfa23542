"""mlx-vlm's Granite scales embeddings only if it is handed them: an answer's tokens go in unscaled.

python granite_embeddings.py
"""

import mlx.core as mx
from mlx_vlm.models.granite import Model, ModelConfig

CONFIG = {
    "model_type": "granite",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}

mx.random.seed(0)
model = Model(ModelConfig.from_dict(CONFIG))
ids = mx.array([[1, 2, 3]])
embeddings = model.get_input_embeddings(ids).inputs_embeds
by_ids = model.language_model(ids).logits
by_embeddings = model.language_model(ids, inputs_embeds=embeddings).logits
print("largest difference of the logits:", mx.abs(by_ids - by_embeddings).max().item())
