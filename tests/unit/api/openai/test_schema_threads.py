"""The first requests come at the same time, on several threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from vlm_server.api.openai import schema

sys.setswitchinterval(1e-6)
body = b'{"model": "default", "messages": [{"role": "user", "content": "hi"}]}'
go = threading.Barrier(4)

def parse():
    go.wait()
    schema.parse(body)

threads = [threading.Thread(target=parse) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_the_first_two_requests_at_once_do_not_crash_the_front():
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
