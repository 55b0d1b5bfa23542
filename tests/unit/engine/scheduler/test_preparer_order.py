"""Requests with many pixels never take all preparer threads, and nobody waits for ever."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.unit.engine.fakes import ByteDecoder, submit
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.preparer_order import COSTLY_PIXELS, PreparerOrder
from vlm_server.engine.scheduler.requests import Requests


class Preparers:
    """Their order, and all requests that there are."""

    def __init__(self, max_preparing: int, max_ready: int = 99) -> None:
        self.now = 0.0
        self.order = PreparerOrder(max_preparing, max_ready, lambda: self.now)
        self.requests = Requests()

    def add(
        self,
        name: str,
        num_pixels: int = 1000,
        images: int = 1,
        *,
        has_schema: bool = False,
        client: str = "",
    ) -> None:
        asked = structs.replace(submit(name, images=images), client=client)
        request = Request(asked, asked.sampling, ByteDecoder(), lambda: 0.0)
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
        """Those that are given to a thread now."""
        taken = self.order.next(self.requests.values())
        for request in taken:
            request.move_to(State.PREPARING)
            self.order.start(request)
        return [request.request_id for request in taken]

    def end(self, name: str) -> None:
        self.order.finish(name)
        self.requests.pop(name, None)


@pytest.mark.parametrize(("threads", "begun"), [(1, 1), (2, 1), (3, 2)])
def test_costly_requests_leave_a_preparer_thread_free(threads: int, begun: int):
    made = Preparers(threads)
    made.costly("a", "b", "c", "d")
    assert made.start() == ["a", "b", "c"][:begun]
    made.add("small")
    assert made.start() == ["small"]
    made.end("a")
    assert len(made.start()) == 1


def test_aborted_costly_requests_still_count_as_running():
    made = Preparers(2)
    made.costly("a", "b")
    assert made.start() == ["a"]
    made.requests.clear()  # both clients have left
    made.costly("c")
    made.add("small")
    assert made.start() == ["small"]
    made.end("a")
    assert made.start() == ["c"]


def test_preparer_threads_are_never_exceeded():
    made = Preparers(2)
    made.costly("a")
    for name in ("b", "c", "d"):
        made.add(name)
    assert made.start() == ["a", "b"]
    assert made.start() == []
    made.end("a")
    assert len(made.start()) == 1


def test_oldest_and_smallest_image_request_alternate():
    made = Preparers(1)
    for number in range(6):
        made.add(f"{number}", num_pixels=1000 - number)
    order = []
    while made.requests:
        (name,) = made.start()
        order.append(name)
        made.end(name)
    assert order == ["0", "5", "1", "4", "2", "3"]


def test_equal_preparations_start_in_order_of_arrival():
    made = Preparers(2)
    for name in "abcd":
        made.add(name)
    assert made.start() == ["a", "b"]
    made.end("b")
    assert made.start() == ["c"]


def test_ready_requests_limit_new_preparations():
    made = Preparers(2, max_ready=1)
    for name in "abcdef":
        made.add(name)
    for _ in range(2):
        for name in made.start():
            made.order.finish(name)  # it is ready, and still tracked
    assert sum(r.state is State.PREPARING for r in made.requests.values()) == 3


def test_few_requests_hold_pixels_whatever_max_ready_is():
    """Two are prepared, and sixteen wait for the device."""
    made = Preparers(2, max_ready=256)
    for number in range(100):
        made.add(f"{number}")
    begun = list[str]()
    while started := made.start():
        begun += started
        for name in started:
            made.order.finish(name)
    assert len(begun) == 18
    for name in begun[:10]:
        for state in (State.WAITING_FOR_MEMORY, State.PREFILL, State.DECODE):
            made.requests[name].move_to(state)
    assert len(made.start()) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_text_with_schema_does_not_wait_for_images_with_schema(threads: int):
    made = Preparers(threads)
    made.costly("a")
    assert made.start() == ["a"]
    for number in range(threads + 1):
        made.add(f"costly {number}", COSTLY_PIXELS + 1, has_schema=True)
    made.add("text", images=0, has_schema=True)
    assert made.start() == ["text"]


def test_oldest_and_shortest_schema_alternate():
    """Tools that take seconds to compile do not keep a small schema waiting for all of them."""
    made = Preparers(1)
    for number in range(8):
        made.add(f"tools {number}", images=0, has_schema=True)
        made.requests[f"tools {number}"].num_schema_chars = 100_000
    assert made.start() == ["tools 0"]
    made.add("small", images=0, has_schema=True)
    made.requests["small"].num_schema_chars = 100
    order = ["tools 0"]
    while made.requests:
        made.end(order[-1])
        order += made.start()
    assert order.index("small") == 1
    assert [name for name in order if name != "small"] == [f"tools {n}" for n in range(8)]


@pytest.mark.parametrize("threads", [1, 2])
def test_slow_schemas_delay_another_client_only_while_running(threads: int):
    """Sixteen of each: those of one take 5 s, those of the other a moment."""
    made = Preparers(threads)
    for number in range(16):
        made.add(f"slow {number}", images=0, has_schema=True, client="a")
    running = dict.fromkeys(made.start(), 5.0)
    made.now = 0.1
    made.start()
    for number in range(16):
        made.add(f"quick {number}", images=0, has_schema=True, client="b")
    ended = dict[str, float]()
    while made.requests:
        running |= {
            name: made.now + (5.0 if name.startswith("slow") else 0.01) for name in made.start()
        }
        name = min(running, key=running.__getitem__)
        ended[name] = made.now = running.pop(name)
        made.end(name)
    assert max(ended[f"quick {number}"] for number in range(16)) < 5.5
    assert max(ended.values()) < 16 * 5 / threads + 1, "no thread was idle"


def test_equally_slow_schemas_alternate_by_client():
    """Whatever their sizes are, and however many there are before."""
    made = Preparers(1)
    for client, chars in (("a", 100), ("b", 90_000)):
        for number in range(16 if client == "a" else 4):
            name = f"{client}{number}"
            made.add(name, images=0, has_schema=True, client=client)
            made.requests[name].num_schema_chars = chars
    order = made.order_one_by_one(seconds=5.0)
    assert "".join(name[0] for name in order[:8]) == "abababab"
    assert order[1:8:2] == ["b0", "b1", "b2", "b3"]


def test_returning_client_has_neither_debt_nor_credit():
    made = Preparers(1)
    for number in range(3):
        made.add(f"a{number}", images=0, has_schema=True, client="a")
    for _ in range(2):
        (name,) = made.start()
        made.now += 5.0
        made.end(name)
    for number in range(9):
        made.add(f"b{number}", images=0, has_schema=True, client="b")
    order = made.order_one_by_one(seconds=5.0)
    assert order.index("a2") <= 2


def test_schema_texts_never_exceed_preparer_threads():
    made = Preparers(2)
    for name in "abc":
        made.add(name, images=0, has_schema=True)
    made.add("text", images=0)
    assert made.start() == ["a", "b", "text"]
    made.end("a")
    assert made.start() == ["c"]


def test_image_is_prepared_before_any_video():
    """Of a video only the size of its frames is known, and not how long it takes to decode."""
    made = Preparers(2)
    made.add("oldest")
    made.add("video", num_pixels=100)
    made.requests["video"].has_video = True
    made.add("picture", num_pixels=10_000)
    assert made.start() == ["oldest", "picture"]
