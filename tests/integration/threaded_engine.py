"""A real engine on a tiny model, with all of its threads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from vlm_server.engine.inbox import Inbox
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.start import build_engine
from vlm_server.platform.footprint import SystemProcessMemory
from vlm_server.protocol import Event, Failed, Finished, Start, Tokens
from vlm_server.runner.caches import build_caches
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.memory import MlxMemory


@dataclass
class ThreadedEngine:
    """The engine of one model with its threads, and all events sent."""

    loaded: LoadedModel
    start: Start
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = MlxMemory(self.start.memory, self.loaded.device)
        self.caches = build_caches(self.start.cache, memory.read(), self.loaded)
        self.inbox = Inbox()
        governor = Governor(self.start.memory, memory, SystemProcessMemory(), self.caches)
        self.loop = build_engine(
            self.start, self.loaded, governor, self.caches, self.inbox, self.events.append
        )

    @property
    def texts(self) -> dict[str, str]:
        found: dict[str, str] = defaultdict(str)
        for event in self.events:
            for delta in event.deltas if isinstance(event, Tokens) else ():
                found[delta.request_id] += delta.text
        return found

    @property
    def ends(self) -> dict[str, Finished | Failed]:
        return {e.request_id: e for e in self.events if isinstance(e, Finished | Failed)}
