"""Greedy sampling among options: token by token, with the end where an option is complete."""

from __future__ import annotations

from vlm_server.runner.prefill.branches import OptionScore, greedy_option


def score(*tokens: float, end: float = -1.0) -> OptionScore:
    return OptionScore(tokens, end, end)


def test_first_token_decides_before_whole_option() -> None:
    options = [(1, 2), (3, 4), (3, 5)]
    scores = [score(-0.7, -0.1), score(-0.6, -2.0), score(-0.6, -1.9)]
    assert greedy_option(options, scores) == 2
    assert max(range(3), key=lambda i: scores[i].total) == 0


def test_end_competes_with_longer_options() -> None:
    options = [(1,), (1, 2)]
    assert greedy_option(options, [score(-0.1, end=-0.5), score(-0.1, -0.9)]) == 0
    assert greedy_option(options, [score(-0.1, end=-0.9), score(-0.1, -0.5)]) == 1


def test_single_option_is_chosen() -> None:
    assert greedy_option([(7, 8)], [score(-9.0, -9.0)]) == 0
