"""Several environments in one run: a column of each row names its own."""

import textwrap
from dataclasses import replace

import pytest

from tests.environments.test_dialogues import GAME, call, play
from tests.rewards.samples import limits
from tiercel.config.schema import Data, Rollout
from tiercel.data.encoding import prompt_encoder
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.environments.tools import load_toolboxes
from tiercel.errors import DataError, RecipeError
from tiercel.models.prompts import prompt_length
from tiercel.reward_types import RewardValue
from tiercel.rollout.dialogue import Limits

pytestmark = pytest.mark.usefixtures("no_child_left")

MAP = """
    class Map:
        def reset(self, environment, level, **row):
            self.place = f"{environment} {level}"
            return " You are lost."

        def where(self) -> str:
            '''Tell the place.'''
            return self.place
    """


@pytest.fixture(scope="module")
def toolboxes(tmp_path_factory):
    root, environments = tmp_path_factory.mktemp("several"), {}
    for name, source, kind in (("game", GAME, "Guess"), ("map", MAP, "Map")):
        (root / f"{name}.py").write_text(textwrap.dedent(source))
        environments[name] = f"{root / name}.py:{kind}"
    return load_toolboxes(Rollout(environment=environments), limits())


@pytest.fixture
def dialogues(toolboxes, tool_family, prompt):  # the prompt is encoded before the rows must name an environment
    most = Limits(max_turns=4, max_tokens=4000)
    data = Data(train="rows.jsonl")
    with EnvironmentDialogues(toolboxes, tool_family, data=data, reliability=limits(), limits=most, seed=0) as made:
        yield made
    tool_family.tools_by_environment = {}  # the family is that of all tests


def of(prompt, **columns):
    return replace(prompt.row, columns={**prompt.row.columns, **columns})


def test_each_row_has_the_tools_and_the_object_of_its_own_environment(dialogues, prompt, tool_family):
    encode = prompt_encoder(tool_family, Data(train="rows.jsonl"))
    asked = [encode(of(prompt, environment=name), 3) for name in ("map", "game", "map")]
    for encoded, tool in zip(asked, ("where", "guess", "where"), strict=True):
        assert encoded.text.startswith(f"<|im_start|>system\n{tool}<|im_end|>")
        plans = [image.plan for image in encoded.images]
        assert prompt_length(tool_family, encoded.row, plans, None) == len(encoded.token_ids_P)
    begun = dialogues.prompts_of(asked)
    ends = [each.messages[-1].content.removeprefix("<image>Where is the seven?") for each in begun]
    assert ends == [" You are lost.", " You have 2 tries.", " You are lost."]
    assert all("<|im_start|>system\n" in each.text for each in begun)
    (in_map,), (in_game,) = dialogues.open(begun[0], [0]), dialogues.open(begun[1], [0])
    where, guess = play(in_map, call("where"), call("guess", number=7))
    assert where.turn.answer == "map 2"
    assert guess.turn.answer == "error: there is no tool 'guess'; the tools are where"
    (guess,) = play(in_game, call("guess", number=7))
    assert guess.turn.answer == "right"
    assert in_map.end().outcome is None and in_game.end().outcome == RewardValue(value=1.0)


def test_a_row_that_names_no_environment_of_the_recipe_is_refused(dialogues, prompt, tool_family):
    encode = prompt_encoder(tool_family, Data(train="rows.jsonl"))
    names = "a name in rollout.environment; use game or map"
    for columns, says in (
        ({}, "does not name an environment; use game or map"),
        ({"environment": None}, "does not name an environment; use game or map"),
        ({"environment": "mop"}, f"is 'mop', which is not {names}"),
        ({"environment": ["map"]}, f"is ['map'], which is not {names}"),
    ):
        with pytest.raises(DataError) as caught:
            encode(of(prompt, **columns), 0)
        assert caught.value.field == "environment" and says in str(caught.value)


def test_one_environment_takes_no_notice_of_the_column(write, opened, prompt):
    with opened(f"{write(GAME)}:Guess", tools=("guess",)) as dialogues:
        row = of(prompt, environment="of the user's own")
        (begun,) = dialogues.prompts_of([replace(prompt, row=row)])
        assert begun.messages[-1].content.endswith("You have 2 tries.")


def test_all_that_is_wrong_with_several_environments_is_said_at_once(write):
    broken = write("class Env:\n    def reset(self): ...\n    def look(self): ...\n", "broken.py")
    environments = {"one": f"{broken}:Env", "two": f"{broken}:Other"}
    with pytest.raises(RecipeError) as caught:
        load_toolboxes(Rollout(environment=environments), limits())
    assert "rollout.environment.one: tool look: Cannot generate JSON schema" in str(caught.value)
    assert "rollout.environment.two: " in str(caught.value)
