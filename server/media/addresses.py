"""Which network addresses the server may connect to on behalf of a client: public ones only.

The test is made on the address that is connected to, never on how it was spelled: `2130706433`, `0x7f.1` and a name that
resolves to 127.0.0.1 are all 127.0.0.1 by then.
"""

import ipaddress

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # a cloud's metadata and health service, in public space
        "fec0::/10",  # site-local, before unique local addresses
        "100.100.100.200/32",  # another cloud's metadata service
    )
)


def is_public(address: str) -> bool:
    """Whether an address in text form is one of the public internet; IPv4 inside IPv6 counts as what it stands for.

    Raises:
        ValueError: it is no address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        for embedded in _embedded(ip):
            if not is_public(str(embedded)):
                return False
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return True  # judged by its inside
    if ip.is_multicast or ip.is_reserved or ip.is_unspecified or not ip.is_global:
        return False
    return not any(ip.version == network.version and ip in network for network in _SPECIAL)


def _embedded(ip: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that packets to `ip` may end up at."""
    found = [ip.ipv4_mapped, ip.sixtofour, ip.teredo[1] if ip.teredo else None]
    if ip in _NAT64 or (int(ip) >> 32 == 0 and int(ip) > 1):  # the latter: IPv4-compatible, long deprecated
        found.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
    return [address for address in found if address is not None]
