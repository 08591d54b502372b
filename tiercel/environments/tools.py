"""The built-in tools, which cut from the original pictures, in the coordinates in which the model writes boxes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, floor
from typing import Annotated, Any

from PIL import Image, ImageDraw
from pydantic import Field, FiniteFloat, ValidationError, validate_call
from transformers.utils import get_json_schema

from tiercel.config.schema import Reliability, Rollout
from tiercel.environments.processes import EnvironmentFailure, EnvironmentProcess, UserCode
from tiercel.errors import RecipeError
from tiercel.geometry import from_original, to_original
from tiercel.models.families.image_transforms import resized
from tiercel.sandbox.process import START_TIMEOUT
from tiercel.types import Box, CoordinateSpace, ImagePlan

MARK_COLOUR = (255, 0, 0)
MARK_SHARE = 0.03  # radius of a mark, as a share of the longer side
_DIGITS = 6  # decimals of a pixel; further ones come from rounding

BoxArgument = Annotated[list[FiniteFloat], Field(min_length=4, max_length=4)]
PointArgument = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]


class ToolProblem(ValueError):
    """Raised if a tool has no answer. The policy is told the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenPicture:
    """A picture that the policy saw. `original` decodes it in its own size, and raises DataError, or ToolProblem for a
    video."""

    original: Callable[[], Image.Image]
    plan: ImagePlan


@dataclass(frozen=True, slots=True)
class PictureTools:
    """Tools that answer with pictures of one trajectory. Each public method is a tool, and its hints and docstring make
    its schema. Raises ToolProblem, and DataError if the original cannot be read."""

    pictures: Sequence[SeenPicture]
    space: CoordinateSpace

    def zoom(self, box: BoxArgument, label: str = "", image: int = 1) -> Image.Image:
        """Look at a region of an image, enlarged, with all details of the original image.

        Args:
            box: The region as [x1, y1, x2, y2], in the coordinates in which you write boxes.
            label: What the region shows, in a few words.
            image: The number of the image, counted from 1. Images that tools return count on.
        """
        region, plan = self.crop(box, image), self._picture(image).plan
        scale = min(plan.processed_size[0] / region.width, plan.processed_size[1] / region.height)
        if scale <= 1:
            return region
        size = (round(region.width * scale) or 1, round(region.height * scale) or 1)
        return resized(region, size, Image.Resampling.BICUBIC)

    def crop(self, box: BoxArgument, image: int = 1) -> Image.Image:
        """Cut a region out of an image, in the resolution of the original image.

        Args:
            box: The region as [x1, y1, x2, y2], in the coordinates in which you write boxes.
            image: The number of the image, counted from 1. Images that tools return count on.
        """
        x1, y1, x2, y2 = self._in_original(image, (box[0], box[1], box[2], box[3]))
        if not (x1 < x2 and y1 < y2):
            raise ToolProblem(f"the box {box} has no area; x1 must be less than x2, and y1 less than y2")
        return self._picture(image).original().crop((floor(x1), floor(y1), ceil(x2), ceil(y2)))

    def mark(self, point: PointArgument, image: int = 1) -> Image.Image:
        """Look at an image with a red circle around a point.

        Args:
            point: The point as [x, y], in the coordinates in which you write boxes.
            image: The number of the image, counted from 1. Images that tools return count on.
        """
        x, y, _, _ = self._in_original(image, (point[0], point[1], point[0], point[1]))
        marked = self._picture(image).original().copy()
        radius = max(MARK_SHARE * max(marked.size), 2.0)
        outline = max(1, round(radius / 4))
        around = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(marked).ellipse(around, outline=MARK_COLOUR, width=outline)
        return marked

    def _picture(self, number: int) -> SeenPicture:
        if not 1 <= number <= len(self.pictures):
            raise ToolProblem(f"there is no image {number}; there are {len(self.pictures)}")
        return self.pictures[number - 1]

    def _in_original(self, number: int, box: Box) -> Box:
        """Map a box or a point to pixels of the original. Raises ToolProblem if it is not inside the picture."""
        plan = self._picture(number).plan
        exact = to_original(box, self.space, plan.original_size, plan.processed_size)
        x1, y1, x2, y2 = (round(value, _DIGITS) for value in exact)
        width, height = plan.original_size
        if min(x1, x2, y1, y2) < 0 or max(x1, x2) > width or max(y1, y2) > height:
            corner = from_original((0, 0, width, height), self.space, plan.original_size, plan.processed_size)[2:]
            raise ToolProblem(f"{list(box)} is not inside image {number}, which ends at {[*corner]}")
        return x1, y1, x2, y2


