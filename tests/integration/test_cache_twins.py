"""Lookalike inputs: no cache answers one with another's entry.

One family each that appends its KV with M-RoPE, with deepstack, has recurrent states, has
windows, or counts positions plainly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from PIL import Image as PillowImage

from tests.integration.harness import (
    DECODERS,
    EngineHarness,
    Part,
    Served,
    ask,
    cached_tokens,
    caches_of,
    new_preparer,
    prepare,
    video_of,
)
from tests.support import video_files
from tests.support.image_files import image_of, submitted
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.whole_run import few_of
from vlm_server.interfaces import EncodeCall, EncodeWork, Prepared
from vlm_server.prompt.media.decoders import Decoders
from vlm_server.protocol import Image, SamplingParams, Submit
from vlm_server.settings import ImageSettings, VideoSettings

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "pixtral")
SHORT = SamplingParams(max_tokens=5, temperature=0.0)
A, B = random_image(1), random_image(2)
Asked = tuple[Part, ...]


class KeyRecordingEncoder:
    """The engine's encoder, with the keys of the images encoded."""

    def __init__(self, engine: EngineHarness) -> None:
        self._encoder = engine.encoder.encoder
        self.keys: list[str] = []

    def begin(self, works: Sequence[EncodeWork]) -> EncodeCall:
        self.keys += [work.span.mm_hash for work in works]
        return self._encoder.begin(works)


class CountedFunction:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.num_calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        return self._function(*arguments)


def new_engine(served: Served, **sizes: int) -> tuple[EngineHarness, KeyRecordingEncoder]:
    engine = EngineHarness(*served, caches=caches_of(served, **sizes))
    engine.encoder.encoder = counting = KeyRecordingEncoder(engine)
    return engine, counting


@pytest.fixture(params=few_of(FAMILIES, ["qwen2_5_vl", "gemma3"]), scope="module")
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture(params=("qwen3_vl", "gemma3"), scope="module")
def video_served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    """A family that takes videos, and one that is shown their frames."""
    return load_tiny(request.param)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> CountedFunction:
    counted = CountedFunction(DECODERS.image)
    monkeypatch.setattr(DECODERS, "image", counted)
    return counted


def run_to_idle(engine: EngineHarness) -> None:
    """Run to the end; then no cache entry is in use, and all sums agree."""
    engine.run()
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0
    assert not any(reading.pinned_bytes for reading in engine.caches.stats())


def answer_alone(served: Served, *parts: Part) -> list[int]:
    return EngineHarness(*served).answer(ask("alone", *parts, sampling=SHORT))


# ---- images ------------------------------------------------------------------------


