"""Searches of the hub by name, each in a process of its own that is killed after its time."""

from __future__ import annotations

import asyncio

import msgspec

from vlm_server.errors import NotAvailable
from vlm_server.hub.download import library_environment
from vlm_server.hub.messages import FoundModel, SearchResult
from vlm_server.platform.child import launch

_MODULE = "vlm_server.hub.search_process"
_TIMEOUT_SECONDS = 20.0


async def search(query: str) -> tuple[FoundModel, ...]:
    """Checkpoints whose names have `query`, the most downloaded first. Raises NotAvailable."""
    command = launch.command(_MODULE, query)
    environment = {**launch.environment(), **library_environment()}
    try:
        async with launch.run_process(command, environment) as process:
            output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_SECONDS)
        result = msgspec.json.decode(output, type=SearchResult)
    except TimeoutError:
        raise NotAvailable(f"the hub did not answer within {_TIMEOUT_SECONDS:.0f} s") from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise NotAvailable("the hub can't be searched: the log says why") from error
    if result.refusal:
        raise NotAvailable(result.refusal)
    return result.models
