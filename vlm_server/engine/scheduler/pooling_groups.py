"""Pooling requests: each is a group of requests, one for every input, with one end.

The scheduler knows the inputs alone. They share batches, whatever request they are of, and only a
few of each request are live at a time, so that a request with thousands stays cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.engine.request.request import Request, group_id_of, input_id, input_index
from vlm_server.protocol import (
    ContentPart,
    Decision,
    DocumentUse,
    Finished,
    ImagePart,
    ImageUse,
    Message,
    Pooling,
    RequestProgress,
    Submit,
    Timeline,
    Usage,
    Vectors,
    VideoPart,
    VideoUse,
)

_MAX_LIVE = 128
"""The most inputs that are live at a time, which all requests share: a batch or two of short texts.
Each request has one at least."""

Rows = NDArray[np.float32]
"""(vectors, dimensions): one vector, or one for each token of an input."""
Result = Rows | Decision
"""The vectors of an input, its score, or the decision of a question; that in the order of
`PreparedPrompt.options`."""

_MIN_NORM = 1e-9


@dataclass(slots=True)
class _Group:
    """A pooling request: its inputs to come, those that are live, and the results so far."""

    submit: Submit
    pooling: Pooling
    began_at: float
    first_index: int
    next_index: int
    live: set[str] = field(default_factory=set)
    results: dict[int, Result] = field(default_factory=dict)
    images: dict[int, tuple[ImageUse, ...]] = field(default_factory=dict)
    videos: dict[int, tuple[VideoUse, ...]] = field(default_factory=dict)
    documents: tuple[DocumentUse, ...] = ()
    """Of the conversation that questions share."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    """The phases of the first input that ended."""

    @property
    def indices(self) -> range:
        """The numbers of the inputs that are requests of their own."""
        return range(self.first_index, len(self.submit.inputs))

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, 0, self.cached_tokens)


class PoolingGroups:
    """The live pooling requests, by id."""

    def __init__(self, clock: Callable[[], float], *, is_multi: bool, of_pairs: bool) -> None:
        """is_multi: whether the model makes a vector for each token. of_pairs: whether it scores a
        document with its query; the query alone is no input then."""
        self._clock = clock
        self._is_multi = is_multi
        self._of_pairs = of_pairs
        self._groups: dict[str, _Group] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def open(self, submit: Submit) -> None:
        """Take over a pooling request; `next_inputs` has its inputs."""
        assert submit.pooling is not None
        first = 1 if self._has_query(submit.pooling) else 0
        group = _Group(submit, submit.pooling, self._clock(), first, next_index=first)
        self._groups[submit.request_id] = group

    def next_inputs(self, group_id: str) -> Iterator[Submit]:
        """The inputs to enqueue now, each as a request of its own."""
        group, share = self._groups[group_id], max(1, _MAX_LIVE // len(self._groups))
        if group.pooling.task == "decide" and not group.results:
            share = 1  # the others find its conversation in the prefix cache
        of_pairs = self._has_query(group.pooling)
        while len(group.live) < share and group.next_index < len(group.submit.inputs):
            seconds = self._clock() - group.began_at
            part = _input_of(group.submit, group.next_index, seconds, of_pairs=of_pairs)
            group.next_index += 1
            group.live.add(part.request_id)
            yield part

    def finish(self, request: Request, result: Result) -> Finished | None:
        """Record the result of an input; returns the group's end if it was the last one."""
        group_id, index = group_id_of(request.request_id), input_index(request.request_id)
        group = self._groups[group_id]
        group.live.remove(request.request_id)
        if not group.results:
            group.timeline = request.timeline
        if isinstance(result, Decision):
            group.results[index] = _of_request(result, request.prompt.option_places)
        else:
            group.results[index] = cut(result, group.pooling.dimensions)
        group.images[index], group.videos[index] = request.prompt.images, request.prompt.videos
        group.documents = request.prompt.documents
        group.prompt_tokens += request.prompt.num_tokens
        group.cached_tokens += request.num_cached_tokens
        if len(group.results) < len(group.indices):
            return None
        del self._groups[group_id]
        return self._finished(group)

    def close(self, group_id: str) -> tuple[Usage, set[str]]:
        """End a group early; returns its usage so far, and the requests of its live inputs."""
        group = self._groups.pop(group_id)
        return group.usage, group.live

    def progress(self) -> Iterator[RequestProgress]:
        """The progress of each group, in inputs."""
        for group_id, group in self._groups.items():
            yield RequestProgress(group_id, "prefill", len(group.results), len(group.indices))

    def _has_query(self, pooling: Pooling | None) -> bool:
        """Whether the first input is a query that is scored with each of the others."""
        return self._of_pairs and pooling is not None and pooling.task == "score"

    def _timeline(self, group: _Group) -> Timeline:
        """The phases of the first input; its last one lasts until now."""
        *phases, last = group.timeline.phases
        end = group.timeline.began_at + sum(phase.seconds for phase in phases)
        now = msgspec.structs.replace(last, seconds=self._clock() - end)
        return Timeline(group.timeline.began_at, (*phases, now))

    def _finished(self, group: _Group) -> Finished:
        indices = group.indices
        finished = Finished(group.submit.request_id, group.usage, timeline=self._timeline(group))
        results = [group.results[index] for index in indices]
        decisions = tuple(each for each in results if isinstance(each, Decision))
        # Questions share their conversation, which comes first.
        shown = indices[:1] if decisions else indices
        finished = msgspec.structs.replace(
            finished,
            images=tuple(image for index in shown for image in group.images[index]),
            videos=tuple(video for index in shown for video in group.videos[index]),
            documents=group.documents,
            decisions=decisions,
        )
        rows = [each for each in results if not isinstance(each, Decision)]
        if decisions:
            return finished
        if self._of_pairs:
            return msgspec.structs.replace(finished, scores=tuple(each.item() for each in rows))
        if group.pooling.task == "score":
            scores = tuple(similarity(rows[0], document) for document in rows[1:])
            return msgspec.structs.replace(finished, scores=scores)
        vectors = tuple(
            Vectors(each.astype("<f4", copy=False).tobytes(), each.shape[1], self._is_multi)
            for each in rows
        )
        return msgspec.structs.replace(finished, vectors=vectors)


