"""Hostile and odd images: every one is refused with its reason, or decoded to the picture that a viewer shows."""

import copy
import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from tiercel import image_decoding
from tiercel.data.media.images import ImageProblem, decode, open_header
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.image_decoding import upright_rgb
from tiercel.types import ImageRoots, ImageSource

LIMIT = 10_000
ANYWHERE = ImageRoots()  # for pictures that have no file


def encoded(image, format="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def embedded(image, format="PNG", **options):
    return ImageSource(data=encoded(image, format, **options))


def pixel(image, format="PNG", **options):
    picture = decode(embedded(image, format, **options), ANYWHERE, LIMIT)
    assert picture.mode == "RGB"
    return picture.getpixel((0, 0))


def problem(source, root=".", limit=LIMIT, read=decode, more=()):
    with pytest.raises(ImageProblem) as error:
        read(source, ImageRoots(base=str(root), more=tuple(map(str, more))), limit)
    assert isinstance(error.value, DataError)
    assert error.value.field == "images"
    return error.value.reason


def noise(size=(40, 30)):
    return Image.effect_noise(size, 60).convert("RGB")


def png_header(width, height):
    """A PNG that only claims a size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 100) + b"IDAT" + b"\0" * 50


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_size_and_picture_of_each_format(tmp_path, format):
    noise((7, 5)).save(tmp_path / "a", format)
    source = ImageSource(path="a")
    assert open_header(source, ImageRoots(base=str(tmp_path)), 35) == (7, 5)
    picture = decode(source, ImageRoots(base=str(tmp_path)), 35)
    assert (picture.size, picture.mode, picture.info) == ((7, 5), "RGB", {})


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF"])
def test_other_formats_are_refused(tmp_path, format):
    assert f"is a {format} image; convert it to PNG, JPEG or WEBP" in problem(embedded(noise(), format))
    noise().save(tmp_path / "a.jpg", format)
    with pytest.raises(DataError, match=rf"a\.jpg: is a {format} image"):
        open_header(ImageSource(path="a.jpg"), ImageRoots(base=str(tmp_path)), 10**6)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\0\0\0\x18ftypheic" + bytes(20), "is a HEIC image"),
        (b"\0\0\0\x18ftypavif" + bytes(20), "AVIF image"),
        (b"\0\0\0\x18ftypisom" + bytes(20), "is not a PNG, JPEG or WEBP image"),
        (b"GIF", "is not a PNG, JPEG or WEBP image"),
    ],
)
def test_other_formats_are_told_by_their_first_bytes(data, told):
    assert told in problem(ImageSource(data=data))


# Colours


def test_transparency_is_laid_on_white():
    assert pixel(Image.new("RGBA", (1, 1), (0, 0, 0, 0))) == (255, 255, 255)
    assert pixel(Image.new("RGBA", (1, 1), (0, 0, 0, 255))) == (0, 0, 0)
    assert pixel(Image.new("LA", (1, 1), (100, 0))) == (255, 255, 255)
    # 0.2 of black on white: 255 * 0.8
    assert pixel(Image.new("RGBA", (1, 1), (0, 0, 0, 51))) == (204, 204, 204)


def test_transparent_palette_entry_and_colour_key_are_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    picture = decode(embedded(palette, transparency=0), ANYWHERE, LIMIT)
    assert [picture.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]
    assert pixel(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3)) == (255, 255, 255)
    assert pixel(Image.new("RGB", (1, 1), (9, 2, 3)), transparency=(1, 2, 3)) == (9, 2, 3)


def test_greyscale_palette_and_bilevel():
    assert pixel(Image.new("L", (1, 1), 77)) == (77, 77, 77)
    assert pixel(Image.new("1", (1, 1), 1)) == (255, 255, 255)
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert pixel(palette) == (10, 20, 30)


def test_16_bit_greyscale_keeps_its_high_byte():
    samples = np.array([[0, 0x00FF, 0x4000, 0xFFFF]], dtype=np.uint16)
    picture = decode(embedded(Image.fromarray(samples)), ANYWHERE, LIMIT)
    assert np.asarray(picture)[0].tolist() == [[0] * 3, [0] * 3, [64] * 3, [255] * 3]


@pytest.mark.parametrize(("most", "is_dark"), [(0, False), (255, True), (4095, True), (4096, False)])
def test_16_bit_greyscale_of_fewer_bits_is_no_black_picture(most, is_dark):
    source = embedded(Image.fromarray(np.array([[0, most]], dtype=np.uint16)))
    if is_dark:
        assert f"16-bit values reach only {most} of 65535" in problem(source)
    else:
        assert np.asarray(decode(source, ANYWHERE, LIMIT))[0, 1].tolist() == [most >> 8] * 3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((32000, 32500), "lie between 32000 and 32500 of 65535"),
        ((40000, 40100), "nearly of one grey"),
        ((32767, 32768), "nearly of one grey"),
        ((31744, 35768), None),  # a tomography, shifted by 32768
        ((65000, 65535), None),  # a page that was scanned
        ((40000, 40000), None),  # a page without anything on it
    ],
)
def test_16_bit_greyscale_of_a_narrow_range_is_no_grey_picture(values, says):
    source = embedded(Image.fromarray(np.array([values], dtype=np.uint16)))
    if says is None:
        assert decode(source, ANYWHERE, LIMIT).size == (2, 1)
    else:
        assert says in problem(source)


def deep_png(colour_type, *samples):
    """A PNG of one row with 16 bits for each sample, which Pillow reads but does not write."""
    width = len(samples) // {2: 3, 4: 2, 6: 4}[colour_type]
    header = struct.pack(">IIBBBBB", width, 1, 16, colour_type, 0, 0, 0)
    pixels = zlib.compress(b"\0" + struct.pack(f">{len(samples)}H", *samples))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    sums = [struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks]
    parts = [struct.pack(">I", len(data)) + kind + data + end for (kind, data), end in zip(chunks, sums, strict=True)]
    return ImageSource(data=b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(
    ("colour_type", "samples", "is_dark"),
    [
        (2, (4095, 100, 0), True),
        (2, (4096, 100, 0), False),
        (6, (4095, 100, 0, 65535), True),
        (6, (0, 0, 40000, 65535), False),
        (2, (0, 0, 0), False),
        (6, (0, 0, 0, 65535), False),
    ],
)
def test_16_bit_colours_of_fewer_bits_are_no_black_picture(colour_type, samples, is_dark):
    source = deep_png(colour_type, *samples)
    if is_dark:
        assert "16-bit values reach only 4095 of 65535" in problem(source)
    else:
        assert decode(source, ANYWHERE, LIMIT).getpixel((0, 0)) == tuple(sample >> 8 for sample in samples[:3])


@pytest.mark.parametrize(("colour_type", "black"), [(4, (0,)), (6, (0, 0, 0))])
def test_black_ink_on_16_bit_transparency_is_no_dark_picture(colour_type, black):
    page = deep_png(colour_type, *black, 0, *black, 65535)
    assert np.asarray(decode(page, ANYWHERE, LIMIT))[0].tolist() == [[255] * 3, [0] * 3]
    assert decode(deep_png(colour_type, *black, 0), ANYWHERE, LIMIT).getpixel((0, 0)) == (255,) * 3


def test_white_on_a_transparent_background_is_no_white_picture():
    """A formula or a logo in white (hermes-agent 64548): on white nothing of it would be seen."""
    drawn = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    drawn.putpixel((0, 0), (9, 9, 9, 0))
    for picture, format in ((drawn, "PNG"), (drawn, "WEBP"), (drawn.convert("LA"), "PNG")):
        assert "all that is drawn on its transparent background is white" in problem(
            embedded(picture, format, **({"lossless": True} if format == "WEBP" else {}))
        )
    drawn.putpixel((1, 0), (0, 0, 0, 255))
    assert decode(embedded(drawn), ANYWHERE, LIMIT).getpixel((1, 0)) == (0, 0, 0)
    page = Image.new("RGBA", (20, 10), (255, 255, 255, 255))
    assert pixel(page) == (255, 255, 255)
    page.putpixel((0, 0), (0, 0, 0, 0))  # a screenshot with round corners
    assert pixel(page) == (255, 255, 255)
    assert pixel(Image.new("RGBA", (2, 1), (255, 255, 255, 254))) == (255, 255, 255)


def test_cmyk_jpeg():
    red, green, blue = pixel(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert red > 250
    assert max(green, blue) < 5


# Orientation

CORNERS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[255, 255, 0], [0, 255, 255], [255, 0, 255]]], np.uint8)
UPRIGHT = {
    1: CORNERS,
    2: CORNERS[:, ::-1],
    3: CORNERS[::-1, ::-1],
    4: CORNERS[::-1],
    5: CORNERS.transpose(1, 0, 2),
    6: np.rot90(CORNERS, -1),
    7: CORNERS[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(CORNERS, 1),
    9: CORNERS,
}


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_turns_picture_and_size(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    source = embedded(Image.fromarray(CORNERS), format, exif=exif, **options)
    picture = decode(source, ANYWHERE, LIMIT)
    assert np.array_equal(np.asarray(picture), UPRIGHT[orientation])
    assert open_header(source, ANYWHERE, LIMIT) == picture.size


def test_exif_orientation_of_a_jpeg():
    exif = Image.Exif()
    exif[0x0112] = 6
    source = embedded(noise((40, 30)), "JPEG", exif=exif)
    assert open_header(source, ANYWHERE, LIMIT) == (30, 40)
    assert decode(source, ANYWHERE, LIMIT).size == (30, 40)


# Animation


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_animations_are_refused(format):
    source = embedded(noise(), format, save_all=True, append_images=[noise(), noise()])
    for read in (open_header, decode):
        assert "animated (3 frames)" in problem(source, read=read)


def test_a_multi_picture_jpeg_is_its_first_picture():
    source = embedded(Image.new("RGB", (16, 8), "red"), "MPO", save_all=True, append_images=[noise((4, 4))])
    assert open_header(source, ANYWHERE, LIMIT) == (16, 8)
    red, green, blue = decode(source, ANYWHERE, LIMIT).getpixel((0, 0))
    assert red > 250
    assert max(green, blue) < 5


# Broken files


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_files_cut_short_are_refused(format, share):
    data = encoded(noise(), format)
    problem(ImageSource(data=data[: int(len(data) * share)]))


def test_broken_pixel_data_are_refused():
    data = bytearray(encoded(noise()))
    middle = len(data) // 2
    data[middle : middle + 20] = bytes(20)
    assert "cannot be read" in problem(ImageSource(data=bytes(data)))


def test_claimed_size_is_refused_from_the_header():
    limited = ImageSource(data=png_header(101, 100))
    assert problem(limited, limit=10_000) == "has 101 x 100 pixels, more than data.max_image_pixels = 10000"
    assert open_header(ImageSource(data=png_header(1, 10_000)), None, 10_000) == (1, 10_000)
    # The recipe's limit is the only one; Pillow's own would be 179 million.
    assert open_header(ImageSource(data=png_header(60_000, 60_000)), None, 10**12) == (60_000, 60_000)
    assert "more than data.max_image_pixels" in problem(ImageSource(data=png_header(60_000, 60_000)), limit=3 * 10**9)


def with_text(chunks: int, length: int, kind: str = "zTXt") -> bytes:
    """A whole picture of 4 x 3 with text before and after its pixels."""
    info = PngInfo()
    for number in range(chunks):
        if kind == "iTXt":
            info.add_itxt(f"workflow {number}", "x" * length, zip=True)
        else:
            info.add_text(f"workflow {number}", "x" * length, zip=kind == "zTXt")
    data = io.BytesIO()
    Image.new("RGB", (4, 3), (9, 90, 9)).save(data, "PNG", pnginfo=info)
    return data.getvalue()


@pytest.mark.parametrize("kind", ("zTXt", "iTXt", "tEXt"))
def test_text_beside_the_pixels_of_a_png_does_not_matter(kind):
    picture = decode(ImageSource(data=with_text(2, 3_000_000, kind)), ANYWHERE, LIMIT)
    assert picture.size == (4, 3) and picture.getpixel((0, 0)) == (9, 90, 9) and not picture.info


def test_text_beyond_all_measure_is_refused_in_a_short_line():
    assert len(problem(ImageSource(data=with_text(1, 70_000_000)))) < 120


def test_padding_without_end_is_given_up():
    data = encoded(noise(), "JPEG")
    padded = data[:2] + b"\xff" * 400_000 + data[2:]
    assert "has too many padding bytes" in problem(ImageSource(data=padded), read=open_header)


def test_text_and_empty_bytes_are_refused():
    assert "not a PNG, JPEG or WEBP" in problem(ImageSource(data=b"<svg xmlns='http://www.w3.org/2000/svg'/>"))
    assert "empty (0 bytes)" in problem(ImageSource(data=b""))
    assert "neither a path nor bytes" in problem(ImageSource())


def test_a_library_that_lets_truncated_files_pass_is_named(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(EnvironmentProblem, match="LOAD_TRUNCATED_IMAGES"):
        decode(embedded(noise()), ANYWHERE, LIMIT)


# Paths


def test_missing_empty_and_odd_files(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "directory.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    assert "no such file" in problem(ImageSource(path="none.png"), tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(encoded(noise(), "PNG"))
    assert "backslashes" in problem(ImageSource(path="in\\a.png"), tmp_path)
    lost = problem(ImageSource(path="in\\b.png"), tmp_path)
    assert "no such file" in lost and "backslashes" in lost
    assert "empty (0 bytes)" in problem(ImageSource(path="empty.png"), tmp_path)
    assert "not a regular file" in problem(ImageSource(path="directory.png"), tmp_path)
    assert "not a regular file" in problem(ImageSource(path="pipe.png"), tmp_path)
    long = problem(ImageSource(path="x" * 300), tmp_path)
    assert "a name in the path has 300 bytes" in long and len(long) < 300


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "data:image/png;base64,AAAA",
        "a\0.png",
        "a\n.png",
        "\x1b[2J.png",
        "\ud800.png",
        "\udc80.png",
        "a/" * 500_000,
    ],
)
def test_paths_are_checked_here_too(tmp_path, path):
    (tmp_path / "root").mkdir()
    noise().save(tmp_path / "secret.png")
    problem(ImageSource(path=path), tmp_path / "root")


def test_messages_show_a_path_whole_and_as_plain_text():
    assert str(ImageProblem("\x1b[2J\ud800.png", "why")) == "'\\x1b[2J\\ud800.png': why"
    assert str(ImageProblem("\u202ea.png", "why")) == "'\\u202ea.png': why"
    assert str(ImageProblem("ü.png", "why")) == "ü.png: why"
    assert str(ImageProblem("x/" * 1000, "why")) == "x/" * 1000 + ": why"
    assert str(ImageProblem("x" * 5000, "why")) == "x" * 200 + "...: why"


def places(tmp_path):
    """A root, another one, and a directory that is none; each with an image of its own size."""
    for width, name in enumerate(("root", "more", "outside"), start=1):
        (tmp_path / name).mkdir()
        noise((width, 1)).save(tmp_path / name / "a.png")
    return tmp_path / "root", tmp_path / "more", tmp_path / "outside"


def width(path, root, *more):
    roots = ImageRoots(base=str(root), more=tuple(map(str, more)))
    return open_header(ImageSource(path=str(path)), roots, LIMIT)[0]


def test_absolute_paths_lie_under_the_root_or_a_listed_one(tmp_path):
    root, more, outside = places(tmp_path)
    assert width(root / "a.png", root) == 1
    assert width(more / "a.png", root, more) == 2
    assert "data.image_roots" in problem(ImageSource(path=str(more / "a.png")), root)
    assert "data.image_roots" in problem(ImageSource(path=str(outside / "a.png")), root, more=[more])
    assert "no such file" in problem(ImageSource(path=str(more / "none.png")), root, more=[more])


def test_relative_paths_resolve_under_the_root_and_through_links_under_others(tmp_path):
    root, more, outside = places(tmp_path)
    (more / "only.png").write_bytes((more / "a.png").read_bytes())
    assert width("a.png", root, more) == 1
    assert "no such file" in problem(ImageSource(path="only.png"), root, more=[more])
    (root / "link.png").symlink_to(more / "a.png")
    (root / "folder").symlink_to(more)
    assert width("link.png", root, more) == width("folder/a.png", root, more) == 2  # as through its absolute path
    assert "symbolic link" in problem(ImageSource(path="link.png"), root)
    (root / "out.png").symlink_to(outside / "a.png")
    assert "data.image_roots" in problem(ImageSource(path="out.png"), root, more=[more])


def test_links_of_absolute_paths_are_followed_before_they_are_judged(tmp_path):
    root, more, outside = places(tmp_path)
    (more / "out.png").symlink_to(outside / "a.png")
    (more / "up").symlink_to(tmp_path)
    (outside / "in.png").symlink_to(more / "a.png")
    (tmp_path / "alias").symlink_to(more)
    for path in (more / "out.png", more / "up" / "outside" / "a.png"):
        assert "data.image_roots" in problem(ImageSource(path=str(path)), root, more=[more])
    assert "contains '..'" in problem(ImageSource(path=f"{more}/../outside/a.png"), root, more=[more])
    assert "contains '..'" in problem(ImageSource(path=f"{outside}/../more/a.png"), root, more=[more])
    assert width(outside / "in.png", root, more) == 2
    assert width(tmp_path / "alias" / "a.png", root, more) == 2
    assert width(more / "a.png", root, tmp_path / "alias") == 2  # the root itself is a link


def test_a_name_that_begins_as_a_root_is_not_under_it(tmp_path):
    root, more, _ = places(tmp_path)
    (tmp_path / "more2").mkdir()
    noise().save(tmp_path / "more2" / "a.png")
    assert "data.image_roots" in problem(ImageSource(path=str(tmp_path / "more2" / "a.png")), root, more=[more])


def test_the_whole_file_system_is_no_root(tmp_path):
    *_, outside = places(tmp_path)
    (tmp_path / "everything").symlink_to("/")
    for root in ("/", tmp_path / "everything"):
        assert "data.image_roots" in problem(ImageSource(path=str(outside / "a.png")), root, more=[root])
        assert "set data.image_root" in problem(ImageSource(path=str(outside / "a.png")[1:]), root)


def test_symbolic_links_may_not_leave_the_root(tmp_path):
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    noise((4, 3)).save(tmp_path / "outside.png")
    noise((4, 3)).save(root / "real" / "a.png")
    (root / "out.png").symlink_to(tmp_path / "outside.png")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "real")
    (root / "loop").symlink_to(root / "loop")
    assert "symbolic link" in problem(ImageSource(path="out.png"), root)
    assert "symbolic link" in problem(ImageSource(path="up/outside.png"), root)
    assert "cannot be read" in problem(ImageSource(path="loop"), root)
    assert open_header(ImageSource(path="in/a.png"), ImageRoots(base=str(root)), LIMIT) == (4, 3)


def test_a_root_that_is_a_link_itself(tmp_path):
    (tmp_path / "real").mkdir()
    noise((4, 3)).save(tmp_path / "real" / "a.png")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert open_header(ImageSource(path="a.png"), ImageRoots(base=str(tmp_path / "root")), LIMIT) == (4, 3)


def test_a_neighbour_whose_name_begins_like_the_root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root2").mkdir()
    noise().save(tmp_path / "root2" / "a.png")
    (tmp_path / "root" / "a.png").symlink_to(tmp_path / "root2" / "a.png")
    assert "symbolic link" in problem(ImageSource(path="a.png"), tmp_path / "root")


def test_a_problem_survives_the_way_between_processes():
    error = copy.copy(ImageProblem("a.png", "why", "images[1]"))  # like multiprocessing, by __reduce_ex__
    assert (error.path, error.reason, error.field, str(error)) == ("a.png", "why", "images[1]", "a.png: why")


@pytest.mark.parametrize("mode", ("LA", "RGBA", "I;16", "PA"))
def test_a_picture_that_is_converted_by_strips_is_the_same(monkeypatch, mode):
    samples = np.random.default_rng(0).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    image = Image.fromarray(samples, "RGBA")
    if mode == "I;16":
        image = Image.fromarray(samples[..., 0].astype(np.uint16) * 257)
    elif mode != "RGBA":
        image = image.convert(mode)
    expected = upright_rgb(image)
    monkeypatch.setattr(image_decoding, "_STRIP_PIXELS", 60)
    assert upright_rgb(image).tobytes() == expected.tobytes()
