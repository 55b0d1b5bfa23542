"""All settings, in one typed tree, and how they are read.

A setting is one field with its name, type, bounds and default, and its description below. Settings
are read from a TOML file (`configs/default.toml` lists all of them), from the environment and from
`section.key=value` overrides. Unknown and former names are errors.
"""

from vlm_server.settings.descriptions import *  # noqa: F403
from vlm_server.settings.engine import *  # noqa: F403
from vlm_server.settings.environment import *  # noqa: F403
from vlm_server.settings.faults import RENAMED as RENAMED
from vlm_server.settings.front import *  # noqa: F403
from vlm_server.settings.media import *  # noqa: F403
from vlm_server.settings.memory import *  # noqa: F403
from vlm_server.settings.model import *  # noqa: F403
from vlm_server.settings.quantities import *  # noqa: F403
from vlm_server.settings.reading import *  # noqa: F403
from vlm_server.settings.tree import *  # noqa: F403
