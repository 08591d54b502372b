"""Videos as lists of frames and as real files, which PyAV writes and reads here."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.media.images import ImageProblem
from tiercel.data.media.videos import at_even_times, decode_video, evenly, open_video
from tiercel.types import ImageRoots, ImageSource, VideoSource

av = pytest.importorskip("av")
CODECS = {".mp4": "mpeg4", ".mkv": "mpeg4", ".avi": "mpeg4"}


def data(**video):
    return Data(train="rows.jsonl", video=video)


def write_video(path, count, rate=10, size=(64, 48)):
    """Frames whose grey says their number: 10 times it."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix], rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            picture = np.full((size[1], size[0], 3), 10 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def decoded(source, root, data):
    header = open_video(source, root, data)
    return list(decode_video(source, root, data, header)), header.fps


def numbers(frames):
    return [round(float(np.asarray(frame).mean()) / 10) for frame in frames]


@pytest.mark.parametrize(
    ("count", "rate", "fps", "most", "expected", "pace"),
    [
        (20, 10, 2.0, 32, (0, 5, 10, 15), 2.0),
        (20, 10, 30.0, 32, tuple(range(20)), 10.0),  # no more than there are
        (100, 10, 2.0, 4, (0, 25, 50, 75), 0.4),
        (3, 30, 2.0, 32, (0,), 10.0),
        (25, 10, 2.0, 32, (0, 5, 10, 15, 20), 2.0),
    ],
)
def test_frames_are_taken_evenly(count, rate, fps, most, expected, pace):
    assert evenly(count, Fraction(rate), fps, most) == (expected, pytest.approx(pace))


@pytest.mark.parametrize("suffix", CODECS)
def test_frames_of_a_file(tmp_path, suffix):
    write_video(tmp_path / f"a{suffix}", count=20)
    header = open_video(VideoSource(path=f"a{suffix}"), ImageRoots(base=str(tmp_path)), data())
    assert (header.size, header.frame_numbers, header.fps) == ((64, 48), (0, 5, 10, 15), 2.0)
    frames, fps = decoded(VideoSource(path=f"a{suffix}", fps=5.0), ImageRoots(base=str(tmp_path)), data())
    assert numbers(frames) == list(range(0, 20, 2)) and fps == 5.0
    assert len(decoded(VideoSource(path=f"a{suffix}"), ImageRoots(base=str(tmp_path)), data(max_frames=2))[0]) == 2


def test_frames_as_a_list(tmp_path):
    for number in range(3):
        Image.new("RGB", (8, 6), (10 * number,) * 3).save(tmp_path / f"{number}.png")
    source = VideoSource(path="0.png", frames=tuple(ImageSource(path=f"{number}.png") for number in range(3)))
    frames, fps = decoded(source, ImageRoots(base=str(tmp_path)), data(fps=4.0))
    assert (numbers(frames), fps) == ([0, 1, 2], 4.0)
    with pytest.raises(ImageProblem, match=r"3 frames, more than data\.video\.max_frames = 2"):
        open_video(source, ImageRoots(base=str(tmp_path)), data(max_frames=2))
    Image.new("RGB", (9, 6)).save(tmp_path / "2.png")
    with pytest.raises(ImageProblem, match="has frames of"):
        open_video(source, ImageRoots(base=str(tmp_path)), data())
    (tmp_path / "2.png").unlink()
    with pytest.raises(ImageProblem, match=r"2\.png: there is no such file") as error:
        open_video(source, ImageRoots(base=str(tmp_path)), data())
    assert error.value.field == "videos"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"#EXTM3U\nhttp://127.0.0.1:9/a.ts\n", "not an MP4, Matroska"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not an MP4, Matroska"),
        (b"\0\0\0\x18ftypmp42" + b"\0" * 100, "cannot be read as a video"),
        (b"\x1a\x45\xdf\xa3" + b"\1" * 100, "cannot be read as a video"),
        (b"", "the file is empty"),
    ],
)
def test_files_that_are_no_video(tmp_path, content, says):
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(ImageProblem, match=says) as error:
        open_video(VideoSource(path="a.mp4"), ImageRoots(base=str(tmp_path)), data())
    assert error.value.field == "videos"


def test_a_file_that_breaks_off_is_refused_or_whole(tmp_path):
    write_video(tmp_path / "a.mkv", count=20)
    whole = (tmp_path / "a.mkv").read_bytes()
    refused = 0
    for length in range(8, len(whole), len(whole) // 40):
        (tmp_path / "a.mkv").write_bytes(whole[:length])
        try:
            frames, _ = decoded(VideoSource(path="a.mkv", fps=10.0), ImageRoots(base=str(tmp_path)), data())
        except ImageProblem as problem:
            assert problem.field == "videos"
            refused += 1
        else:
            assert numbers(frames) == list(range(len(frames)))
    assert refused > 3


@pytest.mark.parametrize("suffix", CODECS)
def test_flipped_bytes_are_a_rejected_row_at_worst(tmp_path, suffix):
    write_video(tmp_path / f"a{suffix}", count=6)
    whole = (tmp_path / f"a{suffix}").read_bytes()
    generator = np.random.default_rng(0)
    fields = []
    for _ in range(60):
        spoilt = bytearray(whole)
        for place in generator.integers(0, len(whole), 8):
            spoilt[place] = generator.integers(256)
        (tmp_path / f"a{suffix}").write_bytes(bytes(spoilt))
        try:
            frames, _ = decoded(VideoSource(path=f"a{suffix}"), ImageRoots(base=str(tmp_path)), data())
        except ImageProblem as problem:
            fields.append(problem.field)
        else:
            assert frames
    assert fields and set(fields) == {"videos"}


def test_a_portrait_that_lies_on_its_side_is_turned_upright(tmp_path):
    left = np.zeros((48, 64, 3), dtype=np.uint8)
    left[:, :32] = 200  # the left half is light
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(left, format="rgb24")))
        container.mux(stream.encode())
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    matrix = (
        content.index(b"tkhd") + 4 + 4 + 5 * 4 + 4 * 2 + 4 * 2
    )  # for version 0: flags, 5 fields, 2 reserved, 4 of 16 bits
    turned = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]  # 90 degrees clockwise
    content[matrix : matrix + 36] = struct.pack(">9i", *turned)
    (tmp_path / "a.mp4").write_bytes(bytes(content))
    (frame,), _ = decoded(VideoSource(path="a.mp4"), ImageRoots(base=str(tmp_path)), data())
    picture = np.asarray(frame)
    assert picture.shape == (64, 48, 3)
    assert picture[:32].mean() > 150 and picture[32:].mean() < 50  # what was on the left is above


