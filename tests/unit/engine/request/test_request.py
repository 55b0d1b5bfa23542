"""One request's tokens to text and to its end: EOS, stop strings, limits, usage."""

from collections.abc import Sequence

import pytest

from tests.unit.engine.fakes import (
    EOS,
    SPECIAL,
    ByteDecoder,
    FakeFeatures,
    prepared,
    prompt,
    submit,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.output.pieces import Piece
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import IllegalTransition, State
from vlm_server.interfaces import SeqId
from vlm_server.protocol import SamplingParams

EOS_IDS = frozenset({EOS})


def decoding(max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Request:
    submitted = submit("a", stop=stop, max_tokens=max_tokens)
    return in_decode(
        Request(submitted, submitted.sampling, ByteDecoder(), clock=lambda: 0.0), max_tokens
    )


def in_decode(request: Request, max_tokens: int) -> Request:
    request.move_to(State.PREPARING)
    request.on_prepared(prepared(prompt()), max_tokens)
    request.admit(transient_bytes=0)
    assert request.submit is not None, "the device may have to read it again"
    request.start_decode()
    return request


def feed(request: Request, tokens: list[int], choice: int = 0) -> str:
    text = ""
    for token in tokens:
        assert not end_of(request, choice), "a token after the end"
        text += joined(request.append_token(SeqId("a", choice), token, EOS_IDS))
    return text


def joined(pieces: Sequence[Piece]) -> str:
    """The whole text, which is content."""
    return "".join(piece for piece in pieces if isinstance(piece, str))


def end_of(request: Request, choice: int = 0) -> str | None:
    return request.choices[choice].finish_reason


def test_eos_ends_request_without_text():
    request = decoding()
    assert feed(request, [*b"hi", EOS]) == "hi"
    assert end_of(request) == "stop"
    assert request.usage.completion_tokens == 3
    assert request.usage.prompt_tokens == 5


def test_max_tokens_ends_request_with_all_its_text():
    request = decoding(max_tokens=2)
    assert feed(request, [*b"hi"]) == "hi"
    assert end_of(request) == "length"


def test_eos_as_last_allowed_token_is_finish_reason_stop():
    request = decoding(max_tokens=3)
    assert feed(request, [*b"hi", EOS]) == "hi"
    assert end_of(request) == "stop"


def test_stop_string_across_tokens_is_cut_off():
    request = decoding(stop=("END",))
    assert feed(request, [*b"the END"]) == "the "
    assert end_of(request) == "stop"


def test_stop_string_at_max_tokens_is_finish_reason_stop():
    request = decoding(max_tokens=3, stop=("END",))
    assert feed(request, [*b"END"]) == ""
    assert end_of(request) == "stop"


@pytest.mark.parametrize("last", [EOS, ord("N")])
def test_partial_stop_string_at_end_is_text(last: int):
    request = decoding(max_tokens=2, stop=("END",))
    assert feed(request, [ord("E"), last]) == ("E" if last == EOS else "EN")


def test_partial_character_at_end_is_replacement_character():
    request = decoding(max_tokens=2)
    assert feed(request, [*"€".encode()][:2]) == "\ufffd"
    assert end_of(request) == "length"


def test_stop_string_before_partial_character_is_found():
    """A token may end one word and begin a character: its text waits for the character."""

    class Words(ByteDecoder):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join({1: "a", 2: "END\ufffd"}[i] for i in ids)

    submitted = submit("a", stop=("END",))
    request = in_decode(Request(submitted, submitted.sampling, Words(), clock=lambda: 0.0), 2)
    assert feed(request, [1, 2]) == "a"
    assert end_of(request) == "stop"


def test_control_token_counts_without_text():
    request = decoding(max_tokens=3)
    assert feed(request, [ord("a"), SPECIAL, ord("b")]) == "ab"
    assert request.usage.completion_tokens == 3


def test_submitted_images_are_dropped_after_prefill():
    assert decoding().submit is None


def test_illegal_state_change_raises():
    request = decoding()
    request.move_to(State.FINISHED_ABORTED)
    with pytest.raises(IllegalTransition):
        request.move_to(State.FINISHED_ANSWERED)
    assert request.state is State.FINISHED_ABORTED


def test_last_choice_to_end_finishes_request():
    submitted = submit("a", stop=("END",), n=3)
    request = in_decode(Request(submitted, submitted.sampling, ByteDecoder(), clock=lambda: 0.0), 6)
    assert feed(request, [*b"the E"], 2) == "the "
    assert feed(request, [*"é".encode()][:1], 0) == ""
    assert feed(request, [*b"hi", EOS], 1) == "hi"
    assert request.seqs == [SeqId("a", 0), SeqId("a", 2)]
    assert feed(request, [*[*"é".encode()][1:], EOS], 0) == "é"
    assert not request.state.is_finished
    assert feed(request, [*b"N"], 2) == "EN"
    assert [end_of(request, choice) for choice in range(3)] == ["stop", "stop", "length"]
    assert request.seqs == []
    assert request.state is State.FINISHED_ANSWERED
    assert request.usage.completion_tokens == 3 + 3 + 6
    assert request.usage.prompt_tokens == 5


def test_cache_references_of_request_are_released_once():
    caches = Caches(encoder_bytes=100)
    caches.store_features("0", FakeFeatures("features of 0")).release()
    prepared_prompt = prepared(prompt(images=1), caches)
    request = Request(submit("a", images=1), SamplingParams(), ByteDecoder(), clock=lambda: 0.0)
    request.move_to(State.PREPARING)
    request.on_prepared(prepared_prompt, 1)
    assert caches.features.stats().pinned_bytes == 8
    request.release_references()
    assert caches.features.stats().pinned_bytes == 0
    request.release_references()  # it may be released at its first chunk, and at its end
    with pytest.raises(RuntimeError, match="released twice"):
        prepared_prompt.references.release()
