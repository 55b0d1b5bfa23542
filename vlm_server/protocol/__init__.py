"""The structs that cross the socket between the front and an engine process.

Each accepted request gets exactly one terminal event: `Finished` or `Failed`.
"""

from vlm_server.protocol.codec import *  # noqa: F403
from vlm_server.protocol.commands import *  # noqa: F403
from vlm_server.protocol.events import *  # noqa: F403
from vlm_server.protocol.request import *  # noqa: F403
from vlm_server.protocol.stats import *  # noqa: F403
