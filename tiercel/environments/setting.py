"""What all trajectories of a run share: the tools, the model's family, the processes of the user's code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.encoding import prompt_encoder
from tiercel.data.images import decode
from tiercel.environments.answers import Answer, answer_of, reset_fields
from tiercel.environments.calls import CallReader
from tiercel.environments.kept import Kept
from tiercel.environments.processes import EnvironmentFailure, EnvironmentProcess, Processes
from tiercel.environments.toolbox import Toolbox
from tiercel.environments.tools import ToolProblem
from tiercel.models.family import Family
from tiercel.models.prompts import with_boxes
from tiercel.types import EncodedImage, EncodedPrompt, ImageSource, Row, VideoSource

KEPT_BYTES = 256 * 2**20  # of pictures in their own sizes, and of pictures as the policy sees them


def _originals() -> Kept[Image.Image]:
    return Kept(KEPT_BYTES, lambda picture: 3 * picture.width * picture.height)


def _seen() -> Kept[EncodedImage]:
    return Kept(KEPT_BYTES, lambda picture: sum(view.numel() for view in picture.views))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Holds what the trajectories of a run share."""

    toolbox: Toolbox
    family: Family
    data: Data
    processes: Processes
    reader: CallReader | None  # None: there are no tools
    harmless: Callable[[str], str]  # as answers.harmless
    originals: Kept[Image.Image] = field(default_factory=_originals)
    seen: Kept[EncodedImage] = field(default_factory=_seen)

    def reset(self, process: EnvironmentProcess, row: Row, seed: int) -> Answer:
        """Begin a trajectory in a process. Raises EnvironmentFailure."""
        answer = answer_of(process.ask("reset", row=reset_fields(row), seed=seed), self.harmless)
        return Answer(content="") if answer is None else answer

    def encode(self, row: Row, index: int) -> EncodedPrompt:
        """Encode a prompt as the loader does. Raises DataError."""
        return prompt_encoder(self.family, self.data)(row, index)

    def encode_pictures(self, row: Row, sources: Sequence[ImageSource]) -> tuple[EncodedImage, ...]:
        """Decode and resize pictures that came back, within the limits of the row's own. Raises DataError."""

        def encoded(source: ImageSource) -> EncodedImage:
            key = (row.image_roots, source, row.pixels)
            return self.seen.get(key, lambda: self.family.encode_image(self.original(row, source), row.pixels))

        return tuple(encoded(source) for source in sources)

    def original(self, row: Row, source: ImageSource | VideoSource) -> Image.Image:
        """Decode a picture in its own size, once for all that ask for it. Raises DataError, and ToolProblem for a
        video."""
        if isinstance(source, VideoSource):
            raise ToolProblem("it is a video; this tool takes images")
        roots, limit = row.image_roots, self.data.max_image_pixels
        return self.originals.get((roots, source), lambda: decode(source, roots, limit))

    def require_observation(self, prompt: EncodedPrompt, row: Row, observation: Answer) -> None:
        """Raise EnvironmentFailure where a prompt does not end with an observation, as `row` does; DataError where it
        cannot have it."""
        images = self.encode_pictures(row, observation.pictures)
        seen = prompt.images[len(prompt.images) - len(images) :]
        messages = with_boxes(row, [image.plan for image in prompt.images], self.family)
        is_same = messages[-1].content == prompt.messages[-1].content
        if not is_same or [image.sha256 for image in images] != [image.sha256 for image in seen]:
            self.encode(row, prompt.index)
            reason = "its answer is another than for the row's first sample; all samples of a row begin alike"
            raise EnvironmentFailure(f"reset: {reason}")
