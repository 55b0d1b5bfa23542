"""Reads a hostfile, and knows what each of MLX's backends wants of its ranks."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from vlm_server import settings
from vlm_server.errors import ConfigError
from vlm_server.protocol.ranks import Rank
from vlm_server.settings.paths import expanded

LOCAL = "127.0.0.1"


class Host(msgspec.Struct, frozen=True):
    """A machine, or one of several ranks on it.

    ssh: what `ssh` calls it; `127.0.0.1` is this one. ips: its addresses; the first is that at
    which the others find it. rdma: its device for each other host, for `jaccl`.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class Hostfile(msgspec.Struct, frozen=True):
    """What `mlx.launch` and `mlx.distributed_config` read and write. envs: `NAME=value` each."""

    hosts: tuple[Host, ...]
    backend: Literal["", "ring", "jaccl", "jaccl-ring", "nccl"] = ""
    envs: tuple[str, ...] = ()


def read_hostfile(path: Path) -> Hostfile:
    """Raises ConfigError, which says what is wrong with the file."""
    try:
        data = json.loads(expanded(path).read_text())
        read = msgspec.convert({"hosts": data} if isinstance(data, list) else data, Hostfile)
    except OSError as error:
        raise ConfigError(f"distributed.hosts: can't read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"distributed.hosts: {path} is no hostfile: {error}") from None
    if len(read.hosts) < 2:
        raise ConfigError(f"distributed.hosts: {path} names fewer than two hosts")
    for host in read.hosts:
        if not host.ips:
            raise ConfigError(f"distributed.hosts: {path} has no `ips` for {host.ssh!r}")
        if host.ssh.startswith("-"):
            raise ConfigError(f"distributed.hosts: {host.ssh!r} is no host's name")
        if read.backend.startswith("jaccl") and len(host.rdma) != len(read.hosts):
            raise ConfigError(
                f"distributed.hosts: {path} needs an `rdma` device of {host.ssh!r} for each host"
            )
    if any(host.ssh != LOCAL for host in read.hosts[1:]) and shutil.which("ssh") is None:
        raise ConfigError("distributed.hosts: there is no `ssh` to reach the other machines with")
    if any("=" not in line for line in read.envs):
        raise ConfigError(f"distributed.hosts: `envs` of {path} are not all NAME=value")
    return read


def ranks_of(hostfile: Hostfile, port: int, log: settings.Log) -> list[Rank]:
    """All ranks, with a new secret. Ports from `port + 1` on are MLX's."""
    backend = hostfile.backend or "ring"
    first = hostfile.hosts[0].ips[0]
    common = dict(line.split("=", 1) for line in hostfile.envs)
    files = _files(hostfile.hosts, backend, port + 1)
    secret = secrets.token_hex(32)
    return [
        Rank(
            number=number,
            size=len(hostfile.hosts),
            backend=backend.removesuffix("-ring"),
            environment={**common, **_variables(hostfile.hosts, number, backend, port + 1)},
            files=files,
            host=first,
            port=port,
            secret=secret,
            log=log,
        )
        for number in range(len(hostfile.hosts))
    ]


def _files(hosts: Sequence[Host], backend: str, port: int) -> dict[str, str]:
    """By the variable that names it, the text of a file that MLX reads."""
    if backend == "ring":
        ports = iter(range(port, 1 << 16))
        addresses = [[f"{ip}:{next(ports)}" for ip in host.ips] for host in hosts]
        return {"MLX_HOSTFILE": json.dumps(addresses)}
    if backend.startswith("jaccl"):
        return {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts])}
    return {}


def _variables(hosts: Sequence[Host], number: int, backend: str, port: int) -> dict[str, str]:
    first = hosts[0].ips[0]
    if backend.startswith("jaccl"):
        made = {"MLX_JACCL_COORDINATOR": f"{first}:{port}"}
        made |= {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
    elif backend == "nccl":
        gpu = sum(host.ssh == hosts[number].ssh for host in hosts[:number])
        made = {
            "NCCL_HOST_IP": first,
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(len(hosts)),
            "CUDA_VISIBLE_DEVICES": str(gpu),
        }
    else:
        made = {}
    return {"MLX_RANK": str(number), **made}
