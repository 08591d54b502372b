"""TensorBoard's own event records, written and flushed at once, without a thread, torch or TensorFlow."""

import io
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.config.yaml_text import render
from tiercel.trackers.tracker import Ending, TrackedPicture, TrackerPlace


class TensorBoard:
    """Adds an event file to the directory. Readers drop what earlier files contain from `first_step` on."""

    needs_earlier = False

    def __init__(self, place: TrackerPlace):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        # Readers take the files in the order of their names, so two files from the same second must have different
        # names.
        name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}"
        self._writer = RecordWriter((place.directory / name).open("xb"))
        self._write(file_version="brain.Event:2")  # from this version on, START drops later steps of older files
        self._write(step=place.first_step, session_log={"status": "START"})
        recipe = "".join(f"    {line}\n" for line in render(dict(place.config)).splitlines())
        self._write(step=place.first_step, summary={"value": [_text("recipe", recipe)]})

    def row(self, step: int, metrics: Mapping[str, float], pictures: Sequence[TrackedPicture]) -> None:
        values: list[dict[str, Any]] = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        for number, picture in enumerate(pictures):
            file = io.BytesIO()
            picture.image.save(file, format="PNG")
            width, height = picture.image.size
            image = {"width": width, "height": height, "colorspace": 3, "encoded_image_string": file.getvalue()}
            values.append({"tag": f"rollouts/{number}", "image": image})
            caption = picture.caption.replace("\n", "  \n")  # a line end in Markdown
            values.append(_text(f"rollouts/{number}/caption", caption))
        self._write(step=step, summary={"value": values})

    def close(self, ending: Ending) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        """Write an event; its messages are given as dictionaries of their fields."""
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


def _text(tag: str, text: str) -> dict[str, Any]:
    tensor = {"dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [text.encode("utf-8")]}
    return {"tag": tag, "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}
