"""Requests for vectors, and the vectors that mlx-vlm makes of the same prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.encoder_loader import load_encoder_model
from mlx_vlm.models.pooling import read_pooling_config
from mlx_vlm.utils import load_config, load_processor
from numpy.typing import NDArray

from tests.integration.harness import EngineHarness, Part, conversation, new_preparer
from tests.tiny_models import cached
from vlm_server.interfaces import PreparedPrompt
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Pooling, PoolingInput, SamplingParams, Submit, Vectors
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.checkpoint.view import view_of
from vlm_server.runner.loading.load import as_processors
from vlm_server.runner.loading.processors import ModelProcessor

Rows = NDArray[np.float32]


def embed(request_id: str, *inputs: tuple[Part, ...], pooling: Pooling | None = None) -> Submit:
    """A request for the vectors of `inputs`, each a user's message of texts and images."""
    turns = [("user", parts) for parts in inputs]
    made = conversation(request_id, *turns)
    return Submit(
        request_id,
        (),
        made.images,
        SamplingParams(),
        made.videos,
        pooling=pooling or Pooling(),
        inputs=tuple(
            PoolingInput((message,), param=f"input[{i}]") for i, message in enumerate(made.messages)
        ),
    )


def rows_of(vectors: Vectors) -> Rows:
    """(vectors, dimensions)."""
    return np.frombuffer(vectors.data, dtype="<f4").reshape(-1, vectors.dimensions)


def vectors_of(engine: EngineHarness, submit: Submit) -> list[Rows]:
    """The vectors of a request's inputs, after it has run to its end."""
    end = engine.finish(submit)
    return [rows_of(each) for each in end.vectors]


def mlx_vlms(family: str, loaded: LoadedModel) -> tuple[Any, MultimodalPreparer]:
    """mlx-vlm's own module of a tiny checkpoint, in float32, and a preparer with its processor."""
    folder = cached(family)
    config = {**load_config(folder), "model_type": loaded.family.name}
    model = load_encoder_model(folder, model_remapping={}, config=config)
    pooling = read_pooling_config(folder)
    if pooling is not None:
        model.pooling_config = pooling
    model.set_dtype(mx.float32)
    spec = loaded.spec
    if spec.reads_images:
        with view_of(folder, as_processors(config, loaded.family)) as view:
            processor = load_processor(view, add_detokenizer=False)
        if loaded.family.fix is not None:
            loaded.family.fix(model, processor, {})
        its_own = ModelProcessor(processor, spec.image_token_id, spec.stand_in)
        spec = replace(spec, process_image=its_own.image, process_video=its_own.video)
    return model, new_preparer(replace(loaded, spec=spec))


def mlx_vlms_vectors(model: Any, prompt: PreparedPrompt, inputs: dict[str, NDArray[Any]]) -> Rows:
    """The vectors of one prompt, by one call of mlx-vlm's model with the pixels of its media."""
    token_ids = mx.array(prompt.token_ids)[None]
    arrays = {name: mx.array(array) for name, array in inputs.items()}
    output = model(input_ids=token_ids, attention_mask=mx.ones_like(token_ids), **arrays)
    vectors = output.text_embeds.astype(mx.float32)
    mx.eval(vectors)
    rows = np.array(vectors)
    return rows.reshape(-1, rows.shape[-1])
