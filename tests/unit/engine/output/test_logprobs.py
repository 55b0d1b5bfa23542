"""The bytes of tokens that are parts of characters are their own."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from tests.unit.engine.output.test_detokenizer import byte_id, tokenizer
from vlm_server.engine.output.logprobs import logprobs
from vlm_server.interfaces import TokenLogprobs

TEXT = "a 日本 é😀"


def bytes_of(decoder: Tokenizer, ids: list[int]) -> list[bytes]:
    found = TokenLogprobs(-1.0, tuple((token_id, -2.0) for token_id in ids))
    (entry,) = logprobs(decoder, ids[0], found)
    assert entry.token.utf8 == entry.top[0].utf8
    return [top.utf8 for top in entry.top]


def test_of_byte_level_tokens() -> None:
    encoded = TEXT.encode()
    assert bytes_of(tokenizer(), [byte_id(b) for b in encoded]) == [bytes([b]) for b in encoded]
    merged = tokenizer().encode(TEXT).ids
    assert any(0 < len(part) != 1 for part in bytes_of(tokenizer(), merged))
    assert b"".join(bytes_of(tokenizer(), merged)) == encoded


def test_of_tokens_of_one_byte() -> None:
    words = {"▁é": 0, "\ufffd": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    made = Tokenizer(models.BPE(words, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    encoded = "日".encode()
    assert b"".join(bytes_of(made, [2 + byte for byte in encoded])) == encoded
    assert bytes_of(made, [0, 1]) == [" é".encode(), "\ufffd".encode()]
