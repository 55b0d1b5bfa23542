"""A request to token ids and pixel arrays. Knows the processor; keeps no mlx array.

Each picture is processed alone, so that what is made of it depends on nothing else in the
request: the processor sees the placeholder and one picture, and says which tokens stand for
it. The whole prompt is tokenized with one image token a picture, then those are expanded.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import prepare_inputs
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidImage,
)
from vlm_server.ports import ImageSpan, PreparedPrompt
from vlm_server.protocol import Image, Submit
from vlm_server.runner.images import decode_rgb
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.prompt_tokenizer import PromptTokenizer

_NOT_OF_THE_IMAGE = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@dataclass(frozen=True, slots=True)
class _ProcessedImage:
    """`token_ids` from the first to the last image token, and the text around them."""

    token_ids: NDArray[np.int32]
    prefix: str
    suffix: str
    inputs: dict[str, NDArray[Any]]


class MultimodalPreparer:
    """The `Preparer` of one loaded model. Thread-safe: the processor is locked."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._prompts = PromptTokenizer(loaded)

    def prepare(self, submit: Submit) -> PreparedPrompt:
        """Token ids with each picture's span, and each picture's arrays.

        Raises InvalidImage for a picture that can't be read, ContextLengthExceeded for more
        pictures than fit, and what `PromptTokenizer.tokenize` does.
        """
        processed = self._process_all(submit.images)
        surroundings = [(image.prefix, image.suffix) for image in processed]
        token_ids = self._prompts.tokenize(submit.messages, surroundings)
        return self._expand(token_ids, submit.images, processed)

    def _process_all(self, images: tuple[Image, ...]) -> list[_ProcessedImage]:
        """One picture after the other, so that no two are in memory decoded."""
        processed: list[_ProcessedImage] = []
        num_tokens, limit = 0, self._loaded.context_tokens
        for image in images:
            picture = decode_rgb(image)
            with self._lock:
                processed.append(self._process(image, picture))
            num_tokens += len(processed[-1].token_ids)
            if num_tokens >= limit:
                raise ContextLengthExceeded(
                    f"the pictures up to this one have {num_tokens} tokens; "
                    f"this model's context holds {limit}",
                    image.param,
                )
        return processed

    def _process(self, image: Image, picture: PillowImage.Image) -> _ProcessedImage:
        """The processor's work on one picture."""
        loaded = self._loaded
        try:
            made = prepare_inputs(
                loaded.processor,
                images=[picture],
                prompts=self._prompts.placeholder,
                image_token_index=loaded.image_token_id,
            )
        except Exception as error:
            size = f"{image.width}x{image.height}"
            raise InvalidImage(
                f"the model's processor can't take this picture of {size} pixels", image.param
            ) from error
        token_ids = np.array(made["input_ids"], dtype=np.int32).reshape(-1)
        places = np.flatnonzero(token_ids == loaded.image_token_id)
        if not len(places):
            raise InvalidImage("the model's processor made nothing of this picture", image.param)
        first, last = int(places[0]), int(places[-1]) + 1
        return _ProcessedImage(
            token_ids=token_ids[first:last],
            prefix=self._text_of(token_ids[:first]),
            suffix=self._text_of(token_ids[last:]),
            inputs={
                key: np.array(value)
                for key, value in made.items()
                if isinstance(value, mx.array) and key not in _NOT_OF_THE_IMAGE
            },
        )

    def _text_of(self, token_ids: NDArray[np.int32]) -> str:
        kept = [int(i) for i in token_ids if int(i) != self._loaded.tokenizer.bos_token_id]
        return str(self._loaded.backend.decode(kept, skip_special_tokens=False))

    def _expand(
        self, token_ids: list[int], images: tuple[Image, ...], processed: list[_ProcessedImage]
    ) -> PreparedPrompt:
        """Replace each image token by its picture's tokens, and note the spans."""
        ids = np.array(token_ids, dtype=np.int32)
        places = np.flatnonzero(ids == self._loaded.image_token_id)
        if len(places) != len(images):
            raise InternalError(f"{len(images)} pictures have {len(places)} places in the prompt")
        pieces, spans, cursor, length = [], [], 0, 0
        for place, image, made in zip(places, images, processed, strict=True):
            text = ids[cursor:place]
            start = length + len(text)
            cursor, length = int(place) + 1, start + len(made.token_ids)
            pieces += [text, made.token_ids]
            spans.append(ImageSpan(start, length, image.mm_hash, made.inputs))
        return PreparedPrompt(np.concatenate([*pieces, ids[cursor:]]), tuple(spans))
