"""What trajectories share: the tools, the model's family, the processes of the user's code."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from PIL import Image

from tiercel.config.schema import Data, Reliability
from tiercel.data.encoding import prompt_encoder
from tiercel.data.media.images import decode
from tiercel.environments.answers import EnvironmentAnswer, answer_of, harmless, reset_fields
from tiercel.environments.calls import CallReader
from tiercel.environments.processes import EnvironmentFailure, EnvironmentProcess, Processes
from tiercel.environments.tools import Toolbox, Toolboxes, ToolProblem
from tiercel.models.families.base import Family
from tiercel.models.rendering import with_boxes
from tiercel.types import EncodedImage, EncodedPrompt, ImageSource, Row, VideoSource

Thing = TypeVar("Thing")


class SharedCache(Generic[Thing]):
    """A cache of recently used things, up to a number of bytes. Threads that ask for the same thing at the same time
    wait for the one that makes it. The newest is kept whatever its size."""

    def __init__(self, limit_bytes: int, size_of: Callable[[Thing], int]):
        self._limit, self._size_of = limit_bytes, size_of
        self._lock = Lock()
        self._things: OrderedDict[Hashable, Future[Thing]] = OrderedDict()  # least recently used first
        self._sizes: dict[Hashable, int] = {}  # bytes of the things that have been made

    def get(self, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """Return the cached thing for `key`, or make it. Raises the errors of `make`, and then caches nothing."""
        with self._lock:
            if is_new := key not in self._things:
                self._things[key] = Future()
            self._things.move_to_end(key)
            thing = self._things[key]
        if is_new:
            self._make(key, thing, make)
        return thing.result()

    def _make(self, key: Hashable, thing: "Future[Thing]", make: Callable[[], Thing]) -> None:
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                del self._things[key]
            thing.set_exception(error)
            return
        thing.set_result(made)
        with self._lock:
            self._sizes[key] = self._size_of(made)
            for oldest in [each for each in self._things if each in self._sizes and each != key]:
                if sum(self._sizes.values()) <= self._limit:
                    break
                del self._things[oldest], self._sizes[oldest]


KEPT_BYTES = 256 * 2**20  # of pictures in their own sizes, and again of pictures as the policy sees them


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSetting:
    """What the trajectories of an environment share."""

    toolbox: Toolbox
    family: Family
    data: Data
    processes: Processes
    reader: CallReader | None  # None: there are no tools
    harmless: Callable[[str], str]  # made by answers.harmless
    originals: SharedCache[Image.Image]
    seen: SharedCache[EncodedImage]

    def reset(self, process: EnvironmentProcess, row: Row, seed: int) -> EnvironmentAnswer:
        """Start a trajectory in a process. Raises EnvironmentFailure."""
        answer = answer_of(process.ask("reset", row=reset_fields(row), seed=seed), self.harmless)
        return EnvironmentAnswer(content="") if answer is None else answer

    def encode(self, row: Row, index: int) -> EncodedPrompt:
        """Encode a prompt as the loader does. Raises DataError."""
        return prompt_encoder(self.family, self.data)(row, index)

    def encode_pictures(self, row: Row, sources: Sequence[ImageSource]) -> tuple[EncodedImage, ...]:
        """Decode and resize pictures of an answer, within the limits of the row's own. Raises DataError."""

        def encoded(source: ImageSource) -> EncodedImage:
            key = (row.image_roots, source, row.pixels)
            return self.seen.get(key, lambda: self.family.encode_image(self.original(row, source), row.pixels))

        return tuple(encoded(source) for source in sources)

    def original(self, row: Row, source: ImageSource | VideoSource) -> Image.Image:
        """Decode a picture in its own size, once for all callers. Raises DataError, and ToolProblem for a video."""
        if isinstance(source, VideoSource):
            raise ToolProblem("it is a video; this tool takes images")
        roots, limit = row.image_roots, self.data.max_image_pixels
        return self.originals.get((roots, source), lambda: decode(source, roots, limit))

    def require_observation(self, prompt: EncodedPrompt, row: Row, observation: EnvironmentAnswer) -> None:
        """Raise EnvironmentFailure if a prompt does not end with the observation that `row` ends with, and DataError if
        it cannot contain it."""
        images = self.encode_pictures(row, observation.pictures)
        seen = prompt.images[len(prompt.images) - len(images) :]
        messages = with_boxes(row, [image.plan for image in prompt.images], self.family)
        is_same = messages[-1].content == prompt.messages[-1].content
        if not is_same or [image.sha256 for image in images] != [image.sha256 for image in seen]:
            self.encode(row, prompt.index)
            reason = (
                "it began otherwise than for the row's first sample; reset must return the same for each of its samples"
            )
            raise EnvironmentFailure(f"reset: {reason}")


def settings_of(
    toolboxes: Toolboxes, family: Family, data: Data, reliability: Reliability
) -> Mapping[str | None, EnvironmentSetting]:
    """Give the family the tools of each environment, and make what the trajectories of each share, by the names of the
    environments. Raises ModelError if the chat template writes no tool calls."""
    family.tools = toolboxes[None].schemas if None in toolboxes else ()
    family.tools_by_environment = {name: each.schemas for name, each in toolboxes.items() if name is not None}
    originals = SharedCache[Image.Image](KEPT_BYTES, lambda picture: 3 * picture.width * picture.height)
    seen = SharedCache[EncodedImage](KEPT_BYTES, lambda picture: sum(view.numel() for view in picture.views))
    written = harmless(family)
    return {
        name: EnvironmentSetting(
            toolbox=toolbox,
            family=family.with_tools(toolbox.schemas),
            data=data,
            processes=Processes(toolbox.code, reliability),
            reader=CallReader(family, data.system, toolbox.schemas) if toolbox.schemas else None,
            harmless=written,
            originals=originals,
            seen=seen,
        )
        for name, toolbox in toolboxes.items()
    }
