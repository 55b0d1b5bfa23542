"""The scenario `small-mac`: two agents with long conversations, for servers with little memory.

Nothing of a conversation should be prefilled twice, although both take more memory than a quarter
of what the weights leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, pairwise

from vlm_server.cli.bench.figures import Figure, Unit, median, milliseconds
from vlm_server.cli.bench.material import ChatMessage, Material, assistant, user
from vlm_server.cli.bench.servers import Client
from vlm_server.cli.client.answer import TimedAnswer

TURNS = 10
TOKENS = 23_000
"""The length of an agent's last prompt."""
ANSWER_TOKENS = 32
_AGENTS = 2
_TURN_WORDS = TOKENS // TURNS * 3 // 4
"""Words of a first turn; later ones have as many as `TOKENS` needs."""
_MAX_TURN_WORDS = 4 * _TURN_WORDS
_TOLERATED_SHARE = 0.01
"""The share of a prompt that may be prefilled twice: a template may end prompts otherwise."""


async def small_mac(client: Client, material: Material) -> list[Figure]:
    """Two agents at the same time, each with 10 turns of text; the last prompt has 23,000 tokens.

    The rest of a prompt that is not cached should be only what is new in its turn.
    """
    texts = [[material.words(_MAX_TURN_WORDS) for _ in range(TURNS)] for _ in range(_AGENTS)]
    systems = [material.system() for _ in range(_AGENTS)]
    agents = [_agent(client, system, text) for system, text in zip(systems, texts, strict=True)]
    conversations = await asyncio.gather(*agents)
    again = list(chain.from_iterable(map(_prefilled_again, conversations)))
    last = [answers[-1] for answers in conversations]
    return [
        Figure("prompt, last turn", median(a.prompt_tokens for a in last), Unit.TOKENS),
        milliseconds("TTFT, turn 1", median(answers[0].ttft for answers in conversations)),
        milliseconds(
            "TTFT, later turns", median(a.ttft for answers in conversations for a in answers[1:])
        ),
        Figure("prefilled again, sum", _sum([tokens for tokens, _ in again]), Unit.TOKENS),
        Figure("nothing is prefilled again", _is_none(again), Unit.MET),
    ]


async def _agent(client: Client, system: ChatMessage, texts: list[list[str]]) -> list[TimedAnswer]:
    messages, answers, num_words = [system], list[TimedAnswer](), _TURN_WORDS
    prompt_tokens = 0
    for turn, text in enumerate(texts, start=1):
        messages.append(user(" ".join(text[:num_words])))
        answers.append(await client.ask(messages, ANSWER_TOKENS))
        messages.append(assistant(answers[-1].text))
        before, prompt_tokens = prompt_tokens, answers[-1].prompt_tokens or 0
        if turn < TURNS and prompt_tokens > before:
            tokens_per_turn = max(0, TOKENS - prompt_tokens) / (TURNS - turn)
            num_words = max(1, round(num_words * tokens_per_turn / (prompt_tokens - before)))
    return answers


def _prefilled_again(answers: list[TimedAnswer]) -> list[tuple[int | None, int | None]]:
    """Of each later turn: tokens of the prompt before that were not cached; tokens of its prompt.

    None if the server does not say.
    """
    return [
        (
            None
            if before.prompt_tokens is None or answer.cached_tokens is None
            else max(0, before.prompt_tokens - answer.cached_tokens),
            answer.prompt_tokens,
        )
        for before, answer in pairwise(answers)
    ]


def _sum(counts: Sequence[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return float(sum(known)) if known and len(known) == len(counts) else None


def _is_none(again: list[tuple[int | None, int | None]]) -> float | None:
    """Whether no turn prefilled more than the tolerated share twice; None if one is unknown."""
    shares = [
        None if tokens is None or not prompt_tokens else tokens / prompt_tokens
        for tokens, prompt_tokens in again
    ]
    if any(share is None for share in shares):
        return None
    return float(all(share <= _TOLERATED_SHARE for share in shares if share is not None))
