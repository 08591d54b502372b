"""Hostile and odd image files, made by hand and at random from a seed."""

import io
import os
import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
ENDINGS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
SIDES = (1, 2, 7, 28, 56, 113, 300)
BOMB = 40 << 20  # bytes that a compressed chunk grows to
Named = tuple[str, bytes]


def write_pictures(root: Path, count: int, seed: int) -> list[str]:
    """Write `count` files under `root` and return their names: all those made by hand, then valid pictures spoilt at
    random."""
    generator = random.Random(seed)
    names = []
    for name, data in crafted(generator):
        (root / name).write_bytes(data)
        names.append(name)
    names += special_files(root)
    while len(names) < count:
        name = f"spoilt-{len(names)}.{generator.choice(list(ENDINGS.values()))}"
        (root / name).write_bytes(spoilt(generator))
        names.append(name)
    return names[:count]


def noise(generator: random.Random, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.frombuffer(generator.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def spoilt(generator: random.Random) -> bytes:
    """Return a valid picture after a few random changes."""
    width, height = generator.choice(SIDES), generator.choice(SIDES)
    mode = generator.choice(("RGB", "L", "RGB", "CMYK"))
    format = "JPEG" if mode == "CMYK" else generator.choice(FORMATS)
    data = bytearray(encoded(noise(generator, width, height, mode), format))
    for _ in range(generator.randint(1, 4)):
        generator.choice(BLOWS)(data, generator)
    return bytes(data)


def _flip_bits(data: bytearray, generator: random.Random) -> None:
    for _ in range(generator.choice((1, 1, 8, 64)) if data else 0):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)


def _flip_header(data: bytearray, generator: random.Random) -> None:
    for _ in range(generator.choice((1, 4)) if data else 0):
        data[generator.randrange(min(64, len(data)))] = generator.randrange(256)


def _cut(data: bytearray, generator: random.Random) -> None:
    del data[generator.randrange(len(data) + 1) :]


def _drop(data: bytearray, generator: random.Random) -> None:
    start = generator.randrange(len(data) + 1)
    del data[start : start + generator.choice((1, 4, 100))]


def _insert(data: bytearray, generator: random.Random) -> None:
    start = generator.randrange(len(data) + 1)
    data[start:start] = generator.randbytes(generator.choice((1, 4, 1000)))


def _repeat(data: bytearray, generator: random.Random) -> None:
    start = generator.randrange(len(data) + 1)
    data[start:start] = data[start : start + generator.choice((12, 500))]


def _zero(data: bytearray, generator: random.Random) -> None:
    start = generator.randrange(len(data) + 1)
    length = len(data[start : start + 64])
    data[start : start + length] = bytes(length)


BLOWS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip_bits,
    _flip_header,
    _cut,
    _drop,
    _insert,
    _repeat,
    _zero,
)


def crafted(generator: random.Random) -> Iterator[Named]:
    """Yield the files made by hand, by name."""
    yield from _shapes(generator)
    yield from _colours(generator)
    yield from _claims(generator)
    yield from _bombs(generator)
    yield from _strangers(generator)


def _shapes(generator: random.Random) -> Iterator[Named]:
    for width, height in ((1, 100_000), (100_000, 1), (1, 1), (1, 65_500), (2, 400), (400, 2), (3000, 3000), (199, 1)):
        plain = Image.new("RGB", (width, height), (width % 256, height % 256, 7))
        yield f"shape-{width}x{height}.png", encoded(plain)
        if max(width, height) < 65_500:
            yield f"shape-{width}x{height}.jpg", encoded(plain, "JPEG")
        if max(width, height) < 16_384:
            yield f"shape-{width}x{height}.webp", encoded(plain, "WEBP")
    yield "empty.png", b""
    yield "one-byte.png", b"\x89"


