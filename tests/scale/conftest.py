"""Gateways and proxies in front of two daemons; each test leaves both as it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.scale_out import find_gateway
from tests.scale.fleet import Daemons, Fleet, Gateway
from tests.scale.proxies import HAProxy, Nginx, find_proxy


@pytest.fixture(scope="session")
def gateway(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    program = find_gateway()
    if program is None:
        pytest.skip("needs the gateway: scripts/setup dev scale")
    gateway = Gateway(daemons, tmp_path_factory.mktemp("gateway"), program)
    with gateway.running():
        yield gateway


@pytest.fixture(scope="session")
def nginx(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    nginx = Nginx(daemons, tmp_path_factory.mktemp("nginx"), program("nginx"))
    with nginx.running():
        yield nginx


@pytest.fixture(scope="session")
def haproxy(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HAProxy]:
    haproxy = HAProxy(daemons, tmp_path_factory.mktemp("haproxy"), program("haproxy"))
    with haproxy.running():
        yield haproxy


def program(name: str) -> str:
    """The path of a proxy. Skips the test if it is not installed."""
    found = find_proxy(name)
    if found is None:
        pytest.skip(f"needs {name}: scripts/install_proxies")
    return found


@pytest.fixture(params=["gateway", "nginx", "haproxy"])
def fleet(request: pytest.FixtureRequest, daemons: Daemons) -> Fleet:
    """The daemons behind each gateway and proxy in turn."""
    fleet: Fleet = request.getfixturevalue(request.param)
    fleet.wait_for_workers()
    return fleet
