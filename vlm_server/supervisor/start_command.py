"""What an engine is told first, as settings have it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vlm_server.models import EMBEDDED
from vlm_server.protocol import Start
from vlm_server.settings import Settings
from vlm_server.settings.paths import expanded


def start_of(settings: Settings) -> Start:
    """With absolute paths; those of the embedded model if none is named."""
    path = Path(settings.model.path) if settings.model.path else EMBEDDED
    template = settings.model.chat_template
    model = msgspec.structs.replace(
        settings.model,
        path=str(path.absolute()),
        chat_template=str(expanded(template).absolute()) if template else "",
    )
    return Start(
        model=model,
        scheduler=settings.scheduler,
        engine=settings.engine,
        memory=settings.memory,
        log=settings.log,
        image=settings.image,
        video=settings.video,
        cache=settings.cache,
    )
