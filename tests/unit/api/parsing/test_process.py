"""The parsing process answers each job, and imports little: it starts anew after each kill."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.api.requests import chat, image_part, user
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
    """The message of a job with `body`, as the process receives it."""
    return bytearray(b"".join(with_body(job, bytearray(body)).parts))


def test_parse_job_is_separated_from_its_body() -> None:
    message = sent(b"body")
    assert take_job(message) == JOB
    assert message == b"body"


def test_parsing_process_returns_parsed_request() -> None:
    body = json.dumps(chat(user(image_part(), image_part()), n=3, stream=True)).encode()
    request, answering = decode_outcome(parsing_process.answer(sent(body)))
    assert request.submit.request_id == "chatcmpl-1"
    assert (answering.num_images, answering.num_choices, answering.stream) == (2, 3, True)
    assert request.shape == answering.shape


def test_parsing_process_returns_error_of_bad_request() -> None:
    body = json.dumps(chat(user(image_part("data:;base64,AAAA")))).encode()
    with pytest.raises(InvalidImage) as caught:
        decode_outcome(parsing_process.answer(sent(body)))
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("url", ["https://x/\\ud800", "file:///\\ud800", "\\ud800"])
def test_url_with_lone_surrogate_is_bad_request(url: str) -> None:
    body = json.dumps(chat(user(image_part("URL")))).replace("URL", url).encode()
    with pytest.raises(InvalidRequest):
        decode_outcome(parsing_process.answer(sent(body)))


def test_internal_error_does_not_end_parsing_process() -> None:
    with pytest.raises(InternalError):
        decode_outcome(parsing_process.answer(sent(b"{}", ParsingJob("no dialect", JOB.context))))


def test_parsing_process_imports_little() -> None:
    names = "['asyncio', 'starlette', 'anyio', 'numpy', 'mlx', 'uvicorn', 'ssl']"
    shown = f"print([name for name in {names} if name in sys.modules])"
    code = f"import sys, vlm_server.api.parsing.process; {shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