def _colours(generator: random.Random) -> Iterator[Named]:
    yield "cmyk.jpg", encoded(noise(generator, 60, 60, "CMYK"), "JPEG")
    samples = np.frombuffer(generator.randbytes(2 * 60 * 60), np.uint16).reshape(60, 60)
    yield "16-bit.png", encoded(Image.fromarray(samples))
    yield "bilevel.png", encoded(noise(generator, 60, 60, "1"))
    yield "alpha.png", encoded(noise(generator, 60, 60, "RGBA"))
    yield "grey-alpha.png", encoded(noise(generator, 60, 60, "LA"))
    yield "alpha.webp", encoded(noise(generator, 60, 60, "RGBA"), "WEBP")
    palette = noise(generator, 3000, 3000, "P")
    yield "palette-transparent.png", encoded(palette, transparency=0)
    yield "palette-transparency-bytes.png", encoded(noise(generator, 60, 60, "P"), transparency=bytes(range(256)))
    yield "colour-key.png", encoded(noise(generator, 60, 60), transparency=(1, 2, 3))
    frames = [noise(generator, 40, 40) for _ in range(3)]
    for format in ("GIF", "WEBP", "PNG", "TIFF"):
        name = f"animated-{format.lower()}.png"
        yield name, encoded(frames[0], format, save_all=True, append_images=frames[1:])
    yield "two-pictures.jpg", encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    for orientation in (0, 6, 9, 65_535):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned-{orientation}.jpg", encoded(noise(generator, 60, 30), "JPEG", exif=exif)
    for format in FORMATS:
        for length in (8, 200, 60_000):
            garbage = b"Exif\0\0" + generator.choice((b"II*\0", b"MM\0*", b"")) + generator.randbytes(length)
            yield f"exif-{length}.{ENDINGS[format]}", encoded(noise(generator, 60, 60), format, exif=garbage)
            profile = encoded(noise(generator, 60, 60), format, icc_profile=generator.randbytes(length))
            yield f"profile-{length}.{ENDINGS[format]}", profile


def chunk(kind: bytes, content: bytes) -> bytes:
    """Return a PNG chunk."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int = 8, colour: int = 2, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """Return a PNG that claims a size. Further chunks come before its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body + chunk(b"IEND", b"")


