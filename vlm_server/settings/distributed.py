"""Settings of a model that several processes compute together."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Distributed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machines that one model is split over, if it is too large for one."""

    hosts: Annotated[
        str,
        Meta(
            description="Absolute path of a hostfile in the format of `mlx.launch`, whose first "
            "host is this machine: the model is split over all hosts (docs/distributed.md). Empty "
            "means that this machine has all of it."
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(
            ge=1,
            le=65000,
            description="TCP port of this machine at which the other hosts' processes are told "
            "what to do; MLX's own connections take those that follow.",
        ),
    ] = 32322
