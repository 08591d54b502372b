"""TensorBoard's own event records, written and flushed at once, without a thread, torch or TensorFlow."""

import io
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.config.yaml_text import render
from tiercel.trackers.tracker import TrackedPicture, TrackerPlace


class TensorBoard:
    """Adds an event file to the directory. Readers drop what earlier files contain from `first_step` on."""

    needs_earlier = False

    def __init__(self, place: TrackerPlace):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._shapes, self._types = tensor_pb2, tensor_shape_pb2, types_pb2
        # Readers take the files in the order of their names, so two files from the same second must have different
        # names.
        name = f"events.out.tfevents.{time.time():017.6f}.{platform.node()}"
        self._writer = RecordWriter((place.directory / name).open("xb"))
        self._write(file_version="brain.Event:2")  # from this version on, START drops later steps of older files
        self._write(step=place.first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        recipe = "".join(f"    {line}\n" for line in render(dict(place.config)).splitlines())
        self._write(step=place.first_step, summary=self._summary([self._text("recipe", recipe)]))

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(values))

    def images(self, step: int, pictures: Sequence[TrackedPicture]) -> None:
        values = []
        for number, picture in enumerate(pictures):
            file = io.BytesIO()
            picture.image.save(file, format="PNG")
            width, height = picture.image.size
            image = self._summaries.Summary.Image(
                width=width, height=height, colorspace=3, encoded_image_string=file.getvalue()
            )
            values.append(self._summaries.Summary.Value(tag=f"rollouts/{number}", image=image))
            caption = picture.caption.replace("\n", "  \n")  # a line end in Markdown
            values.append(self._text(f"rollouts/{number}/caption", caption))
        self._write(step=step, summary=self._summary(values))

    def close(self) -> None:
        self._writer.close()

    def _summary(self, values: list[Any]) -> Any:
        return self._summaries.Summary(value=values)

    def _text(self, tag: str, text: str) -> Any:
        shape = self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)])
        data = [text.encode("utf-8")]
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, tensor_shape=shape, string_val=data)
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()
