"""Settings of the engine process, of sharing it between requests, and of splitting a model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB, AbsolutePath, Auto, Off


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum answers that are written at the same time; others wait. `auto` is as many as fit with
    4,096 tokens each into half of the memory that the weights leave, from 16 to 256. Each choice of
    a request with `n` counts, and memory may allow fewer."""
    prefill_chunk_tokens: Annotated[int, Meta(ge=1)] = 2048
    """Size of the chunks in which prompts are prefilled, one in a step."""
    max_step_seconds: Annotated[float, Meta(gt=0)] = 0.1
    """Maximum time that prefill may add to a step while other requests decode; chunks are sized to
    fit it, from measured speed. On CUDA, where a decode step can read part of a prompt in the same
    pass, that part has a fixed size instead."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=15)] = 15
    """Draft tokens verified per sequence and step, at most, where measured times and hit rates
    promise a gain; 0 drafts none. Answers stay the same, up to rounding."""
    max_images_per_encode: Annotated[int, Meta(ge=1)] = 8
    """Maximum images of one size, or frame groups of a video, encoded in one call, where that was
    measured to be faster; 1: none is encoded with another."""
    max_prompts_per_prefill: Annotated[int, Meta(ge=1)] = 8
    """Maximum prompts prefilled in one call, where that was measured to take about as long as one;
    1: none is prefilled with another."""
    preparer_threads: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Threads that prepare requests with images or videos (at least two); as many more prepare
    those with a schema, and as many again other text. `auto` is one for four processors, two to
    four."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start_timeout_seconds: Annotated[float, Meta(gt=0)] = 900.0
    """Time limit for loading and warm-up."""
    silence_timeout_seconds: Annotated[float, Meta(gt=0)] = 120.0
    """An engine with requests that sends nothing for this long, or whose encoder or preparers make
    no progress, is restarted; must be longer than any step, and than the encoding of an image."""
    max_failed_steps: Annotated[int, Meta(ge=1)] = 3
    """Maximum steps that fail without a token in between; then the engine is restarted, since its
    device can't be trusted any more."""
    min_restart_backoff_seconds: Annotated[float, Meta(gt=0)] = 0.5
    """Minimum pause before a restart; doubles while engines end before they are ready."""
    max_restart_backoff_seconds: Annotated[float, Meta(gt=0)] = 30.0
    """Maximum pause between restarts."""
    quarantine_seconds: Annotated[float, Meta(ge=0)] = 600.0
    """Requests of a size that crashed three engines, the last alone on the device, or six, with no
    answer in between, are refused for this long; 0 refuses none."""
    openblas: Literal["auto", "off"] = "auto"
    """Preload OpenBLAS into the engine (Linux CPU: about 50 times faster)."""
    mimalloc: Literal["auto", "off"] = "auto"
    """Preload mimalloc into the engine where MLX is for CUDA: shorter steps."""
    schema_timeout_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Time limit for compiling the JSON schema of a request, and for finding out which tokens may
    come next in its answer; beyond it, the request is refused."""
    max_schema_cpu_seconds: Annotated[float, Meta(gt=0)] = 20.0
    """Maximum CPU time for finding out which tokens may come next in the answers of one request
    with a JSON schema, besides 5 ms for each token; beyond it, the request fails."""
    max_schema_memory_bytes: Annotated[int, Meta(ge=64 * MIB)] = 256 * MIB
    """Maximum memory that a JSON schema may take, and the answers of each request that follow it;
    each has a process of its own."""


class Distributed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machines that one model is split over, if it is too large for one."""

    hostfile: Annotated[AbsolutePath, Off] = ""
    """Absolute path of a hostfile in the format of `mlx.launch`, whose first host is this machine:
    the model is split over all hosts (docs/distributed.md). With `off`, this machine has all of
    it."""
    port: Annotated[int, Meta(ge=1, le=65000)] = 32322
    """TCP port of this machine at which the other hosts' processes are told what to do; MLX's own
    connections take those that follow."""
