"""Freed memory returns to the system, or stays mapped where that is meant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType

import pytest

pytestmark = pytest.mark.alone

MAIN_THREAD = """
import os
from pathlib import Path
from vlm_server.platform import heap
{first}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
kept = []
for _ in range(40):
    large = [bytes(2_000_000) for _ in range(20)]
    kept.append(bytes(300))
    del large
    kept += [bytes(200_000)[:150] for _ in range(5)]
before = resident()
blocks = [os.urandom(100_000) for _ in range(1000)]
del blocks[:999]
{last}
print(resident() - before)
"""

OTHER_THREAD = """
import os, threading
from pathlib import Path
from vlm_server.platform import heap
{first}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def work():
    blocks = [os.urandom(100_000) for _ in range({count})]
bytes(30_000_000)
before = resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
{last}
print(resident() - before)
"""


def growth(
    first: str = "",
    last: str = "",
    program: str = MAIN_THREAD,
    count: int = 400,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Bytes that a process keeps of `count` times 100 kB or more, of which it needs one at most."""
    program = program.format(first=first, last=last, count=count)
    output = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=dict(environment),
    )
    return int(output.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_trim_returns_free_memory_to_system():
    assert growth() > 50_000_000
    assert growth(last="heap.trim()") < 5_000_000


def test_trim_works_after_keep_bodies_on_any_platform():
    assert growth(first="heap.keep_bodies()", last="heap.trim()") < 5_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_trim_reaches_memory_freed_by_threads():
    """Of a thread's own heap, trimming does not reach what is free at the end."""
    assert growth(last="heap.trim()", program=OTHER_THREAD) > 20_000_000
    kept = growth(first="heap.keep_bodies()", last="heap.trim()", program=OTHER_THREAD)
    assert kept < 5_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="the preload is for Linux")
def test_trim_returns_memory_kept_by_mimalloc():
    preload = {
        "LD_PRELOAD": str(
            distribution("cmeel-mimalloc").locate_file("cmeel.prefix/lib/libmimalloc.so.3")
        ),
        "MIMALLOC_PURGE_DELAY": "100000",  # until then, it gives nothing back by itself
    }
    for program in (MAIN_THREAD, OTHER_THREAD):
        kept = growth(program=program, environment=preload)
        trimmed = growth(last="heap.trim()", program=program, environment=preload)
        assert kept > 20_000_000
        assert trimmed < 5_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_keep_bodies_keeps_freed_bodies_mapped_until_trim():
    program = """
import resource
from vlm_server.platform import heap
{first}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def body():
    [b"x" * each for each in (13 << 20, 10 << 20, 256 << 10)]
body()
kept = heap.free_bytes()
before = faults()
for _ in range(20):
    body()
again = faults() - before
{last}
print(again)
"""
    assert growth(first="heap.share_one_heap()", program=program) > 50_000
    assert growth(first="heap.keep_bodies()", program=program) < 1_000
    kept = growth(first="heap.keep_bodies()", last="again = kept", program=program)
    assert 20_000_000 < kept < 60_000_000
    last = "heap.trim(); again = heap.free_bytes() + kept"
    assert growth(first="heap.keep_bodies()", last=last, program=program) < 2 * kept


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_shared_heap_keeps_memory_freed_by_threads_until_trim():
    first = "heap.share_one_heap()"
    assert growth(first=first, program=OTHER_THREAD, count=120) > 10_000_000
    assert growth(first=first, last="heap.trim()", program=OTHER_THREAD, count=120) < 5_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_keep_images_keeps_two_megapixels_mapped():
    """Memory of images of two megapixels stays, but not all memory of a large one."""
    program = """
import resource
from vlm_server.platform import heap
{first}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def image():
    [b"x" * each for each in (8 << 20, 6 << 20)]
image()
before = faults()
for _ in range(20):
    image()
{last}
print(faults() - before)
"""
    assert growth(first="heap.share_one_heap()", program=program) > 10_000
    assert growth(first="heap.keep_images()", program=program) < 1_000
    assert growth(first="heap.keep_images()", program=OTHER_THREAD, count=2000) < 60_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_openblas_buffers_stay_mapped():
    """OpenBLAS takes 2.1 MB for each: to have them mapped anew made images 1.6 times as slow."""
    program = """
import resource
from vlm_server.platform import heap
{first}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2_101_248)
before = faults()
for _ in range(100):
    bytearray(2_101_248)
{last}
print(faults() - before)
"""
    assert growth(first="heap._glibc().mallopt(-3, 256 << 10)", program=program) > 10_000
    assert growth(first="heap.share_one_heap()", program=program) < 1_000
