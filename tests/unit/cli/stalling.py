"""A fake daemon that stops answering at a chosen stage."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS = 30.0
DELTA = {"choices": [{"index": 0, "delta": {"content": "a red "}}]}


class StallingHandler(BaseHTTPRequestHandler):
    """Answers requests until the path or phase `stage` is reached, and then stalls."""

    stage = ""
    reached: threading.Event
    over: threading.Event

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was interrupted
            super().handle()

    def do_GET(self) -> None:
        self.stall_at(self.path)
        is_live = self.path == "/health/live"
        body = {"status": "live"} if is_live else {"data": [{"id": "demo"}]}
        self.answer(json.dumps(body).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.stall_at("prefill")
        self.answer(f"data: {json.dumps(DELTA)}\n\n".encode() * 2000)
        self.wfile.flush()
        self.stall_at("decode")
        self.wfile.write(b"data: [DONE]\n\n")

    def stall_at(self, stage: str) -> None:
        if stage == self.stage:
            self.reached.set()
            self.over.wait(SECONDS)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def daemon(stage: str = "") -> Iterator[tuple[str, threading.Event]]:
    """The daemon's URL, and an event that is set when `stage` is reached."""
    events = {"reached": threading.Event(), "over": threading.Event()}
    handler = type("Handler", (StallingHandler,), {"stage": stage, **events})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", events["reached"]
    finally:
        events["over"].set()
        server.shutdown()
        thread.join()
        server.server_close()
