"""Decoding of pictures to plain RGB. Imports no torch, so that a reward's process opens pictures as training does."""

import io

import numpy as np
from PIL import Image

_ORIENTATION_TAG = 0x0112
# EXIF orientation -> the operation that turns the picture upright. Pictures with any other value are upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_MODES = frozenset({"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"})
SIDEWAYS = frozenset({5, 6, 7, 8})
_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 1 << 22
_DARKEST = 1 << 12  # 16-bit values below it, as of 12 bits, have a high byte of at most 15
_NEARLY_OPAQUE = 250  # mean of alpha; a white page with round corners has more
_16_BIT_COLOURS = ("RGB;16B", "RGBA;16B", "LA;16B")  # of which Pillow keeps the high bytes


def open_picture(file: str) -> Image.Image:
    """Open a file as an upright picture in 8-bit RGB."""
    with Image.open(file) as image:
        return upright_rgb(image)


def orientation(image: Image.Image) -> int:
    """Read the EXIF orientation without loading the pixels."""
    if image.format == "PNG":  # its getexif() would decode the picture first
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
    else:
        exif = image.getexif()
    return exif.get(_ORIENTATION_TAG, 1)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode an open image to an upright picture in 8-bit RGB, without metadata. Transparent pixels are drawn on white,
    16-bit values keep their high byte, and CMYK is converted without a colour profile. Raises ValueError if hardly
    anything would be left to see: of 16-bit values that use few of their bits, or of white that is drawn on white."""
    # Read before load(), like the size in the header, because load() also reads metadata after the pixels.
    transposition = _UPRIGHT.get(orientation(image))
    is_16_bit_colour = any(tile[3] in _16_BIT_COLOURS for tile in getattr(image, "tile", ()))
    image.load()
    picture = _to_rgb(image)
    if is_16_bit_colour and 0 < (most := int(np.max(picture.getextrema()))) < _DARKEST >> 8:
        raise ValueError(_dark(most << 8 | 0xFF))
    return picture if transposition is None else picture.transpose(transposition)


def png_file(image: Image.Image) -> bytes:
    """Encode a picture as a PNG file, upright; in 8-bit RGB if PNG does not have its mode. Raises ValueError if its
    pixels cannot be read."""
    buffer = io.BytesIO()
    try:
        if orientation(image) in _UPRIGHT or image.mode not in _PNG_MODES:
            image = upright_rgb(image)
        image.save(buffer, "PNG", compress_level=1)
    except OSError as error:
        raise ValueError(f"a picture cannot be read: {error}") from error
    return buffer.getvalue()


def _dark(most: int) -> str:
    return (
        f"its 16-bit values reach only {most} of 65535, so the picture would be nearly black; scale them by "
        f"65535 / {most}, or save it with 8 bits"
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    is_16_bit = image.mode == "I" or image.mode.startswith("I;16")
    if is_16_bit or image.has_transparency_data:
        if is_16_bit:
            _require_shades(image)
        (width, height), convert = image.size, _from_16_bit if is_16_bit else _on_white
        picture, rows = Image.new("RGB", image.size), max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):  # in strips, or a large picture would take several times its own memory
            picture.paste(convert(image.crop((0, top, width, min(height, top + rows)))), (0, top))
        if not is_16_bit:
            _require_drawn(image, picture)
    else:
        picture = image.convert("RGB")
    picture.info = {}  # otherwise profiles and EXIF would be written whenever the picture is saved
    return picture


def _require_shades(image: Image.Image) -> None:
    """Raise ValueError for 16-bit greyscale that is dark, or of which the high bytes differ by no more than 1."""
    least, most = image.getextrema()
    if not isinstance(least, int) or not isinstance(most, int) or least == most == 0:
        return
    if most < _DARKEST:
        raise ValueError(_dark(most))
    if most > least and (most >> 8) - (least >> 8) < 2:
        raise ValueError(
            f"its 16-bit values lie between {least} and {most} of 65535, so the picture would be nearly of one grey; "
            "stretch them to 0 to 65535, or save it with 8 bits"
        )


def _require_drawn(image: Image.Image, picture: Image.Image) -> None:
    """Raise ValueError for a picture of which a real part is transparent, and all else is white."""
    if picture.getextrema() != ((255, 255),) * 3:
        return
    alpha = image.convert("RGBA").getchannel("A")
    if alpha.getextrema()[1] != 0 and np.asarray(alpha).mean() < _NEARLY_OPAQUE:
        raise ValueError(
            "all that is drawn on its transparent background is white, and transparent parts become white, so nothing "
            "would be seen; save it on a background of another colour"
        )


def _on_white(image: Image.Image) -> Image.Image:
    canvas = Image.new("RGBA", image.size, _WHITE)
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Convert 16-bit greyscale by its high byte (Pillow would clip at 255); the transparent value becomes white."""
    samples = np.asarray(image)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
