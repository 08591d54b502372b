"""Pictures that rows hold as base64 text: a data: URL, or the base64 alone."""

import base64
import binascii
import re

from tiercel.errors import DataError

_DATA_URL = re.compile(r"data:[a-z0-9.+/-]*(?:;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
# What base64 of PNG, JPEG and WEBP begins with. A path could begin so too, but is not that long.
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
_SHORTEST = 64  # characters; a picture of one pixel has more


def embedded_picture(text: str, field: str) -> bytes | None:
    """Return the bytes of a picture that is written as base64; None for any other text, such as a path. Raises
    DataError where it is not base64 to its end."""
    url = _DATA_URL.match(text)
    if url is None and (len(text) < _SHORTEST or not text.startswith(_BEGINNINGS) or "." in text[-6:]):
        return None
    try:
        return base64.b64decode("".join(text[url.end() if url else 0 :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"is a picture as base64 of {len(text):,} characters that is broken: {error}", field=field
        ) from error
