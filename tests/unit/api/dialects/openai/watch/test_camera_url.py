"""Cameras at an `https:` URL: followed over real TLS, within the settings, and let go."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.child_pids import children_of
from tests.support.watching import plain, watching
from tests.unit.api.conftest import listening
from tests.unit.api.dialects.openai.watch.test_watch import KEYS, client_of, says, until
from tests.unit.api.http.urls.test_fetch import NAMES
from tests.unit.api.http.urls.tls_server import Serve, TlsServer, page, redirect, tls_server
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.dialects.openai.watch import watches
from vlm_server.api.http.urls.camera_url import CameraUrls
from vlm_server.settings import Server, Settings, Urls, WatchSettings

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=cam\r\n"
    b"Connection: close\r\n\r\n"
)


def shows(*frames: bytes, ends: bool = True) -> Serve:
    """A camera that shows `frames`, each after a moment."""

    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for frame in frames:
            length = b"Content-Length: %d\r\n" % len(frame)
            writer.write(b"--cam\r\nContent-Type: image/jpeg\r\n" + length + b"\r\n" + frame)
            await writer.drain()
            await asyncio.sleep(0.5)
        if not ends:
            await asyncio.sleep(60)

    return serve


@pytest.fixture
async def camera(tmp_path: Path) -> AsyncIterator[TlsServer]:
    async with tls_server(tmp_path, *NAMES) as tls:
        yield tls


@asynccontextmanager
async def serving(
    camera: TlsServer,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...] = ("*",),
    max_cameras: int = 1,
    keys: tuple[str, ...] = (),
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedEngine]]:
    """A server whose cameras are at loopback, and its engine."""
    engine = ScriptedEngine(*says("x"))
    child = "tests.unit.api.http.urls.near_camera_child", str(camera.port), str(camera.certificate)
    make: Callable[[Urls], CameraUrls] = lambda urls: CameraUrls(urls, *child)  # noqa: E731
    monkeypatch.setattr(watches, "CameraUrls", make)
    settings = Settings(
        urls=Urls(https_hosts=hosts, timeout_seconds=3),
        watch=WatchSettings(max_cameras=max_cameras),
        server=Server(api_keys=keys),
    )
    key = keys[0] if keys else ""
    async with listening(engine, settings) as port, client_of(port, key) as client:
        yield client, engine


def body_of(camera: TlsServer, path: str = "/live") -> dict[str, Any]:
    return {"question": "?", "url": f"https://pictures.example:{camera.port}{path}"}


async def test_camera_is_followed_to_its_end(
    camera: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera.pages["/live"] = shows(plain("red"), plain("red"), plain("blue"))
    camera.pages["/moved"] = redirect(f"https://other.example:{camera.port}/live")
    async with (
        serving(camera, monkeypatch) as (client, engine),
        watching(client, **body_of(camera, "/moved")) as watch,
    ):
        assert (await watch.until("answer"))["answer"] == "x"
        engine.script = says("y")
        assert (await watch.until("answer", 2))["answer"] == "y"
        end = await watch.until("end")
    assert end["reason"] == "body_ended"
    assert (end["frames"]["received"], end["frames"]["asked"]) == (3, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
async def test_camera_is_let_go_with_its_client_and_number_is_bounded(
    camera: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera.pages["/live"] = shows(plain("red"), ends=False)
    async with serving(camera, monkeypatch) as (client, _):
        async with watching(client, **body_of(camera)) as watch:
            await watch.until("answer")
            refused = await client.post("/v1/watch", json=body_of(camera))
            assert refused.status_code == 429
            assert len(followers()) == 1
        await until(lambda: not followers())


def followers() -> list[int]:
    """Our processes that follow cameras."""

    def is_follower(pid: int) -> bool:
        try:
            return b"near_camera" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return list(filter(is_follower, children_of(os.getpid())))


async def test_urls_that_may_not_or_can_not_be_followed_are_refused(
    camera: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera.pages["/page"] = page(b"<html>", "Content-Type: text/html")
    camera.pages["/inside"] = redirect("https://169.254.169.254/latest")
    camera.pages["/silent"] = lambda _: asyncio.sleep(60)
    async with serving(camera, monkeypatch) as (client, _):
        for url, part in (
            (body_of(camera, "/page")["url"], "no multipart"),
            (body_of(camera, "/none")["url"], "404"),
            (body_of(camera, "/inside")["url"], "usual port"),
            (body_of(camera, "/silent")["url"], "3 seconds"),
            (f"http://pictures.example:{camera.port}/live", "plain `https:`"),
            ("file:///etc/passwd", "plain `https:`"),
            ("https://pictures.example/\0", "The camera at `url`"),
            ("https://pictures.example:1/" + "x" * 200_000, "The camera at `url`"),
            (f"https://unknown.example:{camera.port}/", "without a public address"),
        ):
            answer = await client.post("/v1/watch", json={"question": "?", "url": url})
            assert answer.status_code == 400, url
            error = answer.json()["error"]
            assert error["param"] == "url"
            assert part in error["message"], (url, error)
    async with serving(camera, monkeypatch, hosts=()) as (client, _):
        answer = await client.post("/v1/watch", json=body_of(camera))
        assert "urls.https_hosts" in answer.json()["error"]["message"]


async def test_key_follows_at_most_half_of_cameras(
    camera: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera.pages["/live"] = shows(plain("red"), ends=False)
    async with serving(camera, monkeypatch, max_cameras=2, keys=KEYS) as (client, _):
        other = {"Authorization": f"Bearer {KEYS[1]}"}
        async with watching(client, **body_of(camera)):
            answer = await client.post("/v1/watch", json=body_of(camera))
            assert (answer.status_code, "watch.max_cameras" in answer.text) == (429, True)
            async with client.stream(
                "POST", "/v1/watch", json=body_of(camera), headers=other
            ) as stream:
                assert stream.status_code == 200
