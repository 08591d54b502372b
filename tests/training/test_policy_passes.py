"""What a microbatch must hold once the model has decided the form."""

from types import SimpleNamespace

import pytest

from tiercel.config import KtoRecipe
from tiercel.errors import RecipeError
from tiercel.planning.options import Subject
from tiercel.training.policy_passes import require_whole_rows


def kto(tokens) -> KtoRecipe:
    tree = {"model": {"path": "m"}, "lora": {}, "data": {"train": "rows.jsonl", "max_prompt_tokens": 100}, "kto": {}}
    tree |= {"learner": {"max_tokens_per_microbatch": tokens}, "train": {"steps": 1}, "output": "run"}
    return KtoRecipe.model_validate(tree)


def test_two_answers_of_a_model_that_repeats_prompts_need_room_for_both_prompts():
    require_whole_rows(kto(200), "split")
    require_whole_rows(kto(300), "repeated")
    require_whole_rows(kto("auto"), "repeated")
    with pytest.raises(RecipeError, match=r"learner\.max_tokens_per_microbatch: is 299, but must hold 300"):
        require_whole_rows(kto(299), "repeated")


@pytest.mark.parametrize(("obstacle", "tokens"), ((None, 200), ("its layers differ", 300)))
def test_auto_holds_such_rows(obstacle, tokens):
    subject = SimpleNamespace(recipe=kto("auto"), sizes=SimpleNamespace(obstacle=obstacle), prompt_tokens=100)
    assert Subject.smallest_tokens.fget(subject) == tokens
