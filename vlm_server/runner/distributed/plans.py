"""Plans as messages to other ranks, and back."""

from __future__ import annotations

from typing import Any

from vlm_server.interfaces import NewRequest, PreparedPrompt, SchedulerOutput
from vlm_server.protocol import SamplingParams
from vlm_server.runner.distributed.messages import New, RankPlan, Segment
from vlm_server.runner.distributed.prefixes import FollowingPrefixes


def message_of(plan: SchedulerOutput, dropped: tuple[int, ...]) -> RankPlan:
    """The part of `plan` that other ranks need."""
    return RankPlan(
        finished_seqs=plan.finished_seqs,
        stored_prompts=plan.stored_prompts,
        stored_answers=plan.stored_answers,
        new=tuple(map(_new, plan.new)),
        decode=plan.decode,
        prefill=plan.prefill,
        batched_prefills=plan.batched_prefills,
        dropped=dropped,
    )


def plan_of(message: RankPlan, prefixes: FollowingPrefixes) -> SchedulerOutput:
    """The plan for this rank's runner. Raises KeyError for a segment that is not here."""
    return SchedulerOutput(
        finished_seqs=message.finished_seqs,
        stored_prompts=message.stored_prompts,
        stored_answers=message.stored_answers,
        new=tuple(_request(new, prefixes) for new in message.new),
        decode=message.decode,
        prefill=message.prefill,
        batched_prefills=message.batched_prefills,
    )


def _new(request: NewRequest) -> New:
    prompt = request.prompt
    features: tuple[Any, ...] = request.features
    return New(
        request_id=request.request_id,
        n=request.sampling.n,
        token_ids=prompt.token_ids,
        spans=prompt.spans,
        positions=prompt.positions,
        token_types=prompt.token_types,
        rope_delta=prompt.rope_delta,
        snapshot_points=prompt.snapshot_points,
        atomic_prefill_tokens=prompt.atomic_prefill_tokens,
        prefix=tuple(Segment(s.number, num_tokens) for s, num_tokens in request.prefix.segments),
        features=features,
    )


def _request(new: New, prefixes: FollowingPrefixes) -> NewRequest:
    """Of rank 0's sampling parameters only the number of answers matters here."""
    prompt = PreparedPrompt(
        token_ids=new.token_ids,
        spans=new.spans,
        positions=new.positions,
        token_types=new.token_types,
        rope_delta=new.rope_delta,
        snapshot_points=new.snapshot_points,
        atomic_prefill_tokens=new.atomic_prefill_tokens,
    )
    sampling = SamplingParams(n=new.n)
    return NewRequest(new.request_id, prompt, sampling, prefixes.prefix(new.prefix), new.features)
