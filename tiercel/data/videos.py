"""Videos of rows: lists of frames, or files whose frames PyAV takes at an even pace.

A file is opened as what its first bytes say it is, MP4, Matroska (WebM) or AVI, from a file object: no container that
names other files or addresses is ever followed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.images import ImageProblem, decode, open_header, resolve
from tiercel.errors import EnvironmentProblem
from tiercel.types import Size, VideoSource

_HEAD_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What is known of a video's frames before they are decoded."""

    size: Size
    frame_numbers: tuple[int, ...]  # in the file, or in the list
    fps: float  # of these frames


def open_video(source: VideoSource, root: Path, data: Data) -> VideoHeader:
    """Size and frames of a video. Raises ImageProblem, and EnvironmentProblem where a file needs PyAV."""
    if source.frames:
        if len(source.frames) > data.video.max_frames:
            reason = f"has {len(source.frames)} frames, more than data.video.max_frames = {data.video.max_frames}"
            raise ImageProblem(source.path, reason, field="videos")
        size = open_header(source.frames[0], root, data.max_image_pixels)
        return VideoHeader(size=size, frame_numbers=tuple(range(len(source.frames))), fps=source.fps or data.video.fps)
    with _opened(source, root) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width or not height or width * height > data.max_image_pixels:
            raise ImageProblem(source.path, f"has frames of {width} x {height} pixels", field="videos")
        rate = stream.average_rate or stream.guessed_rate
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        if not count or not rate:
            raise ImageProblem(source.path, "says neither how many frames it has nor how fast they are", field="videos")
        numbers, fps = evenly(count, Fraction(rate), source.fps or data.video.fps, data.video.max_frames)
        return VideoHeader(size=(width, height), frame_numbers=numbers, fps=fps)


def decode_video(source: VideoSource, root: Path, data: Data) -> tuple[list[Image.Image], float]:
    """The frames in RGB, all of one size, and how many there are a second. Raises as `open_video`."""
    header = open_video(source, root, data)
    if source.frames:
        frames = [decode(frame, root, data.max_image_pixels) for frame in source.frames]
    else:
        wanted = set(header.frame_numbers)
        last = header.frame_numbers[-1]
        frames = []
        with _opened(source, root) as (container, stream):
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    frames.append(frame.to_image())
                if number == last:
                    break
        if len(frames) < len(wanted):
            reason = f"breaks off: {len(frames)} of {len(wanted)} frames could be decoded"
            raise ImageProblem(source.path, reason, field="videos")
    if odd := [frame.size for frame in frames if frame.size != header.size]:
        reason = f"has frames of {odd[0]} among frames of {header.size} pixels"
        raise ImageProblem(source.path, reason, field="videos")
    return frames, header.fps


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
def _opened(source: VideoSource, root: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of pictures."""
    try:
        path = resolve(source.path, root)
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
                raise ImageProblem(source.path, "is no MP4, Matroska (WebM) or AVI file", field="videos")
            file.seek(0)
            with av.open(file, format=kind) as container:
                if not container.streams.video:
                    raise ImageProblem(source.path, "has no stream of pictures", field="videos")
                yield container, container.streams.video[0]
    except (av.FFmpegError, OSError, ValueError) as error:
        raise ImageProblem(source.path, f"is no readable video: {error}", field="videos") from error
