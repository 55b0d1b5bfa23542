"""The health check of containers: `python -m vlm_server.cli.ready [PID]`.

Asks the daemon of process PID (1, a container's first) whether it is ready, wherever its arguments,
the environment and its settings file let it listen. Exits with 0 if it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx

from vlm_server import settings
from vlm_server.cli import options
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.doctor.daemon import client
from vlm_server.cli.main import build_parser


def main(pid: str = "1") -> int:
    """0 if the daemon is ready, 1 if not, or if the process is none."""
    words = Path("/proc", pid, "cmdline").read_bytes().decode().split("\0")[:-1]
    if "serve" not in words:
        print(f"process {pid} is no `vlm-server serve`: {' '.join(words)[:200]}", file=sys.stderr)
        return 1
    arguments = build_parser().parse_args(words[words.index("serve") :])
    file, given = options.config_file(arguments), tuple(options.overrides(arguments))
    loaded, _ = settings.load_with_sources(file, given, os.environ)
    server = loaded.server
    with client(server, url_of(server.host, server.port)) as http:
        try:
            return 0 if http.get("/health/ready").is_success else 1
        except httpx.HTTPError:
            return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
