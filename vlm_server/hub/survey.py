"""What is known of a checkpoint before it is loaded: asked of a process that has mlx.

That process knows the device and the families; whoever asks need not import either.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from vlm_server.errors import ModelLoadError
from vlm_server.hub.messages import Plan
from vlm_server.platform import machine
from vlm_server.platform.child import launch
from vlm_server.settings import Memory, Model

_MODULE = "vlm_server.engine.examine"
_TIMEOUT_SECONDS = 120.0


class SurveyRequest(msgspec.Struct, frozen=True):
    """The checkpoint in folder `model.path`, or that of `plan`, which is still on the hub."""

    model: Model
    memory: Memory
    plan: Plan | None = None


class Survey(msgspec.Struct, frozen=True):
    """What will be served, or in `refusal` why not: the reason that loading would give.

    `is_checked` says that the family is one of docs/families.md. `weight_bytes` is what the
    weights take on the device, and `limit_bytes` what the model and its requests may take.
    One request may have `fitting_tokens` of the model's `context_tokens`, which then take
    `kv_bytes`; None where the weights must be here to know. `least_kv_bytes` is what the shortest
    request takes for which there must be room.
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


async def survey(request: SurveyRequest) -> Survey:
    """Ask. Raises ModelLoadError if there is no answer. Takes seconds: mlx-vlm is imported."""
    process = await asyncio.create_subprocess_exec(
        *launch.command(_MODULE, "checkpoint"),
        env={
            **machine.thread_environment(),
            **launch.environment(with_preload=True),
            "HF_HUB_OFFLINE": "1",
        },
        cwd=launch.FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, _ = await asyncio.wait_for(
            process.communicate(msgspec.json.encode(request)), _TIMEOUT_SECONDS
        )
        return msgspec.json.decode(said, type=Survey)
    except (TimeoutError, msgspec.DecodeError):
        raise ModelLoadError("the checkpoint can't be examined: see the log") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def check_plan(model: Model, memory: Memory, plan: Plan) -> None:
    """Raises ModelLoadError if what `plan` would download can't be served on this machine."""
    found = await survey(SurveyRequest(model, memory, plan))
    if found.refusal:
        raise ModelLoadError(f"{plan.repo} was not downloaded: {found.refusal}")
