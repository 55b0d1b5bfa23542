r"""Bounds on the numbers in JSON answers, which a schema need not have.

JSON has no longest number, so a model that repeats a digit never ends one. Bounded numbers are all
integers of 64 bits, which readers of JSON take exactly or as doubles, and decimals that have up to
17 significant digits, as all doubles have, with exponents of up to two digits.
"""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

_MAX_INTEGER = str(2**63 - 1)
_MAX_DIGITS = 17
"""The most significant digits of a decimal, and the most zeros after its point before them."""


def _integers() -> str:
    length = len(_MAX_INTEGER)
    smaller = [
        rf"{_MAX_INTEGER[:i]}[{int(i == 0)}-{int(digit) - 1}][0-9]{{{length - 1 - i}}}"
        for i, digit in enumerate(_MAX_INTEGER)
        if int(digit) > int(i == 0)
    ]
    return "|".join(["0", rf"[1-9][0-9]{{0,{length - 2}}}", *smaller, _MAX_INTEGER])


def _decimals() -> str:
    zeros = rf"0{{1,{_MAX_DIGITS}}}"
    below_one = rf"0\.({zeros}|({zeros})?[1-9][0-9]{{0,{_MAX_DIGITS - 1}}})"
    others = [
        rf"[1-9][0-9]{{{count - 1}}}\.[0-9]{{1,{_MAX_DIGITS - count}}}"
        for count in range(1, _MAX_DIGITS)
    ]
    return "|".join([below_one, *others])


_NUMBER = rf"-?({_integers()}|{_decimals()})([eE][+-]?[0-9]{{1,2}})?"
_OTHERS = r'"([^"\\]|\\.)*"|true|false|null|[\[\]{},: \n]'
BOUNDED_JSON = rf"/({_NUMBER})?(({_OTHERS})({_NUMBER})?)*/s"
"""A regular expression of Lark: text in which strings, words, marks and bounded numbers alternate.

It takes all JSON with such numbers, and more: the grammar beside it says what else is allowed.
"""


class BoundedMatcher:
    """Follows an answer with the grammar of its constraint and with that of bounded numbers.

    The constraint wins: where it needs a number out of bounds, that ends as soon as it may.
    """

    def __init__(
        self, tokenizer: LLTokenizer, constraint: LLMatcher, bounds: LLMatcher | None
    ) -> None:
        self._tokenizer = tokenizer
        self._constraint = constraint
        self._bounds = bounds
        self._is_beyond = False
        """Whether the answer is in a number out of bounds."""

    def deep_copy(self) -> BoundedMatcher:
        bounds = self._bounds and self._bounds.deep_copy()
        copy = BoundedMatcher(self._tokenizer, self._constraint.deep_copy(), bounds)
        copy._is_beyond = self._is_beyond
        return copy

    def is_error(self) -> bool:
        return self._constraint.is_error()

    def forced_tokens(self) -> list[int]:
        """The tokens that the constraint forces next, if known."""
        return self._constraint.compute_ff_tokens()

    def mask(self) -> bytes:
        """The bits of the allowed tokens."""
        mask = self._constraint.compute_bitmask()
        if self._bounds is None:
            return mask
        allowed = bounded = int.from_bytes(mask, "little")
        if not self._is_beyond:
            bounded &= int.from_bytes(self._bounds.compute_bitmask(), "little")
            self._is_beyond = not bounded
        if self._is_beyond:
            others = (allowed & ~_bits(self._tokenizer, start) for start in ("[0-9]", "0"))
            bounded = next(filter(None, others), allowed)
        return bounded.to_bytes(len(mask), "little")

    def append(self, token_id: int) -> None:
        """Append a token; one that is not allowed leads to an error."""
        self._constraint.consume_token(token_id)
        if self._bounds is None:
            return
        if self._is_beyond:
            if _bits(self._tokenizer, "[0-9]") >> token_id & 1:
                return
            self._is_beyond = False
            self._bounds.reset()  # the number has ended
        if not self._bounds.consume_token(token_id):
            self._bounds = None

    def try_append(self, token_id: int) -> bool:
        """Append a token if it is allowed, and not in a number out of bounds; whether it was."""
        for matcher in (self._constraint, self._bounds):
            if matcher is not None and matcher.validate_tokens([token_id]) != 1:
                return False
        if not self._is_beyond:
            self.append(token_id)
        return not self._is_beyond


@cache
def _bits(tokenizer: LLTokenizer, start: str) -> int:
    """The tokens that begin with the regular expression `start`, as bits."""
    grammar = LLMatcher.grammar_from_lark(rf"start: /{start}(.|\n)*/")
    return int.from_bytes(LLMatcher(tokenizer, grammar).compute_bitmask(), "little")
