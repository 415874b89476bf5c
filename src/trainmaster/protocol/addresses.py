"""Which network addresses are public. Nothing that a user names by URL should reach others without leave."""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the public Internet, whatever it is wrapped into."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast
