"""The tools of a recipe, described before the first prompt."""

import re
import textwrap
from pathlib import Path

import pytest
from PIL import Image
from transformers.utils import get_json_schema

from tests.rewards.samples import limits
from tiercel.config.conflicts.rewards import BUILTIN_TOOLS
from tiercel.environments.tools import BUILT_IN, load_toolbox
from tiercel.environments.worker import Host
from tiercel.errors import RecipeError

pytestmark = pytest.mark.usefixtures("no_child_left")


def test_built_in_tools_need_no_process():
    toolbox = load_toolbox(None, ["zoom", "mark"], limits())
    assert toolbox.names == ("zoom", "mark") and not toolbox.code.exists
    with pytest.raises(RecipeError, match=r"rollout\.tools: two tools have the name zoom"):
        load_toolbox(None, ["zoom", "zoom"], limits())
    assert set(BUILT_IN) == set(BUILTIN_TOOLS)  # what recipes may name


def test_schemas_of_the_users_tools(write):
    path = write("""
        class Env:
            def reset(self, **row): ...

            def move(self, steps: int, way: str = "left") -> str:
                '''Move the piece.

                Args:
                    steps: How far.
                    way: Where to.
                '''

            def get_reward(self): ...
        """)
    toolbox = load_toolbox(f"{path}:Env", ["crop"], limits(0.01))  # describing has its own time limit
    assert toolbox.names == ("crop", "move") and (toolbox.responds, toolbox.gives_reward) == (False, True)
    parameters = toolbox.schemas[1]["function"]["parameters"]
    assert parameters["required"] == ["steps"]
    assert parameters["properties"]["way"] == {"type": "string", "description": "Where to."}


def test_all_that_is_wrong_with_tools_is_said_at_once(write):
    path = write("""
        class Wrong:
            def reset(self, **row): ...
            def silent(self, x: int): ...
            def untyped(self, x):
                '''Look.

                Args:
                    x: A number.
                '''
            def respond(self, completion): ...

        def zoom(box: list[int]) -> str:
            '''Look closer.

            Args:
                box: Where.
            '''
        """)
    with pytest.raises(RecipeError) as caught:
        load_toolbox(f"{path}:Wrong", ["zoom", f"{path}:zoom"], limits())
    for text in (
        "rollout.environment: tool silent: Cannot generate JSON schema for silent because it has no docstring!; a tool",
        "rollout.environment: tool untyped: Argument x is missing a type hint in function untyped; a tool has type",
        "rollout.environment: two tools have the name zoom",
    ):
        assert text in str(caught.value)


def test_code_that_cannot_be_imported_is_a_problem_of_the_recipe(write):
    path = write("print('loading')\nraise RuntimeError('boom')\n")
    with pytest.raises(RecipeError) as caught:
        load_toolbox(None, [f"{path}:lookup"], limits())
    for text in ("rollout.tools: ", "RuntimeError: boom", "it printed:\n  loading"):
        assert text in str(caught.value)


def test_the_examples_of_the_page_are_tools():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE)]
    sources = [block.strip() for block in blocks if re.search("^(class|def) ", block, re.MULTILINE)]
    names = []
    for source in sources:
        scope = {"Image": Image, "DICTIONARY": {}, "__name__": "mine"}
        exec(source, scope)
        found = scope[re.search(r"^(?:class|def) (\w+)", source, re.MULTILINE)[1]]
        tools = Host(found(), []).tools if isinstance(found, type) else [found]
        names += [get_json_schema(tool)["function"]["name"] for tool in tools]
    assert len(sources) == 5 and names == ["lookup", "guess", "north", "python"]
