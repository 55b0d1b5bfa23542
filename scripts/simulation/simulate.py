"""Users, a gateway and workers, run until all that was asked is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import simpy

from scripts.simulation.costs import Costs
from scripts.simulation.gateway import Gateway, Policy
from scripts.simulation.processor import Processor, share_machine
from scripts.simulation.request import Picture, Question
from scripts.simulation.summary import Asked
from scripts.simulation.worker import Limits, Process, Worker
from scripts.simulation.workload import Conversation, Workload

_ASK_AGAIN_SECONDS = 0.2
"""After a worker was lost: what a gateway or client waits before it tries another."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers, each on a machine of its own unless `one_machine`.

    lost_at: when one of them is lost, which is the one with most requests then.
    """

    workers: int = 1
    cores: int = 1
    limits: Limits = field(default_factory=Limits)
    policy: Policy = Policy.KEY
    assigned: Mapping[str, int] | None = None
    one_machine: bool = False
    lost_at: float | None = None


@dataclass(frozen=True)
class Result:
    """utilisation: the share of the time that each worker's processor had work."""

    asked: Sequence[Asked]
    utilisation: Sequence[float]
    evicted_tokens: int
    seconds: float


def simulate(costs: Costs, workload: Workload, fleet: Fleet) -> Result:
    """The same arguments give the same result."""
    env = simpy.Environment()
    processors = [Processor(env, fleet.cores) for _ in range(fleet.workers)]
    if fleet.one_machine:
        share_machine(processors, costs.slowdown)
    workers = [
        Worker(env, str(number), costs, fleet.limits, processor)
        for number, processor in enumerate(processors)
    ]
    gateway = Gateway(workers, fleet.policy, fleet.assigned, workload.seed)
    asked: list[Asked] = []
    users = [
        env.process(_User(env, costs, workload, gateway, user, asked).run())
        for user in range(workload.users)
    ]
    if fleet.lost_at is not None:
        env.process(_lose_one(env, workers, fleet.lost_at))
    env.run(until=simpy.AllOf(env, users))
    cores = fleet.cores * env.now
    utilisation = [one.busy_seconds / cores if cores else 0.0 for one in processors]
    evicted = sum(worker.evicted_tokens for worker in workers)
    return Result(asked, utilisation, evicted, env.now)


def _lose_one(env: simpy.Environment, workers: Sequence[Worker], at: float) -> Process:
    yield env.timeout(at)
    max(workers, key=lambda worker: worker.num_requests).lose()


class _User:
    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        workload: Workload,
        gateway: Gateway,
        user: int,
        asked: list[Asked],
    ) -> None:
        self._env = env
        self._costs = costs
        self._workload = workload
        self._gateway = gateway
        self._user = user
        self._asked = asked

    def run(self) -> Process:
        for conversation in self._workload.conversations(self._user):
            for turn, seconds in enumerate(conversation.think_seconds):
                if self._env.now + seconds >= self._workload.seconds:
                    return
                yield self._env.timeout(seconds)
                yield from self._ask(self._question(conversation, turn))

    def _ask(self, question: Question) -> Process:
        """Ask until it is answered; what was lost is asked again."""
        sent, first = self._env.now, None
        while True:
            worker = self._gateway.choose(question.conversation)
            request = worker.ask(question)
            if (yield request.first) and first is None:
                first = self._env.now
            if (yield request.last):
                break
            yield self._env.timeout(_ASK_AGAIN_SECONDS)
        assert first is not None
        self._asked.append(
            Asked(
                key=question.conversation,
                turn=question.turn,
                worker=worker.name,
                sent=sent,
                ttft=first - sent,
                ended=self._env.now,
                prompt_tokens=question.prompt_tokens,
                cached_tokens=request.num_cached_tokens,
                answer_tokens=question.answer_tokens,
            )
        )

    def _question(self, conversation: Conversation, turn: int) -> Question:
        """The prompt of a turn; its pictures end where they do in later turns' prompts."""
        work, costs = self._workload, self._costs
        pictures = []
        for number in range(turn + 1):
            rest = costs.turn_text_tokens if number else costs.first_text_tokens - costs.head_tokens
            end = work.prompt_tokens(costs, number) - max(1, rest // 2)
            for which in range(work.pictures):
                after = (work.pictures - 1 - which) * work.picture_tokens
                name = f"{conversation.key}/{number}/{which}"
                pictures.append(Picture(name, work.picture_tokens, end - after))
        return Question(
            conversation.key,
            turn,
            work.prompt_tokens(costs, turn),
            tuple(pictures),
            work.answer_tokens,
        )
