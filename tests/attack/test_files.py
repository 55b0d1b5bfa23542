"""Hostile uploads: slow, endless, many, malformed, of two keys, and deleted while they are used."""

from __future__ import annotations

import hashlib
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.test_bodies import Times, measured_times, p99, resident_bytes
from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    running_daemon,
    wait_until,
    with_settings,
    write_keys,
)
from tests.support.image_files import image_file
from tests.unit.api.requests import ROUTE, bearer, chat, image_part, user
from vlm_server.api.dialects.files.receive import MAX_UPLOADS

MIB = 1 << 20
STORE_BYTES, FILE_BYTES, TIMEOUT_SECONDS = 8 * MIB, 2 * MIB, 2.0
GREEDY, MODEST = "the-greedy-key", "the-modest-key"
KEYS = f'[greedy]\nkey = "{GREEDY}"\n[modest]\nkey = "{MODEST}"\nadmin = true\n'
HEALTH_SECONDS = 1.0
"""Generous: some 50 ms on an idle machine."""
MANY = 800
"""More files than the store has room for, each counted as 16 KiB more."""
FRONT_BYTES = 64 * MIB
FORM = "multipart/form-data; boundary=b"
PNG = image_file("PNG")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("files")
    settings = with_settings(
        f"files.folder={folder / 'store'}",
        f"files.max_bytes={STORE_BYTES}",
        f"files.max_file_bytes={FILE_BYTES}",
        f"files.upload_timeout_seconds={TIMEOUT_SECONDS}",
        f"server.api_key_file={write_keys(folder / 'keys.toml', KEYS)}",
        "engine.openblas=off",
    )
    with running_daemon(folder, *settings, program=SCRIPTED, api_key=MODEST) as running:
        yield running
    assert "Traceback" not in running.log.read_text()


def store(daemon: Daemon) -> Path:
    return daemon.log.parent / "store"


