"""Which requests ask about the same of the device, and how that is told to a client."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.supervisor.requests import LONG, SCREENSHOT, ask
from vlm_server.protocol import Message, SamplingParams, Submit, TemplateOptions, ToolCall, Tools
from vlm_server.supervisor.shape import (
    DiskReadLoad,
    EncoderLoad,
    PrefillLoad,
    RequestShape,
    shape_of,
)


def with_pixels(request: Submit, **limits: int) -> Submit:
    images = tuple(replace(image, **limits) for image in request.images)
    return replace(request, images=images)


def test_images_count_at_their_requested_size() -> None:
    large, small = ask("a", "", (2048, 2048)), ask("b", "", (512, 512))
    assert shape_of(with_pixels(large, max_pixels=512 * 512)) == shape_of(small)
    assert shape_of(with_pixels(small, min_pixels=2048 * 2048)) == shape_of(large)
    assert shape_of(with_pixels(small, max_pixels=2048 * 2048)) == shape_of(small)


def test_count_only_request_has_empty_shape() -> None:
    assert shape_of(replace(ask("a", LONG, SCREENSHOT), count_only=True)) == RequestShape()


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": LONG},
        {"prompt": (7,) * 12_500},
        {"tools": Tools(LONG)},
        {"sampling": SamplingParams(json_schema=LONG)},
        {"template": TemplateOptions(variables=LONG)},
        {"prediction": LONG},
        {"messages": (Message("assistant", (), reasoning=LONG),)},
        {"messages": (Message("assistant", (), tool_calls=(ToolCall("id", "a", LONG),)),)},
        {"messages": (Message("assistant", (), tool_calls=(ToolCall("id", LONG, ""),)),)},
        {"messages": (Message("tool", (), name=LONG),)},
        {"messages": (Message("tool", (), tool_call_id=LONG),)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_text_counts_equally_in_every_request_field(more: dict[str, Any]) -> None:
    request = Submit("a", (), (), SamplingParams())
    assert shape_of(replace(request, **more)) == shape_of(ask("b", LONG)) != RequestShape()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ask("a", "What?", SCREENSHOT), ask("b", "What is this, then?", (1921, 1080))),
        (ask("a", "", (2048, 2048)), ask("b", "", (2049, 2047))),
        (ask("a", "", (4096, 4096)), ask("b", "", (4095, 4095))),
        (ask("a", LONG), ask("b", LONG + "more")),
        (ask("a", "", *[SCREENSHOT] * 20), ask("b", "", *[SCREENSHOT] * 21)),
        (ask("a", video_bytes=(70_000,)), ask("b", video_bytes=(30_000, 39_000))),
        (ask("a", "", (4000, 4000), max_side=512), ask("b", "", (512, 512))),
    ],
)
def test_requests_of_similar_cost_have_same_shape(one: Submit, other: Submit) -> None:
    assert shape_of(one) == shape_of(other) != RequestShape()


@pytest.mark.parametrize(
    "other",
    [
        ask("b", "What?", (960, 540)),
        ask("b", "What?", SCREENSHOT, max_side=512),
        ask("b", "What?", *[SCREENSHOT] * 3),
        ask("b", "What?", SCREENSHOT, n=8),
        ask("b", LONG, SCREENSHOT),
        ask("b", "What?", SCREENSHOT, video_bytes=(100_000,)),
        ask("b", "What?", *[(240, 270)] * 32),
        ask("b", "What?", (1080, 1920)),
        ask("b", "What?", (20_736, 100)),
    ],
)
def test_requests_of_different_cost_have_different_shapes(other: Submit) -> None:
    assert shape_of(other) != shape_of(ask("a", "What?", SCREENSHOT))


def test_encode_load_counts_one_image_and_prefill_load_all() -> None:
    one, many = shape_of(ask("a", "", SCREENSHOT)), shape_of(ask("b", "", *[SCREENSHOT] * 8))
    assert one.encoding == many.encoding == EncoderLoad(2048, 1024, 0)
    assert one.prefilling == PrefillLoad(2 << 20, 0, 0, 1)
    assert many.prefilling == PrefillLoad(16 << 20, 0, 0, 1)


def test_small_text_has_no_load_and_small_image_has_all() -> None:
    assert shape_of(ask("a", "x" * 16_000)) == RequestShape()
    assert shape_of(ask("a", "x" * 2_000, n=8)) == RequestShape()
    assert shape_of(ask("a", "x" * 3_000, n=8)) != RequestShape()
    text, image = PrefillLoad(0, 0, 65536, 1), PrefillLoad(1, 0, 0, 1)
    assert shape_of(ask("a", LONG)) == RequestShape(None, text, DiskReadLoad(text))
    assert shape_of(ask("a", "", (1, 1))) == RequestShape(
        EncoderLoad(1, 1, 0), image, DiskReadLoad(image)
    )


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (ask("a", LONG), ["about 65,536 characters of text"]),
        (ask("a", LONG, n=8), ["65,536 characters", "8 choices"]),
        (ask("a", video_bytes=(65_536,)), ["videos of about 65,536 bytes"]),
        (ask("a", "", SCREENSHOT), ["2048 x 1024 pixels", "2,097,152 pixels"]),
    ],
)
def test_load_descriptions_name_only_nonzero_amounts(submit: Submit, words: list[str]) -> None:
    told = "; ".join(map(str, shape_of(submit).loads))
    assert [word for word in words if word not in told] == []
    assert "0 " not in told.replace("65,536 ", "").replace("2048 x", "")