def _claims(generator: random.Random) -> Iterator[Named]:
    """Yield files whose headers lie about the size."""
    for width, height in ((50_000, 50_000), (2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (0, 5), (5, 0)):
        yield f"claims-{width}x{height}.png", png(width, height, pixels=b"\0" * 100)
    yield "claims-3000x3000.png", png(3000, 3000, pixels=b"\0" * 100)
    for depth, colour in ((16, 6), (1, 0), (3, 2), (8, 5), (255, 255)):
        yield f"claims-depth-{depth}-{colour}.png", png(20, 20, depth, colour, pixels=b"\0" * 5000)
    small = bytearray(encoded(noise(generator, 40, 40), "JPEG"))
    place = small.index(b"\xff\xc0")
    for height, width in ((65_535, 65_535), (0, 0), (0, 40), (3000, 3000)):
        small[place + 5 : place + 9] = struct.pack(">HH", height, width)
        yield f"claims-{width}x{height}.jpg", bytes(small)
    large = bytearray(encoded(noise(generator, 40, 40), "WEBP"))
    large[26:30] = b"\xff\x3f\xff\x3f"
    yield "claims-16383x16383.webp", bytes(large)


def _bombs(generator: random.Random) -> Iterator[Named]:
    """Yield files of a few kilobytes that unpack to megabytes."""
    packed = zlib.compress(bytes(BOMB), 9)
    rows = bytes(20 * (1 + 60))
    yield "text-bomb.png", png(20, 20, 8, 2, chunk(b"zTXt", b"a\0\0" + packed), pixels=rows)
    yield "many-texts.png", png(20, 20, 8, 2, *[chunk(b"tEXt", b"a\0" + b"x" * 100_000)] * 100, pixels=rows)
    yield (
        "many-packed-texts.png",
        png(20, 20, 8, 2, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))] * 200, pixels=rows),
    )
    yield "long-text.png", png(20, 20, 8, 2, chunk(b"tEXt", b"a\0" + b"x" * (8 << 20)), pixels=rows)
    yield "international-text-bomb.png", png(20, 20, 8, 2, chunk(b"iTXt", b"a\0\1\0\0\0" + packed), pixels=rows)
    yield "profile-bomb.png", png(20, 20, 8, 2, chunk(b"iCCP", b"a\0\0" + packed), pixels=rows)
    yield "exif-bomb.png", png(20, 20, 8, 2, chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + bytes(500_000)), pixels=rows)
    yield "pixel-bomb.png", png(20, 20, 8, 2, pixels=bytes(BOMB))
    yield "many-frames.png", png(20, 20, 8, 2, chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), pixels=rows)
    yield "wide-bomb.png", png(9_999_999, 1, 8, 0, pixels=bytes(10_000_000))
    yield "long-chunk.png", png(20, 20, pixels=rows)[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT" + bytes(50)
    jpeg = encoded(noise(generator, 40, 40), "JPEG")
    comments = b"".join(b"\xff\xfe" + struct.pack(">H", 65_535) + bytes(65_533) for _ in range(100))
    yield "many-comments.jpg", jpeg[:2] + comments + jpeg[2:]
    yield "fill-bytes.jpg", jpeg[:2] + b"\xff" * (4 << 20) + jpeg[2:]


def _strangers(generator: random.Random) -> Iterator[Named]:
    """Yield other kinds of files with an image's name, and files that are two things at once."""
    picture = noise(generator, 40, 40)
    for format in ("GIF", "BMP", "TIFF", "PPM", "PDF", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "DDS", "EPS"):
        yield f"stranger-{format.lower()}.png", encoded(picture, format)
    yield "drawing.png", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "entities.png", b'<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg>&a;</svg>'
    yield "postscript.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
    yield "document.png", b"%PDF-1.7\n1 0 obj<</OpenAction<</S/URI/URI(http://169.254.169.254)>>>>endobj\n%%EOF"
    yield "photoshop.png", b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 50_000, 50_000, 8, 3) + bytes(64)
    yield "archive.png", b"PK\3\4" + generator.randbytes(200)
    yield "script.png", b"#!/bin/sh\necho\n"
    yield "page.jpg", b"<html><script>alert(1)</script></html>"
    yield "fits.png", b"SIMPLE  =                    T" + bytes(2850)
    yield "random.png", generator.randbytes(10_000)
    yield "text.webp", b"RIFF\xff\xff\xff\xffWEBPVP8 \xff\xff\xff\xff" + bytes(100)
    yield "other-riff.webp", b"RIFF\x24\0\0\0WAVEfmt " + bytes(40)
    for format in FORMATS:
        wrong = ENDINGS[FORMATS[(FORMATS.index(format) + 1) % len(FORMATS)]]
        yield f"misnamed-{format.lower()}.{wrong}", encoded(picture, format)
        yield f"and-archive.{ENDINGS[format]}", encoded(picture, format) + b"PK\3\4" + generator.randbytes(500)
        yield f"and-script.{ENDINGS[format]}", encoded(picture, format) + b"<script>alert(1)</script>"
        yield f"archive-and.{ENDINGS[format]}", b"PK\3\4" + encoded(picture, format)
    yield "two-in-one.png", encoded(picture) + encoded(picture, "JPEG")


def special_files(root: Path) -> list[str]:
    """Create names that are not regular files, or lead elsewhere, and return them."""
    (root / "directory.png").mkdir()
    os.mkfifo(root / "pipe.png")
    listening = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(root)  # a socket's path must be short
    try:
        listening.bind("socket.png")
    finally:
        os.chdir(here)
        listening.close()
    links = {
        "zeros.png": "/dev/zero",
        "random-device.png": "/dev/urandom",
        "nothing.png": "/dev/null",
        "terminal.png": "/dev/tty",
        "loop.png": "loop.png",
        "broken.png": "not-there.png",
        "password.png": "/etc/passwd",
        "environment.png": "/proc/self/environ",
        "above.png": "..",
        "pipe-link.png": "pipe.png",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    return ["directory.png", "pipe.png", "socket.png", *links, "not-there-at-all.png", "directory.png/inside.png"]
