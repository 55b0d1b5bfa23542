"""The check that an address is on the public internet, and not in a local network.

Follows IANA's registries of special-purpose addresses, as of 2025. Python's `is_global` is not
used: its result for some of these blocks depends on the version.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carrier-grade NAT, and a cloud's metadata
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # a cloud's metadata
            "169.254.0.0/16",  # link-local, and most clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4: holds an IPv4 address
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether `address` is public, and not one of this machine's own."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return _is_global(ip) and not _is_own(ip)


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    if address.ipv4_mapped is not None:
        return _is_global(address.ipv4_mapped)
    if address in _NAT64:
        return _is_global(IPv4Address(int(address) & 0xFFFF_FFFF))
    return (
        address.scope_id is None
        and address in _GLOBAL_V6
        and not any(address in network for network in _SPECIAL_V6)
    )


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    """Whether a packet to `address` would leave from it. Sends none."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:  # no route: connecting will fail too
            return False
        return ip_address(probe.getsockname()[0]) == address