def test_a_path_that_leaves_the_root_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "a.mp4", count=2)
    (tmp_path / "in" / "a.mp4").symlink_to(tmp_path / "a.mp4")
    with pytest.raises(ImageProblem):
        open_video(VideoSource(path="a.mp4"), ImageRoots(base=str(tmp_path / "in")), data())


def test_absolute_paths_of_files_and_frames_need_a_root(tmp_path):
    (tmp_path / "more").mkdir()
    write_video(tmp_path / "more" / "a.mp4", count=2)
    Image.new("RGB", (8, 6)).save(tmp_path / "more" / "0.png")
    frame = str(tmp_path / "more" / "0.png")
    sources = (
        VideoSource(path=str(tmp_path / "more" / "a.mp4")),
        VideoSource(path=frame, frames=(ImageSource(path=frame),) * 2),
    )
    for source in sources:
        assert open_video(source, ImageRoots(base="x", more=(str(tmp_path / "more"),)), data()).size[1] >= 6
        with pytest.raises(ImageProblem, match=r"data\.image_roots"):
            open_video(source, ImageRoots(base="x"), data())


def write_at(path, times, rate, options=None):
    """Frames whose grey says their number, shown at these milliseconds."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(CODECS[path.suffix], rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * number, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.parametrize("suffix", (".mp4", ".mkv"))
def test_frames_at_uneven_times_are_taken_by_their_times(tmp_path, suffix):
    """As of a screen that was recorded: ten frames in the first second, and then one that stays."""
    times = [100 * number for number in range(10)] + [1000, 3000]
    write_at(tmp_path / f"a{suffix}", times, rate=10)
    source, roots = VideoSource(path=f"a{suffix}", fps=2.0), ImageRoots(base=str(tmp_path))
    length = 3.0 * 12 / 11  # the last frame is shown as long as the others on average
    header = open_video(source, roots, data())
    wanted = round(length * 2)
    expected = [sum(time <= 1000 * length * place / wanted + 1 for time in times) - 1 for place in range(wanted)]
    assert header.frame_numbers == tuple(expected) and len(set(expected)) < len(expected)
    assert header.fps == pytest.approx(wanted / length, rel=1e-3)
    frames = list(decode_video(source, roots, data(), header))
    assert numbers(frames) == expected


def test_a_rate_that_the_times_of_the_frames_deny_is_not_believed(tmp_path):
    """A browser's recording (uploadcare-widget 555) says 1,000 frames a second: ten seconds would be one frame."""
    write_at(tmp_path / "a.mkv", [100 * number for number in range(20)], rate=1000)
    header = open_video(VideoSource(path="a.mkv"), ImageRoots(base=str(tmp_path)), data())
    assert header.frame_numbers == (0, 5, 10, 15) and header.fps == pytest.approx(2.0, rel=1e-3)


def test_times_of_frames_choose_what_is_on_the_screen():
    assert at_even_times([0, 1, 2, 3], 1.0, 32) == ((0, 1, 2, 3), 1.0)
    assert at_even_times([0, 1, 2, 3], 0.5, 32) == ((0, 2), 0.5)
    assert at_even_times([0, 0.1, 0.2, 3], 1.0, 32) == ((0, 2, 2, 3), 1.0)
    assert at_even_times([0, 0.1, 0.2, 3], 9.0, 2) == ((0, 2), 0.5)


@pytest.mark.parametrize("is_steady", (True, False))
def test_frames_that_an_edit_list_leaves_out_are_not_missed(tmp_path, is_steady):
    """A phone trims a video so: the frames stay in the file, and the edit list says which are shown."""
    late = 0 if is_steady else 30
    write_at(tmp_path / "a.mp4", [100 * number + number % 2 * late for number in range(24)], rate=10)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    struct.pack_into(">I", content, content.index(b"elst") + 12, 1200)  # milliseconds that are shown
    (tmp_path / "a.mp4").write_bytes(bytes(content))
    frames, _ = decoded(VideoSource(path="a.mp4", fps=10.0), ImageRoots(base=str(tmp_path)), data())
    assert numbers(frames) == list(range(12))


def test_a_video_at_uneven_times_that_breaks_off_is_refused(tmp_path):
    times = [100 * number + number % 2 * 30 for number in range(24)]
    write_at(tmp_path / "a.mp4", times, rate=10, options={"movflags": "faststart"})
    whole = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(whole[: len(whole) * 4 // 5])
    with pytest.raises(ImageProblem, match=r"ends too early: only \d+ of 24 frames are there"):
        open_video(VideoSource(path="a.mp4"), ImageRoots(base=str(tmp_path)), data())
