"""Uploaded files over HTTP: both dialects' routes, media by hash, and names in requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.image_files import data_url, image_file
from tests.support.video_files import encode, greys
from tests.unit.api.conftest import Connect
from tests.unit.api.dialects.responses.requests import asking
from tests.unit.api.requests import ROUTE, bearer, chat, image_part, result, text, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import FileSettings, Limits, Server, Settings

PNG = image_file("PNG", (5, 4))
JPEG = image_file("JPEG", (8, 8))
NAME = f"sha256:{hashlib.sha256(PNG).hexdigest()}"
THEIRS = {"anthropic-version": "2023-06-01", "anthropic-beta": "files-api-2025-04-14"}
KEYS = ("the-first-key", "the-second-key")


async def upload(client: httpx.AsyncClient, data: bytes = PNG, **fields: Any) -> dict[str, Any]:
    answer = await client.post(
        "/v1/files", files={"file": ("a.png", data)}, data={"purpose": "vision", **fields}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def put(client: httpx.AsyncClient, data: bytes = PNG, **headers: str) -> str:
    answer = await client.put("/v1/media", content=data, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


# ---- OpenAI's routes -------------------------------------------------------------------


async def test_file_is_created_listed_retrieved_read_and_deleted(client: httpx.AsyncClient) -> None:
    file = await upload(client)
    assert file.pop("created_at") > 1.7e9
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(PNG),
        "expires_at": None,
        "filename": "a.png",
        "purpose": "vision",
        "status": "processed",
    }
    path = f"/v1/files/{file['id']}"
    listed = (await client.get("/v1/files")).json()
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert [each["id"] for each in listed["data"]] == [file["id"]]
    assert (await client.get(path)).json()["bytes"] == len(PNG)
    content = await client.get(f"{path}/content")
    assert content.content == PNG
    assert content.headers["content-type"] == "application/octet-stream"
    assert content.headers["content-disposition"] == "attachment"
    head = await client.head(f"{path}/content")
    assert (head.content, head.headers["content-length"]) == (b"", str(len(PNG)))
    deleted = await client.delete(path)
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    for gone in (client.get(path), client.get(f"{path}/content"), client.delete(path)):
        answer = await gone
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_list_is_filtered_and_paged(client: httpx.AsyncClient) -> None:
    ids = [(await upload(client, b"%d" % i))["id"] for i in range(5)]
    batch = await upload(client, b"{}\n", purpose="batch")
    await put(client)
    query = {"purpose": "vision", "limit": "2", "order": "asc"}
    first = (await client.get("/v1/files", params=query)).json()
    assert [file["id"] for file in first["data"]] == ids[:2]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[0], ids[1], True)
    rest = (await client.get("/v1/files", params={"after": ids[1], "order": "asc"})).json()
    assert [file["id"] for file in rest["data"]] == [*ids[2:], batch["id"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=file-0", "after"),
    ],
)
async def test_wrong_query_is_refused(client: httpx.AsyncClient, query: str, param: str) -> None:
    answer = await client.get(f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_client_sets_expiry_of_file(client: httpx.AsyncClient) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = await upload(client, **expiry)
    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "vision", "expires_after[seconds]": "3600"}, "expires_after"),
        (
            {
                "purpose": "vision",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "1",
            },
            "expires_after[seconds]",
        ),
        ({"purpose": "vision", "colour": "red"}, "colour"),
    ],
)
async def test_wrong_field_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, str], param: str
) -> None:
    answer = await client.post("/v1/files", files={"file": ("a.png", PNG)}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.get("/v1/files")).json()["data"] == []


# ---- forms -----------------------------------------------------------------------------


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value


VISION, FILE = part("purpose", b"vision"), part("file", PNG, "a.png")
FORM_TYPE = "multipart/form-data; boundary=b"


async def test_fields_may_follow_file(client: httpx.AsyncClient) -> None:
    headers = {"content-type": FORM_TYPE}
    answer = await client.post("/v1/files", content=form(FILE, VISION), headers=headers)
    assert answer.json()["bytes"] == len(PNG)


async def test_file_needs_no_filename(client: httpx.AsyncClient) -> None:
    headers, body = {"content-type": FORM_TYPE}, form(VISION, part("file", PNG))
    answer = await client.post("/v1/files", content=body, headers=headers)
    assert (answer.json()["filename"], answer.json()["bytes"]) == ("upload", len(PNG))


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("", form(VISION, FILE), 415),
        ("multipart/form-data", form(VISION, FILE), 400),
        ("multipart/form-data; boundary=" + "b" * 300, form(VISION, FILE), 400),
        (FORM_TYPE, b"", 400),
        (FORM_TYPE, b"nonsense", 400),
        (FORM_TYPE, form(VISION, FILE, end=b""), 400),
        (FORM_TYPE, form(VISION, FILE)[:-8], 400),
        (FORM_TYPE, form(VISION), 400),
        (FORM_TYPE, form(VISION, FILE, FILE), 400),
        (FORM_TYPE, form(VISION, part("picture", PNG, "a.png")), 400),
        (FORM_TYPE, form(VISION, b"X: y\r\n\r\nno name"), 400),
        (FORM_TYPE, form(VISION, b"\r\n\r\nno headers"), 400),
        (FORM_TYPE, form(*[part(f"f{i}", b"x") for i in range(100)], FILE), 400),
        (FORM_TYPE, form(part("purpose", b"v" * 100_000), FILE), 413),
        (FORM_TYPE, form(b"H" * 100_000 + b": x\r\n\r\n", FILE), 400),
        (FORM_TYPE, form(b"".join(b"H: x\r\n" for _ in range(1000)) + b"\r\n", FILE), 400),
    ],
    ids=range(17),
)
async def test_wrong_form_is_refused_and_nothing_is_stored(
    client: httpx.AsyncClient, content_type: str, body: bytes, status: int
) -> None:
    headers = {"content-type": content_type}
    answer = await client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert (await client.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\Windows\\\\a.png", "a.png"),
        ("/", "upload"),
        ("a\tb\x7f.png", "ab.png"),
        ("x" * 1000, "x" * 255),
        ("snowman-☃.png", "snowman-☃.png"),
    ],
)
async def test_filename_is_shown_and_never_opened(
    connect: Connect, tmp_path: Path, sent: str, shown: str
) -> None:
    folder = tmp_path / "files"
    client = connect(Settings(files=FileSettings(folder=str(folder))))
    body, headers = form(VISION, part("file", PNG, sent)), {"content-type": FORM_TYPE}
    answer = await client.post("/v1/files", content=body, headers=headers)
    assert answer.json()["filename"] == shown
    assert not any(shown in path.name for path in folder.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["files"]  # noqa: ASYNC240


async def test_large_upload_is_refused(connect: Connect) -> None:
    client = connect(Settings(files=FileSettings(max_file_bytes=100_000)))
    at_limit, above = b"x" * 100_000, b"x" * 100_001
    assert (await upload(client, at_limit))["bytes"] == 100_000
    answer = await client.post(
        "/v1/files", files={"file": ("a", above)}, data={"purpose": "vision"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
    answer = await client.put("/v1/media", content=b"x" * 1_000_000)
    assert answer.status_code == 413


async def test_server_without_room_for_files_says_so(connect: Connect) -> None:
    client = connect(Settings(files=FileSettings(max_bytes=0)))
    answer = await client.put("/v1/media", content=PNG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_supported")
    assert "files.max_bytes" in answer.json()["error"]["message"]
    assert (await client.head(f"/v1/media/{NAME}")).status_code == 404


# ---- Anthropic's routes ----------------------------------------------------------------


async def test_anthropics_header_chooses_its_dialect(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/files", files={"file": ("a.png", PNG)}, headers=THEIRS)
    file = answer.json()
    assert file.pop("created_at").endswith("Z")
    assert file == {
        "id": file["id"],
        "type": "file",
        "filename": "a.png",
        "mime_type": "image/png",
        "size_bytes": len(PNG),
        "downloadable": True,
    }
    path = f"/v1/files/{file['id']}"
    assert (await client.get(path, headers=THEIRS)).json()["size_bytes"] == len(PNG)
    assert (await client.get(path)).json()["bytes"] == len(PNG)
    assert (await client.get(f"{path}/content", headers=THEIRS)).content == PNG
    deleted = await client.delete(path, headers=THEIRS)
    assert deleted.json() == {"id": file["id"], "type": "file_deleted"}
    missing = await client.get(path, headers=THEIRS)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")
    assert missing.json()["error"]["type"] == "not_found_error"


async def test_anthropics_list_is_paged_both_ways(client: httpx.AsyncClient) -> None:
    ids = [(await upload(client, b"%d" % i))["id"] for i in range(5)][::-1]

    async def page(**query: str) -> tuple[list[str], bool]:
        found = (await client.get("/v1/files", params=query, headers=THEIRS)).json()
        shown = [file["id"] for file in found["data"]]
        assert (found["first_id"], found["last_id"]) == (shown[0], shown[-1])
        return shown, found["has_more"]

    assert await page(limit="2") == (ids[:2], True)
    assert await page(limit="2", after_id=ids[1]) == (ids[2:4], True)
    assert await page(limit="2", after_id=ids[3]) == (ids[4:], False)
    assert await page(limit="2", before_id=ids[3]) == (ids[1:3], True)
    assert await page(limit="2", before_id=ids[2]) == (ids[:2], False)
    both = {"after_id": ids[0], "before_id": ids[1]}
    answer = await client.get("/v1/files", params=both, headers=THEIRS)
    assert answer.status_code == 400


# ---- media -----------------------------------------------------------------------------


async def test_media_are_named_by_hash_of_their_bytes(client: httpx.AsyncClient) -> None:
    assert (await client.head(f"/v1/media/{NAME}")).status_code == 404
    answer = await client.put("/v1/media", content=PNG)
    assert answer.json() == {"id": NAME, "object": "media", "bytes": len(PNG)}
    known = await client.head(f"/v1/media/{NAME}")
    assert (known.status_code, known.headers["content-length"]) == (200, str(len(PNG)))
    assert (await client.get(f"/v1/media/{NAME}")).content == PNG
    assert (await client.get("/v1/files")).json()["data"] == []
    assert (await client.get(f"/v1/files/{NAME}")).status_code == 404


async def test_wrong_media_are_refused(client: httpx.AsyncClient) -> None:
    assert (await client.put("/v1/media", content=b"")).status_code == 400
    assert (await client.put("/v1/media", content=PNG, headers=GZIP)).status_code == 415
    assert (await client.get("/v1/media/picture.png")).status_code == 400


GZIP = {"content-encoding": "gzip"}


# ---- names in requests -----------------------------------------------------------------


def openai_file(name: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": name}}


def body_with(place: str, name: str) -> tuple[str, dict[str, Any]]:
    """A route, and a body with an image by `name`."""
    source = {"type": "file", "file_id": name}
    by_place: dict[str, tuple[str, dict[str, Any]]] = {
        "image_url": (ROUTE, chat(user(text(), image_part(name)))),
        "file": (ROUTE, chat(user(text(), {"type": "file", "file": {"file_id": name}}))),
        "tool result": (ROUTE, chat(user("hi"), result("1", image_part(name)))),
        "source": (
            "/v1/messages",
            {"max_tokens": 9, "messages": [user(text(), {"type": "image", "source": source})]},
        ),
        "image of item": (
            "/v1/responses",
            asking([user({"type": "input_image", "image_url": name})]),
        ),
        "file id of item": (
            "/v1/responses",
            asking([user({"type": "input_image", "file_id": name})]),
        ),
        "file of item": ("/v1/responses", asking([user({"type": "input_file", "file_id": name})])),
        "images": (
            "/api/chat",
            {"stream": False, "messages": [{"role": "user", "content": "hi", "images": [name]}]},
        ),
        "images of prompt": (
            "/api/generate",
            {"stream": False, "prompt": "hi", "images": [name]},
        ),
        "embedding": ("/v1/embeddings", {"input": [{"image": name}]}),
    }
    return by_place[place]


PLACES = (
    *("image_url", "file", "tool result", "source", "image of item", "file id of item"),
    *("file of item", "images", "images of prompt", "embedding"),
)


@pytest.mark.parametrize("by_hash", [True, False], ids=["hash", "id"])
@pytest.mark.parametrize("place", PLACES)
async def test_name_stands_for_bytes_in_every_dialect(
    client: httpx.AsyncClient, engine: ScriptedEngine, place: str, by_hash: bool
) -> None:
    name = await put(client) if by_hash else (await upload(client))["id"]
    route, body = body_with(place, name)
    await client.post(route, json={"model": "demo", **body})
    (image,) = engine.submitted[-1].images
    assert (image.data, image.content_hash) == (PNG, NAME.removeprefix("sha256:"))
    assert (image.width, image.height) == (5, 4)


@pytest.mark.parametrize("name", [NAME, "file-" + "0" * 24, "file-abc", "data:,"], ids=range(4))
@pytest.mark.parametrize("place", PLACES)
async def test_missing_file_is_refused_with_advice(
    client: httpx.AsyncClient, engine: ScriptedEngine, place: str, name: str
) -> None:
    route, body = body_with(place, name)
    answer = await client.post(route, json={"model": "demo", **body})
    assert answer.status_code == 400
    is_id = place in ("file", "source", "file id of item", "file of item")
    if is_id or not name.endswith(("abc", ",")):
        assert "Send its bytes, or upload it again." in answer.text
        if not route.startswith("/api/"):  # Ollama's errors have no code
            assert json.loads(answer.text)["error"]["code"] == "file_not_found"
    assert engine.submitted == []


async def test_video_is_found_by_name(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    clip = encode(greys([1, 2]))
    for part in (
        {"type": "video_url", "video_url": {"url": await put(client, clip)}},
        {"type": "file", "file": {"file_id": (await upload(client, clip))["id"]}},
    ):
        answer = await client.post(ROUTE, json=chat(user(text(), part)))
        assert answer.status_code == 200, answer.text
        (found,) = engine.submitted[-1].videos
        assert (found.data, engine.submitted[-1].images) == (clip, ())


async def test_videos_of_unknown_kind_are_counted(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_videos=1)))
    part = {"type": "file", "file": {"file_id": await put(client, encode(greys([1, 2])))}}
    answer = await client.post(ROUTE, json=chat(user(part, part)))
    assert (answer.status_code, "limits.max_videos" in answer.text) == (400, True)


async def test_named_and_sent_bytes_make_equal_requests(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    name = await put(client)
    for url in (data_url(PNG), name):
        await client.post(ROUTE, json=chat(user(text(), image_part(url), image_part(url))))
    sent, named = engine.submitted
    assert sent.images == named.images
    assert sent.messages == named.messages


async def test_body_of_wrong_kind_is_refused_like_sent_bytes(client: httpx.AsyncClient) -> None:
    answers = []
    for url in (data_url(b"no image"), await put(client, b"no image")):
        answer = await client.post(ROUTE, json=chat(user(image_part(url))))
        answers.append((answer.status_code, answer.json()["error"]))
    assert answers[0] == answers[1]
    assert answers[0][1]["code"] == "invalid_image"


async def test_malformed_hash_is_explained(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, json=chat(user(image_part(NAME.upper().lower()[:-1]))))
    assert answer.status_code == 400
    assert "64 hex digits" in answer.json()["error"]["message"]


async def test_image_beyond_its_limit_is_refused_before_it_is_read(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_image_bytes=len(PNG) - 1)))
    answer = await client.post(ROUTE, json=chat(user(image_part(await put(client)))))
    assert (answer.status_code, "max_image_bytes" in answer.text) == (413, True)


async def test_small_body_can_not_name_more_bytes_than_large_one_has(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_body_bytes=100_000)))
    large = PNG + b"\0" * 40_000
    names = [await put(client, large + b"%d" % i) for i in range(3)]
    for parts in ([names[0]] * 3, names):
        answer = await client.post(ROUTE, json=chat(user(*map(image_part, parts))))
        assert (answer.status_code, "limits.max_body_bytes" in answer.text) == (413, True)
    answer = await client.post(ROUTE, json=chat(user(*map(image_part, names[:2]))))
    assert answer.status_code == 200


async def test_repeated_name_takes_its_bytes_of_waiting_ones(
    connect: Connect, engine: ScriptedEngine
) -> None:
    """A request of 2 kB that names 80 kB ten times waits with 800 kB."""
    limits = Limits(max_body_bytes=1_000_000, max_waiting_bytes=1_000_000)
    client = connect(Settings(limits=limits))
    parts = [image_part(await put(client, PNG + b"\0" * 80_000))] * 10
    step = asyncio.Event()
    engine.script = (step, *engine.script)
    first = asyncio.create_task(client.post(ROUTE, json=chat(user(*parts))))
    await engine.waiting.wait()
    second = await client.post(ROUTE, json=chat(user(*parts)))
    step.set()
    assert (second.status_code, second.json()["error"]["code"]) == (429, "queue_full")
    assert (await first).status_code == 200


async def test_continued_response_finds_file_again(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    item = user({"type": "input_image", "file_id": (await upload(client))["id"]})
    first = (await client.post("/v1/responses", json=asking([item]))).json()
    body = asking([user("and now?")], previous_response_id=first["id"])
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert [image.data for image in engine.submitted[-1].images] == [PNG]
    await client.delete(f"/v1/files/{item['content'][0]['file_id']}")
    answer = await client.post("/v1/responses", json=body)
    assert answer.json()["error"]["code"] == "file_not_found"


# ---- keys ------------------------------------------------------------------------------


@pytest.fixture
def keyed(connect: Connect) -> httpx.AsyncClient:
    return connect(Settings(server=Server(api_keys=KEYS)))


async def test_keys_do_not_learn_of_each_others_files(keyed: httpx.AsyncClient) -> None:
    mine, yours = map(bearer, KEYS)
    keyed.headers.update(mine)
    file, name = await upload(keyed), await put(keyed, JPEG)
    unknown = f"sha256:{'0' * 64}"
    path = f"/v1/files/{file['id']}"
    assert (await keyed.get("/v1/files", headers=yours)).json()["data"] == []
    for method, theirs, nobodys in (
        ("HEAD", f"/v1/media/{name}", f"/v1/media/{unknown}"),
        ("GET", f"/v1/media/{name}", f"/v1/media/{unknown}"),
        ("GET", path, "/v1/files/file-" + "0" * 24),
        ("GET", f"{path}/content", f"/v1/files/file-{'0' * 24}/content"),
        ("DELETE", path, "/v1/files/file-" + "0" * 24),
    ):
        answers = [await keyed.request(method, each, headers=yours) for each in (theirs, nobodys)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].content == answers[1].content
        shown = [
            {key: value for key, value in answer.headers.items() if "request-id" not in key}
            for answer in answers
        ]
        assert shown[0] == shown[1]
    for known in (file["id"], name):
        answer = await keyed.post(ROUTE, json=chat(user(image_part(known))), headers=yours)
        assert answer.json()["error"]["code"] == "file_not_found"
        assert (await keyed.post(ROUTE, json=chat(user(image_part(known))))).status_code == 200


async def test_upload_needs_key(keyed: httpx.AsyncClient) -> None:
    for method, path in (("PUT", "/v1/media"), ("GET", "/v1/files"), ("HEAD", f"/v1/media/{NAME}")):
        assert (await keyed.request(method, path)).status_code == 401


# ---- races -----------------------------------------------------------------------------


async def test_deletion_does_not_hurt_running_request(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    file = await upload(client)
    step = asyncio.Event()
    engine.script = (step, *engine.script)
    asked = asyncio.create_task(client.post(ROUTE, json=chat(user(image_part(file["id"])))))
    await engine.waiting.wait()
    assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 200
    step.set()
    assert (await asked).status_code == 200
    assert engine.submitted[0].images[0].data == PNG


async def test_concurrent_uploads_of_same_bytes_have_one_name(client: httpx.AsyncClient) -> None:
    names = await asyncio.gather(*(put(client) for _ in range(8)))
    assert set(names) == {NAME}
    assert "vlm_server_stored_files 1.0" in (await client.get("/metrics")).text
