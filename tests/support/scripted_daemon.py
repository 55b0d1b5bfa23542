"""`vlm-server` whose engines are scripted: `python -m tests.support.scripted_daemon serve ...`.

It is the real program, ready in under a second, for tests in which no model answers: what its
engines do is said by the requests (`tests.support.scripted_worker`).

It looks at its files more often than the program does, so that tests need not wait for it.
"""

from __future__ import annotations

import sys

from vlm_server.api.http.access import keys
from vlm_server.cli.__main__ import main
from vlm_server.cli.serve import front, reload
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.process import EngineProcess
from vlm_server.supervisor.models.model_pool import ModelPool
from vlm_server.supervisor.supervisor import ProgressCallback, Supervisor


class ScriptedSupervisor(Supervisor):
    """Keeps a scripted engine running."""

    async def _start_process(self, environment: dict[str, str]) -> EngineProcess:
        return await EngineProcess.start("tests.support.scripted_worker", environment)


class ScriptedModels(ModelPool):
    """The models of the settings, whose engines are scripted."""

    def __init__(self, settings: Settings, on_progress: ProgressCallback) -> None:
        super().__init__(settings, on_progress, make_engine=ScriptedSupervisor)


LOOK_SECONDS = 0.2

if __name__ == "__main__":
    front.ModelPool = ScriptedModels  # type: ignore[misc]  # where the program makes it
    front._LOOK_SECONDS = keys.CHECK_SECONDS = reload._QUIET_SECONDS = LOOK_SECONDS
    sys.exit(main())
