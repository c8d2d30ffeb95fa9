"""Which addresses a hook may call.

The agent runs with rights that others lack, so it must not become a way to plain services of the network (a metadata
service at 169.254.169.254, a kubelet's read-only port): unencrypted it calls its own host only.
"""

import ipaddress
import urllib.parse


def refusal(url: str) -> str:
    """Why a hook must not call this address; empty if it may."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no address: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "is no http:// or https:// address"
    if parts.username is not None or parts.password is not None:
        return "contains a user or a password, which everybody who may read the configuration would see"
    if parts.fragment:
        return "has a fragment, which is never sent"
    if parts.scheme == "http" and not _is_loopback(host):
        return f"sends the pod's identity to {host} unencrypted"
    return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
