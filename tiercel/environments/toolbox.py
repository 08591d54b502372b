"""The tools that a recipe names, found before the first prompt is encoded, because the chat template writes them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from tiercel.config.schema import Reliability
from tiercel.environments.processes import EnvironmentFailure, EnvironmentProcess, UserCode
from tiercel.environments.tools import BUILT_IN, PictureTools
from tiercel.errors import RecipeError
from tiercel.scoring.process import START_TIMEOUT

ADVICE = "a tool has type hints and a Google-style docstring that describes it and each argument (docs/environments.md)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolbox:
    """Holds what the policy can call, and what the environment can do besides."""

    code: UserCode
    schemas: tuple[Mapping[str, Any], ...]  # of all tools, as chat templates take them
    responds: bool = False  # the environment answers turns without tool calls
    gives_reward: bool = False  # the environment has a reward of its own

    @property
    def names(self) -> tuple[str, ...]:
        """Name the tools."""
        return tuple(schema["function"]["name"] for schema in self.schemas)


def load_toolbox(environment: str | None, tools: Sequence[str], reliability: Reliability) -> Toolbox:
    """Find the tools of `rollout.environment` and `rollout.tools`: the user's code is imported in a process, and
    described there. Raises RecipeError with all that is wrong."""
    code = UserCode(environment=environment, functions=tuple(name for name in tools if name not in BUILT_IN))
    key = "rollout.tools" if environment is None else "rollout.environment"
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
    )
    problems = [f"{problem}; {ADVICE}" for problem in found.get("problems", ())]
    problems += [f"two tools have the name {name}" for name, count in Counter(toolbox.names).items() if count > 1]
    if problems:
        raise RecipeError([f"{key}: {problem}" for problem in problems])
    return toolbox


def _description(code: UserCode, reliability: Reliability) -> Mapping[str, Any]:
    with closing(EnvironmentProcess(code, reliability)) as process:
        return process.ask("describe", seconds=START_TIMEOUT)  # it imports transformers
