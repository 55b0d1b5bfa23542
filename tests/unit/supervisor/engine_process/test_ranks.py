"""Hostfiles are read as MLX's launcher reads them, and errors name the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_server import settings
from vlm_server.errors import ConfigError
from vlm_server.supervisor.engine_process.ranks import Hostfile, ranks_of, read_hostfile

ONE: dict[str, Any] = {"ssh": "127.0.0.1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]}
TWO: dict[str, Any] = {"ssh": "other.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None]}


def read(folder: Path, data: object) -> Hostfile:
    path = folder / "hosts.json"
    path.write_text(json.dumps(data))
    return read_hostfile(path)


def test_hostfile_is_read_as_list_and_as_object(tmp_path: Path):
    alone = read(tmp_path, [ONE, TWO])
    assert [host.ssh for host in alone.hosts] == ["127.0.0.1", "other.local"]
    whole = read(tmp_path, {"backend": "jaccl", "envs": ["A=b=c"], "hosts": [ONE, TWO]})
    assert whole.hosts == alone.hosts
    assert (whole.backend, whole.envs) == ("jaccl", ("A=b=c",))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ([ONE], "fewer than two"),
        ([ONE, {"ssh": "other"}], "no `ips` for 'other'"),
        ([ONE, {"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}], "no host's name"),
        ({"backend": "mpi", "hosts": [ONE, TWO]}, "no hostfile"),
        ({"backend": "jaccl", "hosts": [ONE, TWO | {"rdma": []}]}, "`rdma` device"),
        ({"envs": ["A"], "hosts": [ONE, TWO]}, "NAME=value"),
        ("hosts", "no hostfile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_hostfile_is_refused_with_reason(tmp_path: Path, data: object, fault: str):
    with pytest.raises(ConfigError, match=fault):
        read(tmp_path, data)


def test_missing_hostfile_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="can't read"):
        read_hostfile(tmp_path / "hosts.json")


def test_remote_hosts_without_ssh_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert len(read(tmp_path, [ONE, ONE]).hosts) == 2
    with pytest.raises(ConfigError, match="no `ssh`"):
        read(tmp_path, [ONE, TWO])


def ranks(tmp_path: Path, backend: str, *hosts: dict[str, Any]) -> list[Any]:
    hostfile = read(tmp_path, {"backend": backend, "envs": ["A=1"], "hosts": list(hosts)})
    return ranks_of(hostfile, 5000, settings.Log())


def test_ring_ranks_get_addresses_and_environment(tmp_path: Path):
    first, second = ranks(tmp_path, "", ONE, TWO | {"ips": ["10.0.0.2", "10.0.1.2"]})
    addresses = [["10.0.0.1:5001"], ["10.0.0.2:5002", "10.0.1.2:5003"]]
    assert json.loads(first.files["MLX_HOSTFILE"]) == addresses
    assert first.files == second.files
    assert second.environment == {"A": "1", "MLX_RANK": "1"}
    assert (second.host, second.port, second.backend) == ("10.0.0.1", 5000, "ring")
    assert first.secret == second.secret


def test_starts_have_different_secrets(tmp_path: Path):
    assert ranks(tmp_path, "", ONE, TWO)[0].secret != ranks(tmp_path, "", ONE, TWO)[0].secret


@pytest.mark.parametrize("backend", ["jaccl", "jaccl-ring"])
def test_jaccl_ranks_get_rdma_devices_and_coordinator(tmp_path: Path, backend: str):
    _, second = ranks(tmp_path, backend, ONE, TWO)
    assert json.loads(second.files["MLX_IBV_DEVICES"]) == [[None, "rdma_en2"], ["rdma_en2", None]]
    assert second.environment["MLX_JACCL_COORDINATOR"] == "10.0.0.1:5001"
    assert ("MLX_JACCL_RING" in second.environment) == (backend == "jaccl-ring")
    assert second.backend == "jaccl"


def test_nccl_ranks_of_host_get_separate_gpus(tmp_path: Path):
    made = ranks(tmp_path, "nccl", ONE, ONE, TWO)
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in made] == ["0", "1", "0"]
    assert {rank.environment["MLX_WORLD_SIZE"] for rank in made} == {"3"}
    assert {rank.environment["NCCL_PORT"] for rank in made} == {"5001"}
