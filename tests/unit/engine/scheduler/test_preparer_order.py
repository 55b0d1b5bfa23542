"""Requests with many pixels never take all preparer threads, and every request is prepared."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.unit.engine.fakes import ByteDecoder, submit
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.preparer_order import COSTLY_PIXELS, PreparerOrder


class Preparers:
    """Preparer threads: their order, and all requests."""

    def __init__(self, max_preparing: int, max_ready: int = 99) -> None:
        self.now = 0.0
        self.order = PreparerOrder(max_preparing, max_ready, lambda: self.now)
        self.requests = LiveRequests()

    def add(
        self,
        name: str,
        num_pixels: int = 1000,
        images: int = 1,
        *,
        has_schema: bool = False,
        client: str = "",
    ) -> None:
        submitted = structs.replace(submit(name, images=images), client=client)
        request = Request(submitted, submitted.sampling, ByteDecoder(), lambda: 0.0)
        self.requests.enqueue(request)
        request.num_pixels, request.has_schema = num_pixels, has_schema

    def order_one_by_one(self, seconds: float) -> list[str]:
        """Prepare all, each for so long; their names as they were begun. For one thread."""
        order = []
        while self.requests:
            (name,) = self.start()
            order.append(name)
            self.now += seconds
            self.end(name)
        return order

    def costly(self, *names: str) -> None:
        for name in names:
            self.add(name, COSTLY_PIXELS + 1)

    def start(self) -> list[str]:
        """Start preparations on free threads; returns their requests."""
        taken = self.order.next_to_prepare(self.requests.values())
        for request in taken:
            request.move_to(State.PREPARING)
            self.order.start(request)
        return [request.request_id for request in taken]

    def end(self, name: str) -> None:
        self.order.finish(name)
        self.requests.pop(name, None)


@pytest.mark.parametrize(("threads", "begun"), [(1, 1), (2, 1), (3, 2)])
def test_costly_requests_leave_preparer_thread_free(threads: int, begun: int):
    preparers = Preparers(threads)
    preparers.costly("a", "b", "c", "d")
    assert preparers.start() == ["a", "b", "c"][:begun]
    preparers.add("small")
    assert preparers.start() == ["small"]
    preparers.end("a")
    assert len(preparers.start()) == 1


def test_aborted_costly_requests_still_count_as_running():
    preparers = Preparers(2)
    preparers.costly("a", "b")
    assert preparers.start() == ["a"]
    preparers.requests.clear()  # both clients have left
    preparers.costly("c")
    preparers.add("small")
    assert preparers.start() == ["small"]
    preparers.end("a")
    assert preparers.start() == ["c"]


def test_preparer_threads_are_never_exceeded():
    preparers = Preparers(2)
    preparers.costly("a")
    for name in ("b", "c", "d"):
        preparers.add(name)
    assert preparers.start() == ["a", "b"]
    assert preparers.start() == []
    preparers.end("a")
    assert len(preparers.start()) == 1


def test_oldest_and_smallest_image_request_alternate():
    preparers = Preparers(1)
    for number in range(6):
        preparers.add(f"{number}", num_pixels=1000 - number)
    order = []
    while preparers.requests:
        (name,) = preparers.start()
        order.append(name)
        preparers.end(name)
    assert order == ["0", "5", "1", "4", "2", "3"]


def test_equal_preparations_start_in_order_of_arrival():
    preparers = Preparers(2)
    for name in "abcd":
        preparers.add(name)
    assert preparers.start() == ["a", "b"]
    preparers.end("b")
    assert preparers.start() == ["c"]


def test_ready_requests_limit_new_preparations():
    preparers = Preparers(2, max_ready=1)
    for name in "abcdef":
        preparers.add(name)
    for _ in range(2):
        for name in preparers.start():
            preparers.order.finish(name)  # it is ready, and still tracked
    assert sum(r.state is State.PREPARING for r in preparers.requests.values()) == 3


def test_pixels_are_held_by_few_requests_for_any_max_ready():
    """Two are prepared, and sixteen wait for the device."""
    preparers = Preparers(2, max_ready=256)
    for number in range(100):
        preparers.add(f"{number}")
    begun = list[str]()
    while started := preparers.start():
        begun += started
        for name in started:
            preparers.order.finish(name)
    assert len(begun) == 18
    for name in begun[:10]:
        for state in (State.WAITING_FOR_MEMORY, State.PREFILL, State.DECODE):
            preparers.requests[name].move_to(state)
    assert len(preparers.start()) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_text_with_schema_does_not_wait_for_images_with_schema(threads: int):
    preparers = Preparers(threads)
    preparers.costly("a")
    assert preparers.start() == ["a"]
    for number in range(threads + 1):
        preparers.add(f"costly {number}", COSTLY_PIXELS + 1, has_schema=True)
    preparers.add("text", images=0, has_schema=True)
    assert preparers.start() == ["text"]


def test_oldest_and_shortest_schema_alternate():
    """Tools that take seconds to compile do not keep a small schema waiting for all of them."""
    preparers = Preparers(1)
    for number in range(8):
        preparers.add(f"tools {number}", images=0, has_schema=True)
        preparers.requests[f"tools {number}"].num_schema_chars = 100_000
    assert preparers.start() == ["tools 0"]
    preparers.add("small", images=0, has_schema=True)
    preparers.requests["small"].num_schema_chars = 100
    order = ["tools 0"]
    while preparers.requests:
        preparers.end(order[-1])
        order += preparers.start()
    assert order.index("small") == 1
    assert [name for name in order if name != "small"] == [f"tools {n}" for n in range(8)]


@pytest.mark.parametrize("threads", [1, 2])
def test_slow_schemas_delay_another_client_only_while_running(threads: int):
    """Sixteen schemas of each client: 5 s each of the first, a moment each of the second."""
    preparers = Preparers(threads)
    for number in range(16):
        preparers.add(f"slow {number}", images=0, has_schema=True, client="a")
    running = dict.fromkeys(preparers.start(), 5.0)
    preparers.now = 0.1
    preparers.start()
    for number in range(16):
        preparers.add(f"quick {number}", images=0, has_schema=True, client="b")
    ended = dict[str, float]()
    while preparers.requests:
        running |= {
            name: preparers.now + (5.0 if name.startswith("slow") else 0.01)
            for name in preparers.start()
        }
        name = min(running, key=running.__getitem__)
        ended[name] = preparers.now = running.pop(name)
        preparers.end(name)
    assert max(ended[f"quick {number}"] for number in range(16)) < 5.5
    assert max(ended.values()) < 16 * 5 / threads + 1, "no thread was idle"


def test_equally_slow_schemas_alternate_by_client():
    """Whatever their sizes are, and however many there are before."""
    preparers = Preparers(1)
    for client, chars in (("a", 100), ("b", 90_000)):
        for number in range(16 if client == "a" else 4):
            name = f"{client}{number}"
            preparers.add(name, images=0, has_schema=True, client=client)
            preparers.requests[name].num_schema_chars = chars
    order = preparers.order_one_by_one(seconds=5.0)
    assert "".join(name[0] for name in order[:8]) == "abababab"
    assert order[1:8:2] == ["b0", "b1", "b2", "b3"]


def test_returning_client_has_neither_debt_nor_credit():
    preparers = Preparers(1)
    for number in range(3):
        preparers.add(f"a{number}", images=0, has_schema=True, client="a")
    for _ in range(2):
        (name,) = preparers.start()
        preparers.now += 5.0
        preparers.end(name)
    for number in range(9):
        preparers.add(f"b{number}", images=0, has_schema=True, client="b")
    order = preparers.order_one_by_one(seconds=5.0)
    assert order.index("a2") <= 2


def test_schema_texts_never_exceed_preparer_threads():
    preparers = Preparers(2)
    for name in "abc":
        preparers.add(name, images=0, has_schema=True)
    preparers.add("text", images=0)
    assert preparers.start() == ["a", "b", "text"]
    preparers.end("a")
    assert preparers.start() == ["c"]


def test_image_is_prepared_before_any_video():
    """Of a video only the size of its frames is known, and not how long it takes to decode."""
    preparers = Preparers(2)
    preparers.add("oldest")
    preparers.add("video", num_pixels=100)
    preparers.requests["video"].has_video = True
    preparers.add("image", num_pixels=10_000)
    assert preparers.start() == ["oldest", "image"]