def uploads_on_disk(daemon: Daemon) -> list[int]:
    """Sizes of files in the store, without its index."""
    sizes = []
    for path in store(daemon).iterdir():
        if not path.name.startswith("index"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
    return sizes


def client_of(daemon: Daemon, key: str) -> httpx.Client:
    return httpx.Client(base_url=daemon.url, headers=bearer(key), timeout=60)


def upload_socket(daemon: Daemon, head: str, body: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", daemon.port), timeout=60)
    lines = f"{head} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GREEDY}\r\n"
    client.sendall(lines.encode() + body)
    return client


def answer_of(client: socket.socket) -> bytes:
    answer = bytearray()
    try:
        while piece := client.recv(1 << 16):
            answer += piece
    except ConnectionResetError:
        pass
    return bytes(answer)


def send_chunks(client: socket.socket, num_bytes: int) -> None:
    for _ in range(num_bytes >> 16):
        client.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")


def test_slow_uploads_end_and_leave_no_file(daemon: Daemon) -> None:
    before = len(uploads_on_disk(daemon))
    with ExitStack() as clients, client_of(daemon, MODEST) as good:
        slow = [
            clients.enter_context(
                upload_socket(
                    daemon, "PUT /v1/media", b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000
                )
            )
            for _ in range(40)
        ]
        name = good.put("/v1/media", content=PNG).json()["id"]
        assert good.post(ROUTE, json=chat(user(image_part(name)), max_tokens=1)).status_code == 200
        began = time.monotonic()
        answers = [answer_of(client) for client in slow]
    assert time.monotonic() - began < TIMEOUT_SECONDS + 10
    statuses = Counter(answer.split(b" ", 2)[1] for answer in answers)
    assert statuses == {b"408": MAX_UPLOADS, b"429": 40 - MAX_UPLOADS}
    assert sum(b"files.upload_timeout_seconds" in answer for answer in answers) == MAX_UPLOADS
    wait_until(lambda: len(uploads_on_disk(daemon)) <= before + 1, 10, daemon.log)


def test_uploads_of_clients_that_leave_are_removed(daemon: Daemon) -> None:
    before = len(uploads_on_disk(daemon))
    for _ in range(20):
        head = b"Content-Length: 1000000\r\n\r\n" + b"x" * 300_000
        upload_socket(daemon, "PUT /v1/media", head).close()
    wait_until(lambda: len(uploads_on_disk(daemon)) <= before, 10, daemon.log)


def test_endless_upload_is_cut_off_and_memory_stays(daemon: Daemon) -> None:
    memory = resident_bytes(daemon.process.pid)
    client = upload_socket(daemon, "PUT /v1/media", b"Transfer-Encoding: chunked\r\n\r\n")
    with client, pytest.raises(OSError, match=r"reset|pipe"):
        send_chunks(client, 256 * MIB)
    wait_until(lambda: max(uploads_on_disk(daemon), default=0) <= FILE_BYTES, 10, daemon.log)
    assert resident_bytes(daemon.process.pid) < memory + FRONT_BYTES


def test_many_tiny_files_stay_within_bound_and_spare_other_key(daemon: Daemon) -> None:
    with client_of(daemon, MODEST) as modest:
        kept = modest.put("/v1/media", content=PNG).json()["id"]

        def flood(number: int) -> None:
            with client_of(daemon, GREEDY) as greedy:
                for count in range(MANY // 4):
                    assert greedy.put("/v1/media", content=b"%d %d" % (number, count)).is_success

        with ThreadPoolExecutor(4) as threads:
            floods, times = [threads.submit(flood, number) for number in range(4)], []
            while not all(each.done() for each in floods):
                began = time.monotonic()
                answer = modest.post(ROUTE, json=chat(user(image_part(kept)), max_tokens=1))
                times.append(time.monotonic() - began)
                assert answer.status_code == 200, answer.text
            for each in floods:
                each.result()
        assert modest.head(f"/v1/media/{kept}").status_code == 200
    sizes = uploads_on_disk(daemon)
    assert MANY / 2 < len(sizes) <= STORE_BYTES >> 14
    print(f"\n{MANY} tiny files, {len(sizes)} kept; requests of the other key: {spread(times)}")


def test_greedy_key_evicts_its_own_files(daemon: Daemon) -> None:
    with client_of(daemon, MODEST) as modest, client_of(daemon, GREEDY) as greedy:
        picture = PNG + b"\0" * MIB  # bytes behind the picture are ignored
        kept = modest.put("/v1/media", content=picture).json()["id"]
        for number in range(40):
            large = number.to_bytes(4) + b"\0" * (FILE_BYTES - 4)
            assert greedy.put("/v1/media", content=large).status_code == 200
            assert sum(uploads_on_disk(daemon)) <= STORE_BYTES + FILE_BYTES
            ask = chat(user(image_part(kept)), max_tokens=1)
            assert modest.post(ROUTE, json=ask).status_code == 200
        unknown = [
            each.head(f"/v1/media/{name}").status_code
            for each, name in ((greedy, kept), (modest, hash_of(large)))
        ]
    assert unknown == [404, 404]


def test_deletions_during_requests_give_answers_or_clear_errors(daemon: Daemon) -> None:
    over = threading.Event()

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        with client_of(daemon, MODEST) as client:
            while not over.is_set():
                form = {"file": ("a.png", PNG)}
                created = client.post("/v1/files", files=form, data={"purpose": "vision"})
                ids.append(created.json()["id"])
                victim = rng.choice(ids[-8:])
                assert client.delete(f"/v1/files/{victim}").status_code in (200, 404)

    ids: list[str] = []
    outcomes: Counter[Any] = Counter()
    with ThreadPoolExecutor(2) as threads, client_of(daemon, MODEST) as client:
        churns = [threads.submit(churn, seed) for seed in range(2)]
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            wait_until(lambda: ids, 10, daemon.log)
            name = random.choice(ids[-4:])
            answer = client.post(ROUTE, json=chat(user(image_part(name)), max_tokens=1))
            is_answer = answer.status_code == 200
            outcomes[200 if is_answer else answer.json()["error"]["code"]] += 1
        over.set()
        for done in churns:
            done.result()
    assert set(outcomes) == {200, "file_not_found"}, outcomes
    wait_until(lambda: daemon.num_in_flight() == 0, 10, daemon.log)


def hostile_form(unit: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + unit * ((FILE_BYTES - 1000) // len(unit)) + b"\r\n--b--\r\n"


FORMS = {
    "almost boundaries": hostile_form(b"\r\n--bx"),
    "returns": hostile_form(b"\r"),
    "half boundaries": hostile_form(b"\r\n--"),
    "parts": b"--b\r\nA: b\r\n\r\n\r\n" * (FILE_BYTES // 14),
    "headers": b"--b\r\n" + b"A: b\r\n" * (FILE_BYTES // 6),
    "newlines": b"\r\n" * (FILE_BYTES // 2),
}


@pytest.mark.alone
def test_hostile_forms_delay_no_health_check(daemon: Daemon) -> None:
    def send(kind: str) -> Counter[int]:
        statuses: Counter[int] = Counter()
        with client_of(daemon, GREEDY) as client:
            for _ in range(40):
                headers = {"content-type": FORM}
                answer = client.post("/v1/files", content=FORMS[kind], headers=headers)
                statuses[answer.status_code] += 1
        return statuses

    with measured_times(daemon) as times, ThreadPoolExecutor() as threads:
        statuses = list(threads.map(send, [*FORMS, *["almost boundaries"] * 3]))
    assert all(set(each) <= {400, 413, 429} for each in statuses), statuses
    report(times)
    assert p99(times.health + times.gaps) < HEALTH_SECONDS


def report(times: Times) -> None:
    print(f"\nhealth {spread(times.health)}; gaps of a stream {spread(times.gaps)}")


def spread(times: list[float]) -> str:
    worst = max(times)
    return f"p50 {statistics.median(times):.3f}, p99 {p99(times):.3f}, max {worst:.3f} s"


def hash_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_stopped_daemon_leaves_no_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    settings = with_settings("engine.openblas=off")
    with running_daemon(tmp_path, *settings, program=SCRIPTED, environment=environment) as running:
        assert httpx.put(f"{running.url}/v1/media", content=PNG).status_code == 200
        assert list(temporary.glob("vlm-server-files-*"))
    assert not list(temporary.glob("vlm-server-files-*"))
