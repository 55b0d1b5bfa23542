"""Agents that forget: old screenshots are taken out of the conversation, their words stay.

Everything after a picture that was taken out is another prompt, so it is prefilled again.
"""

from __future__ import annotations

from vlm_server.cli.bench.client import Client
from vlm_server.cli.bench.figures import Figure, mean, milliseconds, token_count
from vlm_server.cli.bench.scenarios.material import Material, Message, assistant, user
from vlm_server.cli.client import routing_key
from vlm_server.cli.client.answer import Answer

TURNS = 12
_KEPT = 3
_MOST = 6
_SETTLED = 5
"""From this turn on, `TURNS` ends after whole periods of either agent."""


async def agent_window(client: Client, material: Material) -> list[Figure]:
    """Only the latest three pictures stay: from the fourth turn on, each turn drops one."""
    return await _agent(client, material, most=_KEPT)


async def agent_drops(client: Client, material: Material) -> list[Figure]:
    """Up to six pictures stay; then all but the latest three are dropped at once."""
    return await _agent(client, material, most=_MOST)


async def _agent(client: Client, material: Material, most: int) -> list[Figure]:
    messages: list[Message] = [material.system()]
    answers: list[Answer] = []
    key = ""
    shown: dict[int, str] = {}
    """The words of the messages that still have their picture, by their place."""
    for turn in range(1, TURNS + 1):
        words = f"Step {turn}: what changed?"
        shown[len(messages)] = words
        messages.append(user(words, material.image()))
        if len(shown) > most:
            for place in sorted(shown)[:-_KEPT]:
                messages[place] = user(shown.pop(place))
        key = key or routing_key.of_messages(messages)
        answers.append(await client.ask(messages, 12, key))
        messages.append(assistant(answers[-1].text))
    return _figures(answers)


def _figures(answers: list[Answer]) -> list[Figure]:
    settled = answers[_SETTLED - 1 :]
    again = [
        answer.prompt_tokens - answer.cached_tokens
        if answer.prompt_tokens is not None and answer.cached_tokens is not None
        else None
        for answer in settled
    ]
    by_turn = [
        milliseconds(f"TTFT, turn {turn}", answer.ttft) for turn, answer in enumerate(answers, 1)
    ]
    return [
        *by_turn,
        milliseconds(f"TTFT, mean from turn {_SETTLED} on", mean([a.ttft for a in settled])),
        token_count(f"not cached, mean from turn {_SETTLED} on", mean(again)),
    ]
