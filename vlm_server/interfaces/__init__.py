"""The interfaces between engine, prompt and runner: token ids, numpy arrays and plans.

`engine` decides, `runner` executes, `prompt` makes prompts; they import each other only by these
interfaces. No mlx, no HTTP.
"""

from __future__ import annotations

from vlm_server.interfaces.executors import *  # noqa: F403
from vlm_server.interfaces.grammar import *  # noqa: F403
from vlm_server.interfaces.memory import *  # noqa: F403
from vlm_server.interfaces.prompts import *  # noqa: F403
from vlm_server.interfaces.step import *  # noqa: F403
