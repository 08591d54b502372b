"""Read pictures that are embedded in rows: as base64 text, or as a data: URL."""

import base64
import binascii
import re

from tiercel.errors import DataError

_DATA_URL = re.compile(r"data:[a-z0-9.+/-]*(?:;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
# How base64 of PNG, JPEG and WEBP begins. A path could begin in the same way, but would not be as long.
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
_SHORTEST = 64  # characters; even a picture of one pixel has more


def embedded_picture(text: str, field: str) -> bytes | None:
    """Return the bytes of a picture that is written as base64; None for any other text, such as a path. Raises
    DataError if the text begins as base64 but is not valid base64 to its end."""
    url = _DATA_URL.match(text)
    if url is None and (len(text) < _SHORTEST or not text.startswith(_BEGINNINGS) or "." in text[-6:]):
        return None
    try:
        return base64.b64decode("".join(text[url.end() if url else 0 :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"is a picture as {len(text):,} characters of base64, which is damaged: {error}", field=field
        ) from error
