"""The cost of preparing a request is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_field

from tests.integration.harness import Load, ask, new_preparer, prompt_of
from tests.support.image_files import submitted
from tests.support.images import random_image
from vlm_server.errors import ContextLengthExceeded, InvalidImage


def test_images_beyond_context_are_not_even_decoded(load_tiny: Load):
    loaded, whole = load_tiny("qwen3_vl")
    good = submitted(random_image(1))
    (span,) = prompt_of(whole, ask("one", good)).spans
    broken = replace_field(good, data=good.data[:60], param="messages[0].content[2]")
    host = replace(loaded.spec, context_tokens=2 * (span.end - span.start))
    limited = replace(loaded, spec=host)
    preparer = new_preparer(limited)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is"):
        prompt_of(preparer, ask("three", good, good, broken))
    with pytest.raises(InvalidImage):
        prompt_of(preparer, ask("two", good, broken))
