"""Videos of rows: lists of frames, or files whose frames PyAV takes at an even pace.

A file is opened as what its first bytes say it is, MP4, Matroska (WebM) or AVI, from a file object: no container that
names other files or addresses is ever followed. Frames are turned upright, as pictures are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.images import ImageProblem, decode, open_header, resolve
from tiercel.errors import EnvironmentProblem
from tiercel.types import ImageRoots, Size, VideoSource

_HEAD_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What is known of a video's frames before they are taken."""

    size: Size
    frame_numbers: tuple[int, ...]  # in the file, or in the list
    fps: float  # of these frames


def open_video(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    """Size and frames of a video: of a list every frame's header, of a file its first frame. Raises ImageProblem, and
    EnvironmentProblem where a file needs PyAV."""
    return _header_of_list(source, roots, data) if source.frames else _header_of_file(source, roots, data)


def decode_video(source: VideoSource, roots: ImageRoots, data: Data, header: VideoHeader) -> Iterator[Image.Image]:
    """The frames in RGB, one after the other, for many large ones fill a memory. Raises ImageProblem."""
    frames = _frames_of_list(source, roots, data) if source.frames else _frames_of_file(source, roots, header)
    for frame in frames:
        if frame.size != header.size:
            raise _problem(source, f"has frames of {frame.size} among frames of {header.size} pixels")
        yield frame


def _problem(source: VideoSource, reason: str) -> ImageProblem:
    return ImageProblem(source.path, reason, field="videos")


def _header_of_list(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    count = len(source.frames)
    if count > data.video.max_frames:
        raise _problem(source, f"has {count} frames, more than data.video.max_frames = {data.video.max_frames}")
    try:
        sizes = [open_header(frame, roots, data.max_image_pixels) for frame in source.frames]
    except ImageProblem as problem:
        raise ImageProblem(problem.path, problem.reason, field="videos") from None
    if odd := [size for size in sizes if size != sizes[0]]:
        raise _problem(source, f"has frames of {odd[0]} among frames of {sizes[0]} pixels")
    return VideoHeader(size=sizes[0], frame_numbers=tuple(range(count)), fps=source.fps or data.video.fps)


def _frames_of_list(source: VideoSource, roots: ImageRoots, data: Data) -> Iterator[Image.Image]:
    for frame in source.frames:
        try:
            yield decode(frame, roots, data.max_image_pixels)
        except ImageProblem as problem:
            raise ImageProblem(problem.path, problem.reason, field="videos") from None


def _header_of_file(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    with _opened(source, roots) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > data.max_image_pixels:
            reason = f"{width} x {height} pixels are more than data.max_image_pixels = {data.max_image_pixels}"
            raise _problem(source, reason)
        rate, count = stream.average_rate or stream.guessed_rate, stream.frames
        first = next(container.decode(stream), None)
        if first is None:
            raise _problem(source, "has no frame that can be decoded")
        size = _upright(first).size
    if not count:
        with _opened(source, roots) as (container, stream):
            count = sum(1 for packet in container.demux(stream) if packet.size)
    if not count or not rate:
        raise _problem(source, "says neither how many frames it has nor how fast they are")
    numbers, fps = evenly(count, Fraction(rate), source.fps or data.video.fps, data.video.max_frames)
    return VideoHeader(size=size, frame_numbers=numbers, fps=fps)


def _frames_of_file(source: VideoSource, roots: ImageRoots, header: VideoHeader) -> Iterator[Image.Image]:
    wanted, taken = set(header.frame_numbers), 0
    with _opened(source, roots) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                yield _upright(frame)
                taken += 1
            if taken == len(wanted):
                return
    raise _problem(source, f"breaks off: {taken} of {len(wanted)} frames could be decoded")


def _upright(frame: Any) -> Image.Image:
    """In RGB, turned as the file asks for: phones lay portraits on their side."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def evenly(count: int, rate: Fraction, fps: float, most: int) -> tuple[tuple[int, ...], float]:
    """Which of `count` frames at `rate` a second to take for `fps` of them, at most `most`; and their real pace."""
    wanted = max(1, min(count, most, round(count * Fraction(fps) / rate)))
    numbers = tuple(count * number // wanted for number in range(wanted))
    return numbers, float(wanted * rate / count)


def _kind(head: bytes) -> str | None:
    """FFmpeg's name of the container that a file begins as."""
    if head[4:8] == b"ftyp":
        return "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else None


@contextmanager
def _opened(source: VideoSource, roots: ImageRoots) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of pictures."""
    try:
        path = resolve(source.path, roots)
    except ImageProblem as problem:
        raise ImageProblem(problem.path, problem.reason, field="videos") from None
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(
            f"{source.path}: a video file needs a package that is not installed: pip install av"
        ) from error
    try:
        with path.open("rb") as file:
            kind = _kind(file.read(_HEAD_BYTES))
            if kind is None:
                raise _problem(source, "is no MP4, Matroska (WebM) or AVI file")
            file.seek(0)
            with av.open(file, format=kind) as container:
                if not container.streams.video:
                    raise _problem(source, "has no stream of pictures")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise _problem(source, "has a codec that PyAV cannot decode")
                yield container, stream
    except ImageProblem:
        raise
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError) as error:
        raise _problem(source, f"is no readable video: {error}") from error
