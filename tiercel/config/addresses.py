"""Addresses of servers in a recipe."""

from urllib.parse import urlsplit

from tiercel.config.keys import shown


def address_fault(url: str) -> str | None:
    """What is wrong with a server's address. One with a name and password is not shown."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown(url)} given, which is no address ({error})"
    if parts.username is not None or parts.password is not None:
        return "an address with a name or password given, which would be kept in files; a key goes into the environment"
    if parts.scheme not in ("http", "https") or not host:
        return f"{shown(url)} given, which is no address"
    return None
