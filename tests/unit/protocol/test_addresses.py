"""Which addresses are public: one table of every kind that is not, however it is written."""

from __future__ import annotations

import ipaddress

import pytest

from trainmaster.protocol.sockets import is_public

PUBLIC = ["1.1.1.1", "192.0.1.1", "2606:4700:4700::1111", "2a00:1450::1", "::ffff:1.1.1.1", "64:ff9b::808:808"]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.8",
    "192.0.0.9",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",  # IPv4-compatible
    "::8.8.8.8",
    "::ffff:10.0.0.1",  # IPv4-mapped
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",  # IPv4-translated
    "::ffff:0:8.8.8.8",
    "64:ff9b::a00:1",  # NAT64
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",  # NAT64 of the local network
    "64:ff9b:1::808:808",
    "64:ff9b:1:ffff::1",
    "100::1",  # discard-only
    "2001:0:7f00:1::1",  # Teredo
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:1ff::1",
    "2001:db8::1",
    "2002:7f00:1::1",  # 6to4
    "2002:a9fe:a9fe::1",
    "2002:808:808::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00::1",
    "fe80::1",
    "fec0::1",  # site-local
    "ff02::1",
    "ff0e::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_any_other_address_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
