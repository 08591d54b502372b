"""Read videos of rows: lists of frames, or files from which PyAV takes frames at equal distances.

The first bytes of a file decide whether it is opened as MP4, Matroska (WebM) or AVI. It is opened as a file object, so
that no other file or address that it names is opened. Frames are turned upright, as images are.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.media.images import ImageProblem, decode, open_header, resolve
from tiercel.data.texts import told
from tiercel.errors import EnvironmentProblem
from tiercel.types import ImageRoots, Size, VideoSource

_HEAD_BYTES = 16
_MOST_UNSTEADY = 0.01  # by which the usual and the average rate of a steady video may differ
_TICK = 1e-3  # seconds, to which Matroska rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """Describes the frames to take from a video."""

    size: Size
    frame_numbers: tuple[int, ...]  # positions in the file, or in the list; one may be there several times
    fps: float  # frames per second of the frames that are taken


def open_video(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    """Read the size of a video's frames and choose the frames to take. For a list, every frame's header is read; for a
    file, its first frame. Raises ImageProblem, and EnvironmentProblem if a file needs PyAV and it is not installed."""
    with _naming_videos():
        return _header_of_list(source, roots, data) if source.frames else _header_of_file(source, roots, data)


def decode_video(source: VideoSource, roots: ImageRoots, data: Data, header: VideoHeader) -> Iterator[Image.Image]:
    """Yield the frames in RGB, one at a time to save memory. Raises ImageProblem."""
    of_list = (decode(frame, roots, data.max_image_pixels) for frame in source.frames)
    with _naming_videos():
        for frame in of_list if source.frames else _frames_of_file(source, roots, header):
            if frame.size != header.size:
                raise _problem(source, f"has frames of {frame.size} pixels among frames of {header.size} pixels")
            yield frame


@contextmanager
def _naming_videos() -> Iterator[None]:
    """Report `videos` as the wrong field for each ImageProblem that is raised inside the context."""
    try:
        yield
    except ImageProblem as problem:
        raise ImageProblem(problem.path, problem.reason, field="videos") from problem.__cause__


def _problem(source: VideoSource, reason: str) -> ImageProblem:
    return ImageProblem(source.path, reason)


def _header_of_list(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    count = len(source.frames)
    if count > data.video.max_frames:
        raise _problem(source, f"has {count} frames, more than data.video.max_frames = {data.video.max_frames}")
    sizes = [open_header(frame, roots, data.max_image_pixels) for frame in source.frames]
    if odd := [size for size in sizes if size != sizes[0]]:
        raise _problem(source, f"has frames of {odd[0]} pixels among frames of {sizes[0]} pixels")
    return VideoHeader(size=sizes[0], frame_numbers=tuple(range(count)), fps=source.fps or data.video.fps)


def _header_of_file(source: VideoSource, roots: ImageRoots, data: Data) -> VideoHeader:
    with _opened(source, roots) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > data.max_image_pixels:
            raise _problem(source, told("large video", width, height, data.max_image_pixels))
        rate, count = stream.average_rate or stream.guessed_rate, stream.frames
        is_steady = stream.base_rate is not None and rate and abs(stream.base_rate / rate - 1) < _MOST_UNSTEADY
        # An edit list trims a video without a change of its number of frames.
        is_trimmed = rate and stream.duration and stream.duration * stream.time_base * rate < count - 1
        first = next(container.decode(stream), None)
        if first is None:
            raise _problem(source, "has no frame that can be decoded")
        size = _upright(first).size
    times: list[float] = []
    if not count or not is_steady or is_trimmed:
        with _opened(source, roots) as (container, stream):
            found, times = _times(container, stream)
        if found < count and _count_untrimmed(source, roots) < count:
            raise _problem(source, f"ends too early: only {found} of {count} frames are there")
        count = len(times) or found
    if not count or not rate:
        raise _problem(source, "does not state its number of frames or its frame rate")
    wanted, most = source.fps or data.video.fps, data.video.max_frames
    if all(abs(time - number / rate) <= 1 / rate for number, time in enumerate(times)):
        numbers, fps = evenly(count, Fraction(rate), wanted, most)
    else:
        numbers, fps = at_even_times(times, wanted, most)
    return VideoHeader(size=size, frame_numbers=numbers, fps=fps)


def _times(container: Any, stream: Any) -> tuple[int, list[float]]:
    """Count the frames of a file without decoding them, and return when each is shown, in seconds after the first;
    nothing if the file does not say it of all frames."""
    found = [(packet.pts, packet.is_discard) for packet in container.demux(stream) if packet.size]
    shown = [pts for pts, is_left_out in found if not is_left_out]
    if None in shown or len(set(shown)) < 2:
        return len(found), []
    first = min(shown)
    return len(found), [float((pts - first) * stream.time_base) for pts in sorted(shown)]


def _count_untrimmed(source: VideoSource, roots: ImageRoots) -> int:
    """Count the frames that are in a file, also those that its edit list leaves out."""
    with _opened(source, roots, ignore_editlist="1") as (container, stream):
        return _times(container, stream)[0]


def _frames_of_file(source: VideoSource, roots: ImageRoots, header: VideoHeader) -> Iterator[Image.Image]:
    wanted, left = Counter(header.frame_numbers), len(header.frame_numbers)
    with _opened(source, roots) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                picture = _upright(frame)
                for _ in range(wanted[number]):
                    yield picture
                left -= wanted[number]
            if not left:
                return
    wholly = len(header.frame_numbers)
    raise _problem(source, f"ends too early: only {wholly - left} of {wholly} frames could be decoded")


def _upright(frame: Any) -> Image.Image:
    """Convert a frame to RGB and rotate it as its file says: phones store upright videos sideways."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def evenly(count: int, rate: Fraction, fps: float, most: int) -> tuple[tuple[int, ...], float]:
    """Choose frames at equal distances: about `fps` per second from `count` frames at `rate` per second, at most
    `most`. Return their numbers and their actual frames per second."""
    wanted = max(1, min(count, most, round(count * Fraction(fps) / rate)))
    numbers = tuple(count * number // wanted for number in range(wanted))
    return numbers, float(wanted * rate / count)


def at_even_times(times: Sequence[float], fps: float, most: int) -> tuple[tuple[int, ...], float]:
    """Choose frames as `evenly` does from a video whose frames are shown at `times`, in seconds after the first: those
    that are on the screen at equal distances of time."""
    length = times[-1] * len(times) / (len(times) - 1)  # as if the last one were shown as long as the others on average
    wanted = max(1, min(len(times), most, round(length * fps)))
    numbers = tuple(bisect_right(times, length * place / wanted + _TICK) - 1 for place in range(wanted))
    return numbers, wanted / length


def _kind(head: bytes) -> str | None:
    """Return FFmpeg's name for a file's container, from its first bytes; None if it is unknown."""
    if head[4:8] == b"ftyp":
        return "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else None


@contextmanager
def _opened(source: VideoSource, roots: ImageRoots, **options: str) -> Iterator[tuple[Any, Any]]:
    """Open a video file, with FFmpeg's options. Yields the container and its first video stream."""
    path = resolve(source.path, roots)
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(told("no PyAV", source.path)) from error
    try:
        with path.open("rb") as file:
            kind = _kind(file.read(_HEAD_BYTES))
            if kind is None:
                raise _problem(source, "is not an MP4, Matroska (WebM) or AVI file")
            file.seek(0)
            with av.open(file, format=kind, options=options) as container:
                if not container.streams.video:
                    raise _problem(source, "has no video stream")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise _problem(source, "has a codec that PyAV cannot decode")
                yield container, stream
    except ImageProblem:
        raise
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError) as error:
        raise _problem(source, f"cannot be read as a video: {error}") from error
