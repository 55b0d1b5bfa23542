"""The hub: repositories of commits of files, over HTTP as https://huggingface.co has them.

Large files are redirected to another path, as the hub does to its CDN, with ranges. What a test
wants to go wrong is set on the `Hub` or its `Repo`, also while it runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")
_FILE = re.compile(r"/(cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PIECE_BYTES = 256 * 1024


@dataclass
class Repo:
    """One repository: files by path, by commit; `refs` name commits.

    `moves_to` is where `main` goes once a file was asked for. `declared` sizes are told in the tree
    in place of true ones.
    """

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    members: frozenset[str] = frozenset()
    """Tokens that may read a gated repository."""
    parameters: dict[str, int] = field(default_factory=dict)
    declared: dict[str, int] = field(default_factory=dict)
    oids: dict[str, str] = field(default_factory=dict)
    """Hashes that the tree tells in place of true ones."""
    moves_to: str | None = None
    downloads: int = 0

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """The server's state.

    `cut_after`: by path, after how many bytes each answer is broken off; one for each time.
    `wrong`: bytes that are sent in place of a file's, by path. `seconds_per_mib`: how slow it is.
    `sent_bytes` counts the bytes of each path, `requests` are (method, path).
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    wrong: dict[str, list[bytes]] = field(default_factory=dict)
    failing: Counter[str] = field(default_factory=Counter)
    """How often a file will be answered with 500 when it is fetched, by path."""
    seconds_per_mib: float = 0.0
    search_status: int = 200
    search_seconds: float = 0.0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """All that were shown."""
    url: str = ""


def add(hub: Hub, repo: str, files: dict[str, bytes], **more: Any) -> str:
    """A repository of one commit, which is `main`. Returns that commit."""
    commit = commit_of(files)
    hub.repos[repo] = Repo({commit: files}, {"main": commit}, **more)
    return commit


def commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for path, data in sorted(files.items()):
        digest.update(path.encode() + hashlib.sha1(data).digest())
    return digest.hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port; `Hub.url` is its address."""
    hub = Hub()
    handler = type("BoundHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


def tree_entry(repo: Repo, path: str, data: bytes) -> dict[str, Any]:
    size = repo.declared.get(path, len(data))
    entry = {"type": "file", "path": path, "size": size, "oid": git_oid(data)}
    if is_lfs(path):
        oid = repo.oids.get(path, hashlib.sha256(data).hexdigest())
        entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 130}
    return entry


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token.removeprefix("Bearer "))
        if path == "/api/models":
            self._search(parse_qs(urlsplit(self.path).query))
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3] or "main")
        elif found := _FILE.fullmatch(path):
            self._file(found[2], found[3], found[4], is_cdn=bool(found[1]))
        else:
            self._json({"error": "not found"}, 404)

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        repo = self.hub.repos.get(name)
        if repo is None:  # the hub does not tell whether it is there but private
            self._error(401, "RepoNotFound", "Repository not found")
            return
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repo.commits[commit]
        if kind == "tree":
            self._json([tree_entry(repo, path, data) for path, data in files.items()])
            return
        info: dict[str, Any] = {"id": name, "sha": commit, "private": False, "siblings": []}
        if repo.parameters:
            info["safetensors"] = self._parameters(repo)
        self._json(info)

    def _search(self, query: dict[str, list[str]]) -> None:
        if self.hub.search_status != 200:
            self._error(self.hub.search_status, "Internal", "Something is wrong")
            return
        time.sleep(self.hub.search_seconds)
        wanted, most = query["search"][0].lower(), int(query["limit"][0])
        found = [
            {
                "id": name,
                "downloads": repo.downloads,
                "gated": "manual" if repo.gated else False,
                "config": {"model_type": "qwen3_vl"},
                **({"safetensors": self._parameters(repo)} if repo.parameters else {}),
            }
            for name, repo in self.hub.repos.items()
            if wanted in name.lower()
        ]
        found.sort(key=lambda one: -one["downloads"])
        self._json(found[:most])

    def _parameters(self, repo: Repo) -> dict[str, Any]:
        return {"parameters": repo.parameters, "total": sum(repo.parameters.values())}

    def _file(self, name: str, revision: str, path: str, *, is_cdn: bool) -> None:
        repo = self.hub.repos[name]
        commit = repo.commit(revision)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo.gated and not is_cdn and token not in repo.members:
            self._error(403 if token else 401, "GatedRepo", "Access to this model is restricted")
            return
        if commit is None or path not in repo.commits[commit]:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        data = repo.commits[commit][path]
        if repo.moves_to is not None:
            repo.refs["main"] = repo.moves_to
        size = repo.declared.get(path, len(data))
        etag = hashlib.sha256(data).hexdigest() if is_lfs(path) else git_oid(data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if is_lfs(path) and not is_cdn:
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(size)}
            headers["Location"] = f"{self.hub.url}/cdn/{name}/resolve/{commit}/{path}"
            self._start(302, headers, 0)
            return
        if self.command == "GET" and self.hub.failing[path] > 0:
            self.hub.failing[path] -= 1
            self._error(500, "Internal", "Something is wrong")
            return
        if wrong := self.hub.wrong.get(path):
            data = wrong[0] if self.command == "HEAD" else wrong.pop(0)
        self._send(path, data, headers)

    def _send(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        start, status = 0, 200
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(found[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._start(status, headers, len(data) - start)
        if self.command == "HEAD":
            return
        cuts = self.hub.cut_after.get(path)
        end = min(len(data), start + cuts.pop(0)) if cuts else len(data)
        for offset in range(start, end, _PIECE_BYTES):
            piece = data[offset : min(end, offset + _PIECE_BYTES)]
            try:
                self.wfile.write(piece)
            except OSError:  # who asked has left
                self.close_connection = True
                return
            self.hub.sent_bytes[path] += len(piece)
            time.sleep(self.hub.seconds_per_mib * len(piece) / (1 << 20))
        if end < len(data):
            self.wfile.flush()
            self.close_connection = True

    def _error(self, status: int, code: str, message: str) -> None:
        self._json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self._start(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _start(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
