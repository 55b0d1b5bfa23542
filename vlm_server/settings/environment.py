"""Settings in the environment: `VLM_SERVER_<SECTION>_<NAME>`, and the place of the default file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from vlm_server.errors import ConfigError
from vlm_server.nearest import nearest
from vlm_server.settings.faults import RENAMED
from vlm_server.settings.paths import expand_home
from vlm_server.settings.tree import all_names

_PREFIX = "VLM_SERVER_"
CLIENT_KEY = "VLM_SERVER_API_KEY"
"""The variable with the API key that clients send, which is no setting."""
_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?")
"""What Kubernetes sets in every container, if a service is called `vlm-server`."""


def default_file(environment: Mapping[str, str]) -> Path:
    """The file whose settings are read if no other is named."""
    folder = Path(environment.get("XDG_CONFIG_HOME", ""))
    folder = folder if folder.is_absolute() else expand_home("~/.config")
    return folder / "vlm-server" / "config.toml"


def variable_of(full: str) -> str:
    """The environment variable of the setting `section.key`."""
    return _PREFIX + full.replace(".", "_").upper()


def settings_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The text of each setting that is in the environment, by `section.key`.

    Raises ConfigError for variables that are called like one, but are none.
    """
    faults = list[str]()
    settings = dict[str, str]()
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or _is_other(variable):
            continue
        if variable in _variables():
            settings[_variables()[variable]] = text
        else:
            faults.append(f"the environment: {variable} {_fault_of(variable)}")
    if faults:
        raise ConfigError(*faults)
    return settings


def _is_other(variable: str) -> bool:
    name = variable.removeprefix(_PREFIX)
    return variable == CLIENT_KEY or _KUBERNETES.fullmatch(name) is not None


def _fault_of(variable: str) -> str:
    renamed = {variable_of(old): variable_of(new) for old, new in RENAMED.items()}
    if variable in renamed:
        return f"is called {renamed[variable]} now"
    names = [name.removeprefix(_PREFIX) for name in _variables()]  # all would be near otherwise
    name = nearest(variable.removeprefix(_PREFIX), names)
    return "is no setting" + (f": did you mean `{_PREFIX}{name}`?" if name else "")


@cache
def _variables() -> dict[str, str]:
    """All settings but those of `[models.NAME]`, by variable."""
    return {variable_of(name): name for name in all_names()}
