"""What a process makes of a job; it imports little, since it starts anew after each kill."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.api.requests import chat, picture, user
from vlm_server.api.parsing import process as parsing_process
from vlm_server.api.parsing.parsed_request import (
    Context,
    KnownModel,
    ParsingJob,
    decode_outcome,
    take_job,
    with_body,
)
from vlm_server.errors import InternalError, InvalidImage, InvalidRequest
from vlm_server.settings import Limits

JOB = ParsingJob("openai", Context((KnownModel("demo"),), "chatcmpl-1", "", "", Limits()))


def sent(body: bytes, job: ParsingJob = JOB) -> bytearray:
    """As it arrives in the process."""
    return bytearray(b"".join(with_body(job, bytearray(body)).parts))


def test_a_job_is_told_from_its_body() -> None:
    message = sent(b"body")
    assert take_job(message) == JOB
    assert message == b"body"


def test_a_request_is_answered_by_what_the_front_has_to_know() -> None:
    body = json.dumps(chat(user(picture(), picture()), n=3, stream=True)).encode()
    request, answering = decode_outcome(parsing_process.answer(sent(body)))
    assert request.submit.request_id == "chatcmpl-1"
    assert (answering.num_images, answering.num_choices, answering.stream) == (2, 3, True)
    assert request.shape == answering.shape


def test_a_bad_request_is_answered_by_its_error() -> None:
    body = json.dumps(chat(user(picture("data:;base64,AAAA")))).encode()
    with pytest.raises(InvalidImage) as caught:
        decode_outcome(parsing_process.answer(sent(body)))
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("url", ["https://x/\\ud800", "file:///\\ud800", "\\ud800"])
def test_a_url_with_half_a_character_is_a_bad_request(url: str) -> None:
    body = json.dumps(chat(user(picture("URL")))).replace("URL", url).encode()
    with pytest.raises(InvalidRequest):
        decode_outcome(parsing_process.answer(sent(body)))


def test_a_mistake_of_ours_ends_no_process() -> None:
    with pytest.raises(InternalError):
        decode_outcome(parsing_process.answer(sent(b"{}", ParsingJob("no dialect", JOB.context))))


def test_the_process_imports_little() -> None:
    names = "['asyncio', 'starlette', 'anyio', 'numpy', 'mlx', 'uvicorn', 'ssl']"
    shown = f"print([name for name in {names} if name in sys.modules])"
    code = f"import sys, vlm_server.api.parsing.process; {shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
