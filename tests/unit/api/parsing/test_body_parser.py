"""Bodies of several API keys, parsed by few processes."""

from __future__ import annotations

import asyncio
import json

from msgspec import structs

from tests.support.image_files import data_url, image_file
from tests.unit.api.conftest import parsing_pool
from tests.unit.api.parsing.test_process import JOB
from tests.unit.api.requests import chat, image_part, user
from vlm_server.api.dialects.openai import parse
from vlm_server.api.parsing.body_parser import BodyParser
from vlm_server.settings import Limits


async def test_body_does_not_wait_for_all_of_another_key() -> None:
    parser, ended = BodyParser(parsing_pool(), Limits()), list[str]()
    small = json.dumps(chat(user(image_part()))).encode()
    picture = data_url(image_file("PNG") + bytes(3 << 20))  # bytes behind the picture are ignored
    large = json.dumps(chat(user(image_part(picture)))).encode()

    async def ask(owner: str, body: bytes) -> None:
        context = structs.replace(JOB.context, owner=owner)
        await parser.parse(parse.DIALECT, lambda *_: None, bytearray(body), context)
        ended.append(owner)

    await asyncio.gather(*(ask("many", large) for _ in range(20)), ask("one", small))
    assert ended.index("one") <= 4, ended
    assert len(ended) == 21