BUILT_IN: Mapping[str, Callable[..., Image.Image]] = {
    name: validate_call(getattr(PictureTools, name)) for name in ("crop", "mark", "zoom")
}


def use(name: str, tools: PictureTools, arguments: Mapping[str, Any]) -> Image.Image:
    """Call a built-in tool with the arguments that the policy wrote. Raises ToolProblem, and DataError."""
    if "self" in arguments:  # some versions of pydantic mistake it for the method's own argument
        raise ToolProblem("self: Unexpected keyword argument")
    try:
        return BUILT_IN[name](tools, **arguments)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ToolProblem("; ".join(wrong)) from error


ADVICE = "a tool has type hints and a Google-style docstring that describes it and each argument (docs/environments.md)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolbox:
    """What the policy can call, and what else the environment can do."""

    code: UserCode
    schemas: tuple[Mapping[str, Any], ...]  # of all tools, in the form that chat templates use
    responds: bool = False  # whether the environment answers turns without tool calls
    gives_reward: bool = False  # whether the environment has its own reward
    forks: bool = False  # whether the environment can be copied

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tools."""
        return tuple(schema["function"]["name"] for schema in self.schemas)


Toolboxes = Mapping[str | None, Toolbox]  # by the names of environments; one for all rows has the name None


def load_toolboxes(rollout: Rollout, reliability: Reliability) -> Toolboxes:
    """Find the tools of each environment, which has those of `rollout.tools` too. Raises RecipeError with everything
    that is wrong."""
    found: dict[str | None, Toolbox] = {}
    problems: list[str] = []
    for name, environment in rollout.environments.items():
        try:
            found[name] = load_toolbox(environment, rollout.tools, reliability, name)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return found


def load_toolbox(
    environment: str | None, tools: Sequence[str], reliability: Reliability, name: str | None = None
) -> Toolbox:
    """Find the tools of one of `rollout.environment` and of `rollout.tools`. The user's code is imported in a process
    and described there. `name` is that of the environment among several. Raises RecipeError with everything that is
    wrong."""
    code = UserCode(environment=environment, functions=tuple(name for name in tools if name not in BUILT_IN))
    key = "rollout.tools" if environment is None else ".".join(filter(None, ("rollout.environment", name)))
    try:
        found = _description(code, reliability) if code.exists else {}
    except EnvironmentFailure as failure:
        raise RecipeError([f"{key}: {failure}"]) from failure
    schemas = [get_json_schema(getattr(PictureTools, name)) for name in tools if name in BUILT_IN]
    toolbox = Toolbox(
        code=code,
        schemas=(*schemas, *found.get("schemas", ())),
        responds=found.get("responds", False),
        gives_reward=found.get("gives_reward", False),
        forks=found.get("forks", False),
    )
    problems = [f"{problem}; {ADVICE}" for problem in found.get("problems", ())]
    problems += [f"two tools have the name {name}" for name, count in Counter(toolbox.names).items() if count > 1]
    if problems:
        raise RecipeError([f"{key}: {problem}" for problem in problems])
    return toolbox


def _description(code: UserCode, reliability: Reliability) -> Mapping[str, Any]:
    with closing(EnvironmentProcess(code, reliability)) as process:
        return process.ask("describe", seconds=START_TIMEOUT)  # describing imports transformers
