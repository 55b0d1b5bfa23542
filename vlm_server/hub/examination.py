"""The examination of a checkpoint before it is loaded, by a process that has mlx.

That process knows the device and the families; the caller need not import either.
"""

from __future__ import annotations

import asyncio

import msgspec

from vlm_server.errors import ModelLoadError
from vlm_server.hub.messages import DownloadPlan
from vlm_server.platform.child import launch
from vlm_server.settings import CacheSettings, MemorySettings, ModelSettings

_MODULE = "vlm_server.examine"
_TIMEOUT_SECONDS = 120.0


class ExaminationRequest(msgspec.Struct, frozen=True):
    """The checkpoint to examine: in folder `model.path`, or by the download plan `plan`."""

    model: ModelSettings
    memory: MemorySettings
    plan: DownloadPlan | None = None
    adapters: dict[str, str] = {}
    """The folders of its LoRA adapters, by name; not looked at before a download."""
    cache: CacheSettings = CacheSettings()


class Examination(msgspec.Struct, frozen=True):
    """A checkpoint and its fit to this machine; `refusal`: the reason that loading would fail.

    is_checked: whether docs/families.md lists the family. weight_bytes: the weights on the device.
    limit_bytes: memory for the model and its requests. fitting_tokens: tokens that one request can
    have of the model's `context_tokens`, and `kv_bytes` their KV; None if that takes the weights.
    least_kv_bytes: KV of the shortest request for which there must be room.
    """

    family: str = ""
    is_checked: bool = False
    quantization: str = ""
    device: str = ""
    memory_bytes: int = 0
    limit_bytes: int = 0
    weight_bytes: int = 0
    context_tokens: int = 0
    fitting_tokens: int | None = None
    kv_bytes: int | None = None
    least_kv_bytes: int = 0
    refusal: str = ""
    drafter: str = ""
    """The kind of its trained drafter; empty without one, or before the weights are here."""
    makes_vectors: bool = False
    """Whether it embeds its input and writes nothing; it keeps no KV then."""


async def examine(request: ExaminationRequest) -> Examination:
    """Examine a checkpoint; takes seconds. Raises ModelLoadError if the process fails."""
    command = launch.command(_MODULE, "checkpoint")
    async with launch.run_process(command, launch.model_environment()) as process:
        try:
            output, _ = await asyncio.wait_for(
                process.communicate(msgspec.json.encode(request)), _TIMEOUT_SECONDS
            )
            return msgspec.json.decode(output, type=Examination)
        except (TimeoutError, msgspec.DecodeError):
            raise ModelLoadError("the checkpoint can't be examined: see the log") from None


async def check_plan(model: ModelSettings, memory: MemorySettings, plan: DownloadPlan) -> None:
    """Raises ModelLoadError if the checkpoint of `plan` can't be served on this machine."""
    examination = await examine(ExaminationRequest(model, memory, plan))
    if examination.refusal:
        raise ModelLoadError(f"{plan.repo} was not downloaded: {examination.refusal}")
