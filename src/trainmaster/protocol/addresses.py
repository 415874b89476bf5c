"""Which network addresses are public. Nothing that a user names by URL should reach others without leave."""

from __future__ import annotations

import ipaddress

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out for use on the Internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""The one translation prefix outside of that which stands for public addresses too."""
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # for protocols; some Pythons take parts of it for global
        "192.88.99.0/24",  # relays of 6to4
        "2001::/32",  # Teredo: leads to an IPv4 address and port
        "2002::/16",  # 6to4: leads to an IPv4 address
        "3fff::/20",  # for documentation; older Pythons do not know it
    )
)


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the public Internet, also where IPv6 only wraps an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64 or address.ipv4_mapped is not None:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)
