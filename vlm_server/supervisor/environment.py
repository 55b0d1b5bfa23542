"""What the environment of a process that runs models adds to ours."""

from __future__ import annotations

from vlm_server.supervisor.openblas import find_preload
from vlm_server.supervisor.private_folder import PrivateFolder


def for_models(private: PrivateFolder, *, with_openblas: bool) -> dict[str, str]:
    """To be asked for before each start: what it names may have been removed. Takes a while.

    Raises OSError if there is no room for a private folder.
    """
    preload = find_preload(private.path() / "fortran") if with_openblas else {}
    return {**private.environment(), **preload}
