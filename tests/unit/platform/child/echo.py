"""A child that does what its job says."""

import os
import sys
import time

from vlm_server.platform.child.serve import ChildLimits, serve


def answer(job: bytearray) -> bytes:
    match job.decode().split(" ", 1):
        case ["echo", text]:
            return text.encode()
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["exit", status]:
            os._exit(int(status))
        case ["allocate", size]:
            return bytes(b"x" * int(size))[:1]
        case ["hold", size]:
            held = b"x" * int(size)
            time.sleep(60)
            return held[:1]
        case ["print", text]:
            print(text, flush=True)
        case ["path", _]:
            return repr(sys.path).encode()
        case ["pid", _]:
            return str(os.getpid()).encode()
    return b""


if __name__ == "__main__":
    serve(answer, ChildLimits(memory_bytes=1 << 30, job_seconds=5, retire_bytes=200 << 20))