def with_palette(*colours: int) -> Image:
    """The same indices, shown in other colours."""
    indices = PillowImage.frombytes("P", (84, 84), bytes(n // 588 % 3 for n in range(84 * 84)))
    indices.putpalette(colours)
    return submitted(indices)


def rotated_image(orientation: int) -> Image:
    """The same compressed pixels, stored for another way up."""
    exif = PillowImage.Exif()
    exif[0x0112] = orientation
    return submitted(random_image(3), "JPEG", exif=exif)


def transparent(alpha: int) -> Image:
    """The same colours, which shine through more or less."""
    shown = random_image(4).convert("RGBA")
    shown.putalpha(alpha)
    return submitted(shown)


PIXELS = random_image(5, 120, 60).tobytes()
LARGE = submitted(random_image(6, 168, 168))
TWINS: dict[str, tuple[Image, Image]] = {
    "another palette": (
        with_palette(255, 0, 0, 0, 255, 0, 0, 0, 255),
        with_palette(0, 255, 0, 255, 0, 0, 9, 9, 9),
    ),
    "equal bytes in another shape": (
        submitted(PillowImage.frombytes("RGB", (120, 60), PIXELS)),
        submitted(PillowImage.frombytes("RGB", (60, 120), PIXELS)),
    ),
    "as many patches in another grid": (
        submitted(random_image(7, 112, 56)),
        submitted(random_image(7, 112, 56).transpose(PillowImage.Transpose.TRANSPOSE)),
    ),
    "smaller": (LARGE, msgspec.structs.replace(LARGE, max_side_pixels=84)),
    "another way up": (rotated_image(1), rotated_image(6)),
    "more transparent": (transparent(255), transparent(99)),
}


def test_lookalike_prompts_get_their_own_answers(served: Served):
    engine, _ = new_engine(served)
    for name, twins in TWINS.items():
        wanted = [answer_alone(served, "Look", twin, "what?") for twin in twins]
        assert wanted[0] != wanted[1], name
        for number in (0, 1, 0):
            submit = ask(f"{name} {len(engine.ends)}", "Look", twins[number], "what?")
            submit = msgspec.structs.replace(submit, sampling=SHORT)
            assert engine.answer(submit) == wanted[number], name
    run_to_idle(engine)


def test_losslessly_reencoded_image_gets_equal_answer(video_served: Served):
    files = [submitted(A), submitted(A, compress_level=0), submitted(A, "WEBP", lossless=True)]
    engine, _ = new_engine(video_served)
    answers = [engine.answer(ask(f"{n}", file, "what?")) for n, file in enumerate(files)]
    assert answers == [EngineHarness(*video_served).answer(ask("a", A, "what?"))] * 3


AROUND: list[Asked] = [
    ("ab", A, "cd"),
    ("a", A, "cd"),
    ("abc", A, "cd"),
    (A, "cd"),
    ("ab", A),
    ("ab", A, "c"),
    ("ab", A, "ce"),
    ("ab", B, "cd"),
    ("ab", "cd"),
    ("ab", A, A, "cd"),
    ("ab", A, B, "cd"),
    ("ab", B, A, "cd"),
    ("ab", A, "cd"),
]


def test_prefixes_diverging_around_image_answer_as_alone(served: Served):
    """Each prompt diverges from earlier ones at another position: before, after or in the image."""
    engine, encoder = new_engine(served)
    for number, parts in enumerate(AROUND):
        tokens = engine.answer(ask(f"{number}", *parts, sampling=SHORT))
        assert tokens == answer_alone(served, *parts), number
    assert len(encoder.keys) == 2
    assert cached_tokens(engine, f"{len(AROUND) - 1}") >= engine.prompts["0"].spans[0].end
    run_to_idle(engine)


# ---- work that is done once ------------------------------------------------------------


def test_new_image_in_concurrent_requests_is_decoded_and_encoded_once(
    video_served: Served, decodes: CountedFunction
):
    engine, encoder = new_engine(video_served)
    asked = [ask(name, A, f"what of {name}?", A) for name in "ab"]
    together = threading.Barrier(2)

    def prepare_with_other(submit: Submit) -> Prepared:
        together.wait(60)
        return prepare(engine.preparer, submit)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(prepare_with_other, asked))
    for submit, outcome in zip(asked, outcomes, strict=True):
        engine.preparers.outcomes[submit.request_id] = outcome
        engine.add(submit)
    run_to_idle(engine)
    assert decodes.num_calls == len(encoder.keys) == 1
    for name in "ab":
        assert engine.tokens[name] == EngineHarness(*video_served).answer(
            ask("", A, f"what of {name}?", A)
        )


@pytest.mark.parametrize("gone", [("features", "pixels"), ("prefixes", "pixels")])
def test_image_in_one_cache_is_neither_decoded_nor_encoded(
    video_served: Served, decodes: CountedFunction, gone: tuple[str, str]
):
    engine, encoder = new_engine(video_served)
    first = engine.answer(ask("first", "Look", A, "what?"))
    for name in gone:
        getattr(engine.caches, name).clear()
    assert engine.answer(ask("again", "Look", A, "what?")) == first
    assert decodes.num_calls == len(encoder.keys) == 1
    run_to_idle(engine)


def test_requests_with_different_cache_salts_share_no_entries(
    video_served: Served, decodes: CountedFunction
):
    asked: list[Asked] = [("a text alone",), ("Look", A, "what?")]
    wanted = [answer_alone(video_served, *parts) for parts in asked]
    decodes.num_calls = 0
    engine, encoder = new_engine(video_served)
    for number, salt in enumerate(["", "one", "other"]):
        for parts, tokens in zip(asked, wanted, strict=True):
            submit = ask(f"{salt} {len(parts)}", *parts, sampling=SHORT)
            assert engine.answer(msgspec.structs.replace(submit, cache_salt=salt)) == tokens
        assert cached_tokens(engine, f"{salt} 1") == 0
        assert decodes.num_calls == len(encoder.keys) == len(set(encoder.keys)) == number + 1
    run_to_idle(engine)


# ---- videos --------------------------------------------------------------------------

CLIP = video_of(video_files.encode(video_files.noise(1, 7), fps=2))
GIF = video_files.encode(video_files.noise(2, 4), "gif", fps=2)


@pytest.fixture
def clip_decodes(monkeypatch: pytest.MonkeyPatch) -> CountedFunction:
    counted = CountedFunction(DECODERS.video)
    monkeypatch.setattr(DECODERS, "video", counted)
    return counted


def test_cached_clip_is_not_decoded_again(video_served: Served, clip_decodes: CountedFunction):
    wanted = {q: answer_alone(video_served, "See", CLIP, q) for q in ("what?", "which?")}
    clip_decodes.num_calls = 0
    engine, encoder = new_engine(video_served)
    for number, question in enumerate(["what?", "which?", "what?"]):
        submit = ask(f"{number}", "See", CLIP, question, sampling=SHORT)
        assert engine.answer(submit) == wanted[question]
    assert clip_decodes.num_calls == 1
    assert len(encoder.keys) == len(set(encoder.keys)) > 1
    for gone in (engine.caches.prefixes, engine.caches.pixels):
        gone.clear()
    assert engine.answer(ask("late", "See", CLIP, "what?", sampling=SHORT)) == wanted["what?"]
    assert clip_decodes.num_calls == 1
    run_to_idle(engine)


def test_different_frames_of_clip_are_cached_separately(video_served: Served):
    engine, _ = new_engine(video_served)
    answers = []
    for limits in (VideoSettings(), VideoSettings(fps=1.0), VideoSettings(max_side_pixels=64)):
        decoders = Decoders(ImageSettings(), limits, 1)
        plain = EngineHarness(video_served[0], new_preparer(video_served[0], decoders))
        answers.append(plain.answer(ask("a", CLIP, "what?")))
        engine.preparers.preparer = new_preparer(video_served[0], decoders, caches=engine.caches)
        assert engine.answer(ask(f"{len(answers)}", CLIP, "what?")) == answers[-1]
    assert len(set(map(tuple, answers))) == 3


def test_gif_video_and_gif_image_are_cached_separately(video_served: Served):
    shown: list[Part] = [image_of(GIF, "GIF", 96, 64), video_of(GIF, "GIF")]
    engine, _ = new_engine(video_served)
    for number, part in enumerate([*shown, *shown]):
        assert engine.answer(ask(f"{number}", part, "what?", sampling=SHORT)) == answer_alone(
            video_served, part, "what?"
        )
    run_to_idle(engine)