def _of_request(decision: Decision, places: Sequence[int]) -> Decision:
    """`decision` in the order of the request's options; `places`: see `PreparedPrompt`.

    Of equal options the first has the probability of both, and the others have none.
    """
    left = dict(enumerate(decision.logprobs))
    logprobs = tuple(left.pop(place, -math.inf) for place in places)
    return Decision(logprobs, places.index(decision.greedy))


def _input_of(submit: Submit, index: int, seconds: float, *, of_pairs: bool) -> Submit:
    """Input `index` of a pooling request as a request, `seconds` after that one began.

    It has the request's messages before its own; with `of_pairs`, those of the query.
    """
    given, pooling = submit.inputs[index], submit.pooling
    assert pooling is not None
    if pooling.task == "score" and not pooling.input_type:
        input_type = "document" if index else "query"
        pooling = msgspec.structs.replace(pooling, input_type=input_type)
    deadlines = submit.deadlines
    if deadlines.total_timeout_seconds is not None:
        total = max(0.0, deadlines.total_timeout_seconds - seconds)
        deadlines = msgspec.structs.replace(deadlines, total_timeout_seconds=total)
    part = msgspec.structs.replace(
        submit,
        request_id=input_id(submit.request_id, index),
        messages=(*(submit.inputs[0] if of_pairs else submit).messages, *given.messages),
        prompt=given.prompt,
        pooling=pooling,
        inputs=(msgspec.structs.replace(given, messages=()),),
        deadlines=deadlines,
    )
    return _with_own_media(part)


def _with_own_media(submit: Submit) -> Submit:
    """`submit` with the media of its messages alone."""
    images, videos, messages = [], [], list[Message]()
    for message in submit.messages:
        content = list[ContentPart]()
        for part in message.content:
            match part:
                case ImagePart(index):
                    images.append(submit.images[index])
                    content.append(ImagePart(len(images) - 1))
                case VideoPart(index):
                    videos.append(submit.videos[index])
                    content.append(VideoPart(len(videos) - 1))
                case _:
                    content.append(part)
        messages.append(msgspec.structs.replace(message, content=tuple(content)))
    return msgspec.structs.replace(
        submit, messages=tuple(messages), images=tuple(images), videos=tuple(videos)
    )


def cut(rows: Rows, dimensions: int | None) -> Rows:
    """The first `dimensions` numbers of each vector, normalized again; None or all: unchanged."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    parts = rows[:, :dimensions]
    norms = np.linalg.norm(parts, axis=1, keepdims=True)
    cut_rows: Rows = parts / np.maximum(norms, np.float32(_MIN_NORM))
    return cut_rows


def similarity(query: Rows, document: Rows) -> float:
    """The sum over the query's vectors of their largest product with one of the document's.

    For one normalized vector each it is their cosine; for several, MaxSim (Khattab and Zaharia,
    2020).
    """
    products = query.astype(np.float64) @ document.astype(np.float64).T
    return float(products.max(axis=1).sum())
