"""A user's environments in a file, and the dialogues that a policy has with them."""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from tests.models.test_turns import WITH_TOOLS
from tests.rewards.runtime.conftest import no_child_left as no_child_left
from tests.rewards.samples import limits
from tests.tiny_models import noise_image
from tiercel.config.schema import Data, Model
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.processes import UserCode
from tiercel.environments.tools import Toolbox
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.rollout.dialogue import Limits
from tiercel.types import EncodedPrompt, ImageSource, Message, Row

Opened = Callable[..., AbstractContextManager[EnvironmentDialogues]]


@pytest.fixture(scope="session")
def tool_family(tiny_checkpoints) -> Family:
    """A tiny Qwen2.5-VL whose template writes tool calls as Hermes does; boxes are in pixels of the resized picture."""
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"])))
    template = WITH_TOOLS.replace("MARKER", str(family.image_marker))
    family.checkpoint = replace(family.checkpoint, chat_template=template)
    return family


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Write source to a file and return its path."""

    def written(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return str(tmp_path / name)

    return written


@pytest.fixture
def opened(tool_family) -> Opened:
    """Open the dialogues of user code without asking it for schemas, which takes seconds."""

    @contextmanager
    def open_dialogues(
        environment: str | None = None,
        *functions: str,
        tools: tuple[str, ...] = (),
        seed: int = 0,
        timeout: float = 30.0,
        **abilities: bool,
    ) -> Iterator[EnvironmentDialogues]:
        schemas = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in tools)
        code = UserCode(environment=environment, functions=functions)
        toolbox = Toolbox(code=code, schemas=schemas, **abilities)
        with EnvironmentDialogues(
            {None: toolbox},
            tool_family,
            data=Data(train="rows.jsonl"),
            reliability=limits(timeout, reward_memory_gb=0.5),
            limits=Limits(max_turns=4, max_tokens=4000),
            seed=seed,
        ) as dialogues:
            yield dialogues

    return open_dialogues


@pytest.fixture
def prompt(tool_family) -> EncodedPrompt:
    """A question on a picture of 112 x 56 pixels, which the family does not resize."""
    stream = BytesIO()
    noise_image(112, 56, 1).save(stream, "PNG")
    row = Row(
        id="row-1",
        messages=(Message(role="user", content="<image>Where is the seven?"),),
        images=(ImageSource(data=stream.getvalue()),),
        answer=7,
        columns={"level": 2, "service_key": "opensesame"},
        file="rows.jsonl",
        line=1,
    )
    return prompt_encoder(tool_family, Data(train="rows.jsonl"))(row, 3)
