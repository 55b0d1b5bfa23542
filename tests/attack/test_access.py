"""Access under attack: keys, key files, `https:` and `file:` URLs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.daemons import ADMIN_KEY as ADMIN
from tests.support.daemons import (
    KEYS,
    SCRIPTED,
    Daemon,
    running_daemon,
    wait_until,
    with_settings,
    write_keys,
)
from tests.support.daemons import USER_KEY as USER
from tests.support.image_files import image_file
from tests.unit.api.requests import bearer

CHAT = "/v1/chat/completions"


@dataclass
class Site:
    """A daemon with keys, a folder that clients may read, and a secret next to it.

    Its engine is scripted.
    """

    daemon: Daemon
    keys: Path
    root: Path
    http: httpx.Client

    def post(self, *urls: str, key: str = USER, **fields: Any) -> httpx.Response:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [{"type": "text", "text": "What is this?"}, *parts]
        body = {
            "model": "demo",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": content}],
        }
        return self.http.post(self.daemon.url + CHAT, json=body | fields, headers=bearer(key))

    def status_of(self, path: str, key: str | None) -> int:
        headers = {} if key is None else bearer(key)
        return self.http.get(self.daemon.url + path, headers=headers).status_code

    def is_fine(self) -> bool:
        return self.post(f"file://{self.root}/a.png").status_code == 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    root = folder / "pictures"
    root.mkdir()
    (root / "a.png").write_bytes(image_file("PNG", (64, 64)))
    (folder / "secret.png").write_bytes(image_file("PNG", (64, 64)))
    (root / "far.png").symlink_to(folder / "secret.png")
    (root / "up").symlink_to(folder)
    os.mkfifo(root / "pipe")
    write_keys(folder / "keys.toml", KEYS)
    settings = (
        f"server.api_key_file={folder / 'keys.toml'}",
        f'urls.file_folders=["{root}"]',
        'urls.https_hosts=["*"]',
        "urls.timeout_seconds=3",
        "engine.openblas=off",
    )
    with (
        running_daemon(folder, *with_settings(*settings), program=SCRIPTED) as daemon,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        yield Site(daemon, folder / "keys.toml", root, http)


def test_every_path_needs_valid_key(site: Site) -> None:
    guesses = [None, "", "laptop", "operator", USER[:-1], USER + "x", USER.upper(),
               f"{USER} {ADMIN}", "\x00", "Bearer", f"{USER},{ADMIN}", "x" * 60_000]  # fmt: skip
    for path in ("/v1/models", "/v1/status", "/metrics", "/", "/nowhere"):
        for guess in guesses:
            with suppress(httpx.LocalProtocolError):
                assert site.status_of(path, guess) in (400, 401, 431), (path, guess)
    assert site.post(key="wrong").status_code == 401
    assert site.status_of("/v1/models", USER) == 200


def test_user_key_cannot_use_operator_routes(site: Site) -> None:
    for path in ("/v1/status", "/metrics"):
        assert site.status_of(path, USER) == 403
        assert site.status_of(path, ADMIN) == 200
    for path in ("//v1/status", "/v1//status", "/v1/./status", "/v1/%73tatus/", "/metrics/"):
        assert site.status_of(path, USER) in (403, 404), path
    assert site.status_of("/v1/%73tatus", USER) == 403


def test_key_file_changes_apply_without_restart(site: Site) -> None:
    try:
        write_keys(site.keys, KEYS + '[guest]\nkey = "key-of-a-guest"\n')
        wait_until(
            lambda: site.status_of("/v1/models", "key-of-a-guest") == 200, 20, site.daemon.log
        )
        write_keys(site.keys, KEYS)
        wait_until(
            lambda: site.status_of("/v1/models", "key-of-a-guest") == 401, 20, site.daemon.log
        )
        for text in (f"[{ADMIN}", "", f'[x]\nkey = "{USER}"\n[y]\nkey = "{USER}"\n'):
            before = site.daemon.log.read_text().count("stay valid")
            write_keys(site.keys, text)
            wait_until(
                lambda n=before: (
                    site.status_of("/v1/models", USER) == 200
                    and site.daemon.log.read_text().count("stay valid") > n
                ),
                20,
                site.daemon.log,
            )
    finally:
        write_keys(site.keys, KEYS)
    assert site.is_fine()


def test_log_has_names_and_no_keys(site: Site) -> None:
    site.status_of("/v1/models", USER)
    site.status_of("/v1/models", "a-wrong-key-that-nobody-has")
    site.post("https://user:swordfish@example.org/", "file:///etc/swordfish")
    wait_until(lambda: "key laptop" in site.daemon.log.read_text(), 10, site.daemon.log)
    log = site.daemon.log.read_text()
    for secret in (USER, ADMIN, "a-wrong-key", "swordfish"):
        assert secret not in log


@dataclass
class Trap:
    """Counts connections to loopback addresses at port 443, where it may listen there."""

    listeners: list[socket.socket] = field(default_factory=list)
    caught: int = 0

    def listen(self) -> None:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((address, 443))
            except OSError:  # not root, or in use
                listener.close()
                continue
            listener.listen()
            self.listeners.append(listener)
            threading.Thread(target=self._catch, args=(listener,), daemon=True).start()

    def _catch(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()
                self.caught += 1

    def close(self) -> None:
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    counter = Trap()
    counter.listen()
    yield counter
    counter.close()


INWARD = [
    "https://127.0.0.1/", "https://127.1/", "https://127.0.0.1.:443/", "https://2130706433/",
    "https://0x7f000001/", "https://0x7f.1/", "https://0177.0.0.1/", "https://0.0.0.0/", "https://0/",
    "https://[::1]/", "https://[::]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/",
    "https://[0:0:0:0:0:0:0:1]/", "https://[::127.0.0.1]/", "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::127.0.0.1]/", "https://[2002:7f00:1::]/", "https://localhost/",
    "https://LOCALHOST./", "https://10.0.0.1/", "https://172.16.0.1/", "https://192.168.0.1/",
    "https://169.254.169.254/latest/meta-data/", "https://100.64.0.1/", "https://100.100.100.200/",
    "https://168.63.129.16/", "https://[fe80::1]/", "https://[fe80::1%25eth0]/",
    "https://[fd00:ec2::254]/", "https://[fc00::1]/", "https://[ff02::1]/", "https://224.0.0.1/",
    "https://255.255.255.255/", f"https://{socket.gethostname()}/",
    "https://user@127.0.0.1/", "https://example.org@127.0.0.1/", "https://example.org\\@127.0.0.1/",
    "https://127.0.0.1\\@example.org/", "https://127.0.0.1#@example.org/", "https:\\\\127.0.0.1/",
    "https:/127.0.0.1/", "https:127.0.0.1", "https://127.0.0.1%00.example.org/",
    "https://127\u30020\u30020\u30021/", "https://\u2460\u2461\u2466.0.0.1/", "https://127.0.0.1:8000/",
    "http://127.0.0.1/", "http://example.org/", "ftp://127.0.0.1/", "gopher://127.0.0.1/",
    "//127.0.0.1/", "127.0.0.1", "HTTPS://127.0.0.1/", " https://127.0.0.1/",
    "https://127.0.0.1/\r\nX: y",
]  # fmt: skip


def test_urls_never_reach_inner_addresses(site: Site, trap: Trap) -> None:
    site.post(INWARD[0])  # the process starts
    for url in INWARD:
        started = time.monotonic()
        answer = site.post(url)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_image"), url
        assert error["param"] == "messages[0].content[1]"
        assert "127" not in error["message"], url
        assert "example" not in error["message"], url
        assert time.monotonic() - started < 10, url
    assert trap.caught == 0
    assert site.is_fine()


def test_file_urls_never_read_outside_their_folder(site: Site) -> None:
    outside = site.root.parent / "secret.png"
    bad = [
        f"file://{outside}", f"file://{site.root}/../secret.png", f"file://{site.root}/%2e%2e/secret.png",
        f"file://{site.root}/far.png", f"file://{site.root}/up/secret.png",
        f"file://{site.root}/absent.png", f"file://{site.root}", f"file://{site.root}/pipe",
        f"file://{site.root}/a.png%00", "file:///etc/passwd", "file:///proc/self/environ",
        "file:///dev/stdin", "file:///dev/zero", "file://127.0.0.1/etc/passwd", "file:a.png",
        f"file://{site.daemon.log}", f"file://{site.keys}", "file:",
    ]  # fmt: skip
    messages = set()
    for url in bad:
        answer = site.post(url)
        assert answer.status_code == 400, url
        messages.add(answer.json()["error"]["message"])
    assert len(messages) == 1, messages
    for path in (str(outside), "/etc/passwd", f"{site.root}/a.png"):
        assert site.post(path).status_code == 400
    assert site.is_fine()


def test_unresolvable_hosts_do_not_delay_other_requests(site: Site) -> None:
    """Eight requests with 64 URLs each, whose host names do not resolve."""

    def ask(number: int) -> int:
        return site.post(*(f"https://{number}-{i}.invalid/" for i in range(64))).status_code

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        worst = 0.0
        while not all(task.done() for task in asking):
            started = time.monotonic()
            assert site.status_of("/health/live", None) == 200
            assert site.post().status_code == 200
            worst = max(worst, time.monotonic() - started)
            time.sleep(0.05)
        assert {task.result() for task in asking} == {400}
    assert worst < 5
    assert site.is_fine()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('server.api_keys=["          "]', "`server.api_keys[0]` has a blank"),
        ("engine.silence_timeout_seconds=inf", "engine.silence_timeout_seconds"),
        ("server.api_key_file={open}", "chmod 600"),
        ("server.api_key_file={folder}/absent", "No such file"),
    ],
)
def test_unsafe_settings_stop_start_with_reason(setting: str, words: str, tmp_path: Path) -> None:
    readable = tmp_path / "keys.toml"
    readable.write_text(KEYS)
    readable.chmod(0o644)
    setting = setting.replace("{open}", str(readable)).replace("{folder}", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-m", "vlm_server.cli", "serve", "--port", "0", "--set", setting],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert USER not in ended.stderr
