"""Download pictures by addresses that stand in rows, which are not trusted.

Only https is spoken, and only with public addresses: a host's name is looked up here, and the connection is made to an
address that was checked, so that a name with changing addresses leads nowhere else. Each redirect is checked in the
same way. The environment's proxies are not used, because then the proxy would choose the address.
"""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

from tiercel import __version__
from tiercel.data.media.images import ImageProblem, open_header
from tiercel.errors import DataError
from tiercel.types import ImageRoots, ImageSource

Address = IPv4Address | IPv6Address
CONNECT_SECONDS = 10.0
_NAT64 = IPv6Network("64:ff9b::/96")
_MOST_ADDRESSES = 4  # of a host, tried one after the other
_UNTOLD = ("", "application/octet-stream", "binary/octet-stream")  # content types that say nothing
_ENDINGS = {b"\x89PN": ".png", b"\xff\xd8\xff": ".jpg", b"RIF": ".webp"}


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public network."""
    if isinstance(address, IPv6Address):
        inner = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address.ipv4_mapped
        if inner is not None:
            return is_public(inner)
        if address.sixtofour or address.teredo or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Web:
    """Says how pictures are downloaded. `allows` decides about addresses; tests admit this machine."""

    max_pixels: int
    most_bytes: int = 1 << 26
    seconds: float = 60.0  # of one try, redirects included
    redirects: int = 5
    tries: int = 3
    pause: float = 1.0  # seconds before the second try, four times as many before each further one
    allows: Callable[[Address], bool] = is_public
    tls: ssl.SSLContext = field(default_factory=httpx.create_ssl_context)

    def client(self) -> httpx.Client:
        """Return a client for `download`, which threads may share. No connection is used twice, because it would be
        found by its address alone, whatever the host's name."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(self.seconds / 2, connect=CONNECT_SECONDS)
        return httpx.Client(verify=self.tls, trust_env=False, follow_redirects=False, limits=limits, timeout=timeout)


class _Passing(Exception):
    """Raised for a failure that another try may not meet."""


def download(client: httpx.Client, url: str, web: Web) -> tuple[bytes, str]:
    """Return a picture as bytes, and the ending that a file of it has. Raises DataError with the reason."""
    for attempt in range(web.tries):
        time.sleep(web.pause * 4 ** (attempt - 1) if attempt else 0)
        try:
            data = _followed(client, httpx.URL(url), web)
            break
        except (_Passing, httpx.TransportError, OSError) as error:
            reason = str(error) or type(error).__name__
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise DataError(f"is not an address that can be asked: {error}") from error
    else:
        raise DataError(f"{reason} (tried {web.tries} times)")
    try:
        open_header(ImageSource(data=data), ImageRoots(base=""), web.max_pixels)
    except ImageProblem as problem:
        raise DataError(problem.reason) from problem
    return data, _ENDINGS[data[:3]]


def _followed(client: httpx.Client, url: httpx.URL, web: Web) -> bytes:
    """Return what an address has after its redirects."""
    end = time.monotonic() + web.seconds
    for _ in range(web.redirects + 1):
        with _answer(client, url, web) as response:
            if not response.has_redirect_location:
                return _body(response, end, web)
            url = url.join(response.headers["location"])
    raise DataError(f"has more than {web.redirects} redirects")


@contextmanager
def _answer(client: httpx.Client, url: httpx.URL, web: Web) -> Iterator[httpx.Response]:
    """Ask a checked address of the URL's host; the certificate must be that of the host's name."""
    if url.scheme != "https" or not url.host:
        raise DataError(f"{url.scheme or 'no'} address: pictures are downloaded by https only")
    if url.userinfo:
        raise DataError("has a user or a password, which tiercel does not send")
    name = url.raw_host.decode("ascii")
    headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
    headers["User-Agent"] = f"tiercel/{__version__}"
    addresses = _addresses(name, url.port or 443, web)
    for left, address in enumerate(addresses, start=1 - len(addresses)):
        request = client.build_request(
            "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": name}
        )
        try:
            response = client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if left == 0:
                raise
            continue
        try:
            yield response
        finally:
            response.close()
        return


def _addresses(name: str, port: int, web: Web) -> list[str]:
    """Look up a host's addresses. Raises DataError if none of them may be asked."""
    found = list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)))
    public = [each for each in found if web.allows(ip_address(each))]
    if not public:
        raise DataError(f"{name} leads to {', '.join(found)}, which is not an address of the public network")
    return public[:_MOST_ADDRESSES]


def _body(response: httpx.Response, end: float, web: Web) -> bytes:
    """Read the answer of a server, as far as it may be a picture."""
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise _Passing(f"the server answered {status}")
    if status != 200:
        raise DataError(f"the server answered {status}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _UNTOLD and not kind.startswith("image/"):
        raise DataError(f"the server sent {kind[:80]!a}, not a picture")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise DataError("the server compressed the answer, which was not asked for")
    data = bytearray()
    for piece in response.iter_raw():
        data += piece
        if len(data) > web.most_bytes:
            raise DataError(f"has more than {web.most_bytes:,} bytes")
        if time.monotonic() > end:
            raise _Passing(f"took longer than {web.seconds:g} s")
    return bytes(data)
