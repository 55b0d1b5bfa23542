"""Messages and parts reach the engine, or are refused by their path."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import video_files
from tests.support.image_files import data_url, image_file
from tests.unit.api.conftest import Connect
from tests.unit.api.requests import PNG_URL, ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.protocol import ImagePart, Message, TextPart, VideoPart
from vlm_server.settings import Limits, Settings

VIDEO = video_files.encode(video_files.noise(1, 3))
ECHOED = {
    "role": "assistant",
    "content": "A cat.",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}


async def refusal(
    client: httpx.AsyncClient, *messages: dict[str, Any], status: int = 400
) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=chat(*messages))
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_conversation_reaches_engine_in_order(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    jpeg = data_url(image_file("JPEG", (8, 6)))
    answer = await client.post(
        ROUTE,
        json=chat(
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [text("Be kind.")]},
            user(text("Look:"), image_part(PNG_URL), text("What?")),
            ECHOED,
            user(image_part(jpeg), image_part(PNG_URL)),
        ),
    )
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    assert submit.messages == (
        Message("system", (TextPart("Be brief."),)),
        Message("system", (TextPart("Be kind."),)),
        Message("user", (TextPart("Look:"), ImagePart(0), TextPart("What?"))),
        Message("assistant", (TextPart("A cat."),)),
        Message("user", (ImagePart(1), ImagePart(2))),
    )
    assert [(image.format, image.param) for image in submit.images] == [
        ("PNG", "messages[2].content[1]"),
        ("JPEG", "messages[4].content[0]"),
        ("PNG", "messages[4].content[1]"),
    ]
    assert (
        submit.images[0].content_hash
        == submit.images[2].content_hash
        != submit.images[1].content_hash
    )


@pytest.mark.parametrize(
    "image_url",
    [
        PNG_URL,
        {"url": PNG_URL},
        *({"url": PNG_URL, "detail": d} for d in ("auto", "low", "high", "original")),
    ],
)
async def test_chat_accepts_both_spellings_of_image(
    client: httpx.AsyncClient, engine: ScriptedEngine, image_url: Any
) -> None:
    part = {"type": "image_url", "image_url": image_url}
    assert (await client.post(ROUTE, json=chat(user(part)))).status_code == 200
    (image,) = engine.submitted[0].images
    is_low = isinstance(image_url, dict) and image_url.get("detail") == "low"
    assert image.max_side_pixels == (512 if is_low else None)
    is_high = isinstance(image_url, dict) and image_url.get("detail") in ("high", "original")
    assert image.for_grounding == is_high


async def test_pixel_limits_hold_for_every_image(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    limits = {"min_pixels": 1000, "max_pixels": 4000}
    body = chat(user(image_part(), image_part()), user(image_part()), mm_processor_kwargs=limits)
    assert (await client.post(ROUTE, json=body)).status_code == 200
    (submit,) = engine.submitted
    assert [(i.min_pixels, i.max_pixels) for i in submit.images] == [(1000, 4000)] * 3


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"min_pixels": 5, "max_pixels": 4}, "mm_processor_kwargs.min_pixels"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"min_pixels": 1.5}, "mm_processor_kwargs.min_pixels"),
        ({"do_resize": False}, "mm_processor_kwargs.do_resize"),
    ],
    ids=str,
)
async def test_contradictory_pixel_limits_are_refused(
    client: httpx.AsyncClient, limits: dict[str, Any], param: str
) -> None:
    answer = await client.post(ROUTE, json=chat(user(image_part()), mm_processor_kwargs=limits))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("as_object", [True, False])
async def test_video_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, as_object: bool
) -> None:
    url = video_files.data_url(VIDEO)
    part = {"type": "video_url", "video_url": {"url": url} if as_object else url}
    answer = await client.post(ROUTE, json=chat(user(image_part(), part, text("What?"))))
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    content = (ImagePart(0), VideoPart(0), TextPart("What?"))
    assert submit.messages == (Message("user", content),)
    (video,) = submit.videos
    assert (video.data, video.format) == (VIDEO, "MP4")
    assert video.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"video_url": {"url": "rtsp://127.0.0.1/"}}, "messages[0].content[1]", "invalid_video"),
        ({"video_url": {"url": PNG_URL}}, "messages[0].content[1]", "invalid_video"),
        ({"video_url": {}}, "messages[0].content[1].video_url.url", "invalid_value"),
    ],
)
async def test_bad_video_is_refused_by_its_path(
    client: httpx.AsyncClient, engine: ScriptedEngine, part: dict[str, Any], param: str, code: str
) -> None:
    error = await refusal(client, user(text(), {"type": "video_url", **part}))
    assert (error["param"], error["code"]) == (param, code), error
    assert engine.submitted == []


async def test_videos_are_refused_outside_user_messages(client: httpx.AsyncClient) -> None:
    part = {"type": "video_url", "video_url": video_files.data_url(VIDEO)}
    error = await refusal(client, user("hi"), {"role": "assistant", "content": [part]}, user("?"))
    assert (error["param"], error["code"]) == ("messages[1].content[0]", "invalid_value")


async def test_number_of_videos_is_limited(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_videos=1)))
    part = {"type": "video_url", "video_url": video_files.data_url(VIDEO)}
    error = await refusal(client, user(part, part))
    assert error["param"] == "messages"
    assert "1 videos" in error["message"]
    assert (await client.post(ROUTE, json=chat(user(part)))).status_code == 200


@pytest.mark.parametrize(
    "words",
    [
        "",
        " ",
        "<|image_pad|>",
        "<|im_start|>system",
        "<image>",
        "\0",
        "🦊 é \U0010ffff",
        "x" * 10_000,
    ],
)
async def test_text_reaches_engine_verbatim(
    client: httpx.AsyncClient, engine: ScriptedEngine, words: str
) -> None:
    assert (await client.post(ROUTE, json=chat(user(words)))).status_code == 200
    assert engine.submitted[0].messages[0].content == (TextPart(words),)


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({}, "messages[1].role", "invalid_value"),
        ({"role": "user"}, "messages[1].content", "invalid_value"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", "invalid_value"),
        ({"role": "function", "content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": "robot", "content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": 1, "content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": "user", "content": None}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": 5}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": text()}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": []}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]", "invalid_value"),
        ({**user("x"), "name": 5}, "messages[1].name", "invalid_value"),
        ({**ECHOED, "tool_calls": [{}]}, "messages[1].tool_calls[0].id", "invalid_value"),
        ({**ECHOED, "refusal": 5}, "messages[1].refusal", "invalid_value"),
        ({**ECHOED, "function_call": {}}, "messages[1].function_call", "unsupported_parameter"),
        ({**ECHOED, "audio": {"id": "x"}}, "messages[1].audio", "unsupported_parameter"),
        (user({"type": "text"}), "messages[1].content[0].text", "invalid_value"),
        (user({"text": "x"}), "messages[1].content[0].type", "invalid_value"),
        (user({"type": "clip"}), "messages[1].content[0].type", "invalid_value"),
        (user({"type": "video"}), "messages[1].content[0].video", "invalid_value"),
        (user({"type": "input_audio"}), "messages[1].content[0].type", "invalid_value"),
        (
            user({"type": "image_url", "image_url": {"url": PNG_URL, "detail": "huge"}}),
            "messages[1].content[0].image_url.detail",
            "invalid_value",
        ),
        (
            user({"type": "image_url", "image_url": {}}),
            "messages[1].content[0].image_url.url",
            "invalid_value",
        ),
        (
            user({"type": "image_url", "image_url": 5}),
            "messages[1].content[0].image_url",
            "invalid_value",
        ),
        (
            {"role": "system", "content": [text(), image_part()]},
            "messages[1].content[1]",
            "invalid_value",
        ),
        (
            {"role": "assistant", "content": [image_part()]},
            "messages[1].content[0]",
            "invalid_value",
        ),
    ],
)
async def test_bad_messages_are_refused_by_their_path(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    message: dict[str, Any],
    param: str,
    code: str,
) -> None:
    error = await refusal(client, user("hi"), message, user("so?"))
    assert (error["param"], error["code"]) == (param, code), error
    assert engine.submitted == []


async def test_conversation_without_user_is_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, ECHOED, {"role": "system", "content": "x"})
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,!!!!",
        "data:image/png;base64,QUJDRA==",
        "data:image/svg+xml;base64,PHN2Zy8+",
        "https://127.0.0.1/secret.png",
        "file:///etc/passwd",
        "/etc/passwd",
        PNG_URL[:80],
        "",
    ],
)
async def test_bad_image_is_refused_and_next_request_succeeds(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    error = await refusal(client, user(image_part()), user(text(), image_part(url)))
    assert (error["param"], error["code"]) == ("messages[1].content[1]", "invalid_image")
    assert "passwd" not in error["message"]
    assert engine.submitted == []
    assert (await client.post(ROUTE, json=chat(user(image_part())))).status_code == 200


async def test_chat_messages_obey_limits(connect: Connect) -> None:
    limits = Limits(max_messages=3, max_parts=4, max_images=1, max_text_bytes=10)
    client = connect(Settings(limits=limits))
    assert (await refusal(client, *[user("x")] * 4))["message"].startswith("At most 3 messages")
    assert (await refusal(client, user(*[text("x")] * 5)))["message"].startswith("At most 4 parts")
    assert (await refusal(client, user(image_part(), image_part())))["message"].startswith(
        "At most 1 images"
    )
    assert (await refusal(client, user("é" * 5), user("x")))["message"].startswith(
        "At most 10 bytes"
    )
    assert (await client.post(ROUTE, json=chat(user("é" * 5)))).status_code == 200


async def test_too_many_parts_and_ten_megabytes_of_text_are_refused(
    client: httpx.AsyncClient,
) -> None:
    assert "images" in (await refusal(client, user(*[image_part()] * 1000)))["message"]
    assert "parts" in (await refusal(client, user(*[text()] * 10_000)))["message"]
    assert "text" in (await refusal(client, user("x" * 10_000_000)))["message"]


async def test_large_image_is_413_and_names_its_part(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_image_bytes=20)))
    error = await refusal(client, user(text(), image_part()), status=413)
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "payload_too_large")


async def test_unknown_fields_of_messages_are_ignored_and_reported(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    echoed = {**ECHOED, "parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}}
    url = {"url": PNG_URL, "max_pixels": 9}
    messages = [
        {**user({**text(), "cache_control": {"type": "ephemeral"}}), "name": "Bob"},
        {**echoed, "annotations": [{"type": "url_citation"}], "name": "critic"},
        user({"type": "image_url", "image_url": url, "uuid": None}),
    ]
    answer = await client.post(ROUTE, json=chat(*messages))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-vlm-ignored"].split(", ") == [
        "messages[].content[].cache_control",
        "messages[].annotations",
        "messages[].parsed",
        "messages[].provider_specific_fields",
        "messages[].content[].image_url.max_pixels",
        "messages[].name",
    ]
    assert engine.submitted[0].messages == (
        Message("user", (TextPart("What is this?"),)),
        Message("assistant", (TextPart("A cat."),)),
        Message("user", (ImagePart(0),)),
    )


async def test_plain_answers_in_history_have_no_ignored_fields(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(ROUTE, json=chat(user("hi"), ECHOED, user("so?")))
    assert "x-vlm-ignored" not in answer.headers


async def test_refusals_in_history_are_assistant_text(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    as_field = {"role": "assistant", "content": None, "refusal": "No."}
    as_part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    await client.post(ROUTE, json=chat(user("hi"), as_field, as_part, user("so?")))
    refused_answer = Message("assistant", (TextPart("No."),))
    assert engine.submitted[0].messages[1:3] == (refused_answer, refused_answer)


async def test_continue_final_message_continues_assistant(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    error = await refusal(client, user("hi"), ECHOED)
    assert error["param"] == "messages[1]"
    assert "continue_final_message" in error["message"]
    for fields in ({}, {"add_generation_prompt": False}):
        body = chat(user("hi"), ECHOED, continue_final_message=True, **fields)
        assert (await client.post(ROUTE, json=body)).status_code == 200
        assert engine.submitted[-1].template.continue_final


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([user("hi")], {}, "continue_final_message"),
        ([user("hi"), ECHOED], {"add_generation_prompt": True}, "continue_final_message"),
        (
            [user("hi"), ECHOED],
            {"response_format": {"type": "json_object"}},
            "continue_final_message",
        ),
        (
            [user("hi")],
            {"continue_final_message": False, "add_generation_prompt": False},
            "add_generation_prompt",
        ),
    ],
)
async def test_continue_final_message_needs_assistant_text(
    client: httpx.AsyncClient, messages: list[Any], fields: dict[str, Any], param: str
) -> None:
    body = chat(*messages, **{"continue_final_message": True, **fields})
    answer = await client.post(ROUTE, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x18ftypmif1\0\0\0\0", "HEIF"),
        (b"\xff\x0axxxxxxxx", "JPEG XL"),
        (b"%PDF-1.7 xxxx", "PDF"),
        (b"<svg xmlns=''/>", "SVG"),
        (b"II+\0xxxxxxxx", "BigTIFF"),
    ],
)
async def test_error_names_format_sent_as_image(
    client: httpx.AsyncClient, data: bytes, name: str
) -> None:
    error = await refusal(client, user(image_part(data_url(data))))
    assert error["code"] == "invalid_image"
    assert f"It looks like {name}." in error["message"]


async def test_limit_errors_name_their_setting(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_images=1)))
    error = await refusal(client, user(image_part(), image_part()))
    assert "limits.max_images" in error["message"]
