"""The ranks of a model that is split over several machines: a hostfile names them, and all but the
first have processes here or on other machines.

`mlx.launch` would start them, too, but it keeps a core busy for as long as they run
(docs/decisions/0049-let-every-rank-run-the-same-plans.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec

from vlm_server import settings
from vlm_server.errors import ConfigError
from vlm_server.platform.child import launch
from vlm_server.protocol.commands import Rank
from vlm_server.settings import Settings
from vlm_server.settings.paths import expand_home

logger = logging.getLogger(__name__)

_MODULE = "vlm_server.engine.follower"
_END_SECONDS = 2.0
LOCAL = "127.0.0.1"
_KEPT = ("PYTHONPATH", "PYTHONSAFEPATH")
"""Variables of our environment for other machines, which have the program in the same folder."""


class RankProcesses:
    """The rank processes of one engine; they end with it."""

    def __init__(
        self, rank_zero: Rank | None, processes: Sequence[asyncio.subprocess.Process]
    ) -> None:
        self.rank_zero = rank_zero
        """The rank of the engine process; None if it has all of the model."""
        self._processes = processes

    @classmethod
    async def start(cls, settings: Settings, environment: Mapping[str, str]) -> Self:
        """Start the ranks in `distributed.hostfile`; `environment` is added to ours.

        Raises ConfigError for a file that can't be used, and OSError if a process can't be started.
        """
        if not settings.distributed.hostfile:
            return cls(None, ())
        hostfile = read_hostfile(Path(settings.distributed.hostfile))
        rank_zero, *other_ranks = ranks_of(hostfile, settings.distributed.port, settings.log)
        ranks = cls(rank_zero, [])
        try:
            for host, rank in zip(hostfile.hosts[1:], other_ranks, strict=True):
                ranks._processes = [
                    *ranks._processes,
                    await _start_process(host, rank, environment),
                ]
        except BaseException:
            await ranks.end()
            raise
        return ranks

    async def first_to_end(self) -> str:
        """Wait until a rank has ended by itself; returns the reason for the log."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        if not waits:
            await asyncio.Event().wait()
        try:
            (ended_wait, *_), _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        number, status = waits.index(ended_wait) + 1, ended_wait.result()
        await asyncio.sleep(_END_SECONDS)  # rank 0 may have more to say, and end by itself
        return f"the process of rank {number} has ended with status {status}: the log says more"

    async def end(self) -> None:
        """End the processes by closing their input; kill those that stay."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for number, process in enumerate(self._processes, start=1):
            try:
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            except TimeoutError:
                logger.warning("rank %d does not end by itself: killing it", number)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _start_process(
    host: Host, rank: Rank, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    command = launch.command(_MODULE)
    variables = launch.environment(with_preload=True)
    if host.ssh == LOCAL:
        variables = {**launch.model_environment(), **environment}
    else:
        kept_variables = {name: variables[name] for name in _KEPT if name in variables} | {
            "HF_HUB_OFFLINE": "1"
        }
        words = [
            "exec",
            "env",
            *(f"{name}={value}" for name, value in kept_variables.items()),
            *command,
        ]
        command = ["ssh", "-o", "BatchMode=yes", "--", host.ssh, shlex.join(words)]
        variables = dict(os.environ)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=variables,
        cwd=launch.FOLDER,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(rank) + b"\n")
    return process


class Host(msgspec.Struct, frozen=True):
    """A machine, or one of several ranks on it.

    ssh: what `ssh` calls it; `127.0.0.1` is this one. ips: its addresses; the first is that at
    which the others find it. rdma: its device for each other host, for `jaccl`.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class Hostfile(msgspec.Struct, frozen=True):
    """A hostfile of `mlx.launch` and `mlx.distributed_config`. envs: `NAME=value` each."""

    hosts: tuple[Host, ...]
    backend: Literal["", "ring", "jaccl", "jaccl-ring", "nccl"] = ""
    envs: tuple[str, ...] = ()


def read_hostfile(path: Path) -> Hostfile:
    """The hostfile at `path`. Raises ConfigError, which names the fault."""
    try:
        data = json.loads(expand_home(path).read_text())
        hostfile = msgspec.convert({"hosts": data} if isinstance(data, list) else data, Hostfile)
    except OSError as error:
        raise ConfigError(f"`distributed.hostfile`: can't read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"`distributed.hostfile`: {path} is no hostfile: {error}") from None
    if len(hostfile.hosts) < 2:
        raise ConfigError(f"`distributed.hostfile`: {path} names fewer than two hosts")
    for host in hostfile.hosts:
        if not host.ips:
            raise ConfigError(f"`distributed.hostfile`: {path} has no `ips` for {host.ssh!r}")
        if host.ssh.startswith("-"):
            raise ConfigError(f"`distributed.hostfile`: {host.ssh!r} is no host's name")
        if hostfile.backend.startswith("jaccl") and len(host.rdma) != len(hostfile.hosts):
            raise ConfigError(
                f"`distributed.hostfile`: {path} needs `rdma` devices of {host.ssh!r} for each host"
            )
    if any(host.ssh != LOCAL for host in hostfile.hosts[1:]) and shutil.which("ssh") is None:
        raise ConfigError("`distributed.hostfile`: there is no `ssh` to reach the others with")
    if any("=" not in line for line in hostfile.envs):
        raise ConfigError(f"`distributed.hostfile`: `envs` of {path} are not all NAME=value")
    return hostfile


def ranks_of(hostfile: Hostfile, port: int, log: settings.Log) -> list[Rank]:
    """All ranks, with a new secret. Ports from `port + 1` on are MLX's."""
    backend = hostfile.backend or "ring"
    address = hostfile.hosts[0].ips[0]
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
            host=address,
            port=port,
            secret=secret,
            log=log,
        )
        for number in range(len(hostfile.hosts))
    ]


def _files(hosts: Sequence[Host], backend: str, port: int) -> dict[str, str]:
    """The texts of the files that MLX reads, by the variable that names each."""
    if backend == "ring":
        ports = iter(range(port, 1 << 16))
        addresses = [[f"{ip}:{next(ports)}" for ip in host.ips] for host in hosts]
        return {"MLX_HOSTFILE": json.dumps(addresses)}
    if backend.startswith("jaccl"):
        return {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts])}
    return {}


def _variables(hosts: Sequence[Host], number: int, backend: str, port: int) -> dict[str, str]:
    address = hosts[0].ips[0]
    if backend.startswith("jaccl"):
        variables = {"MLX_JACCL_COORDINATOR": f"{address}:{port}"}
        variables |= {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
    elif backend == "nccl":
        gpu = sum(host.ssh == hosts[number].ssh for host in hosts[:number])
        variables = {
            "NCCL_HOST_IP": address,
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(len(hosts)),
            "CUDA_VISIBLE_DEVICES": str(gpu),
        }
    else:
        variables = {}
    return {"MLX_RANK": str(number), **variables}
