"""Turns the tokens that a step sampled into the deltas that clients get."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from tokenizers import Tokenizer

from vlm_server.engine.output.detokenizer import decode_logprobs
from vlm_server.engine.output.pieces import Piece, ReasoningPiece
from vlm_server.engine.request.request import Request
from vlm_server.engine.scheduler.stats import SchedulerStats
from vlm_server.interfaces import SeqId, StepResult, TokenLogprobs
from vlm_server.protocol import Delta


class OutputProcessor:
    """Appends sampled tokens to their requests, up to the end of each choice."""

    def __init__(self, decoder: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids

    def append(
        self, request: Request, seq: SeqId, result: StepResult, now: float, counts: SchedulerStats
    ) -> list[Delta]:
        """The deltas of a sequence's tokens; those after the end of its choice are dropped."""
        request.deadlines.record_token(now)
        token_ids, deltas = result.tokens[seq], list[Delta]()
        logprobs: Sequence[TokenLogprobs | None]
        logprobs = result.logprobs.get(seq) or [None] * len(token_ids)
        choice = request.choices[seq.choice]
        num_before = choice.num_generated
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            deltas += self._append_token(request, seq, token_id, logprob)
            if choice.finish_reason is not None:
                break
        num_appended = choice.num_generated - num_before
        counts.generated_tokens += num_appended
        if drafts := result.drafts.get(seq):
            num_others = len(token_ids) - drafts.num_accepted - 1  # sampled before the first draft
            num_accepted = min(max(num_appended - num_others, 0), drafts.num_accepted)
            choice.num_accepted += num_accepted
            choice.num_rejected += drafts.num_drafted - num_accepted
            counts.add_draft(drafts.num_drafted, num_accepted, is_trained=drafts.is_trained)
        return deltas

    def _append_token(
        self, request: Request, seq: SeqId, token_id: int, logprob: TokenLogprobs | None
    ) -> list[Delta]:
        pieces = request.append_token(seq, token_id, self._eos_token_ids)
        choice = request.choices[seq.choice]
        deltas = [_delta(seq, piece) for piece in pieces]
        if answer_logprob := decode_logprobs(self._decoder, token_id, logprob):
            deltas[0] = replace(deltas[0], logprobs=answer_logprob)
        if choice.finish_reason is not None:
            reason = choice.finish_reason
            deltas[-1] = replace(deltas[-1], finish_reason=reason, stop=choice.stop)
        if request.sampling.reports_usage:
            deltas[-1] = replace(deltas[-1], usage=request.usage)
        return deltas


def _delta(seq: SeqId, piece: Piece) -> Delta:
    request_id, choice = seq
    match piece:
        case str():
            return Delta(request_id, piece, choice=choice)
        case ReasoningPiece(text):
            return Delta(request_id, text, choice=choice, is_reasoning=True)
        case _:
            return Delta(request_id, "", choice=choice, tool_call=piece)
