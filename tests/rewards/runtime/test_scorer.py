from dataclasses import replace

import pytest

from tests.rewards.samples import group, reward
from tests.trajectories import TURNS, trajectory_group
from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.reward_types import RewardValue, SampleImage
from tiercel.rewards.runtime.metrics import count_failures
from tiercel.rewards.runtime.scorer import Scorer, is_right, make_sample, reward_names, weighted_sum
from tiercel.types import Message

pytestmark = pytest.mark.usefixtures("no_child_left")

FAILED = RewardValue(value=None, failure="boom")
ABSENT = RewardValue(value=None)


def of(*values):
    return [RewardValue(value=value) for value in values]


def scorer(*rewards, timeout=30.0):
    return Scorer(tuple(rewards), Reliability(reward_timeout=timeout), "resized_pixels")


def test_none_leaves_the_weighted_sum_and_a_failure_masks_it():
    assert weighted_sum(of(0.5, 1.0), [2.0, 0.25]) == 1.25
    assert weighted_sum([*of(0.5), ABSENT], [2.0, 0.25]) == 1.0
    assert weighted_sum([*of(0.5), FAILED], [2.0, 0.25]) is None
    assert weighted_sum([*of(0.5), FAILED], [2.0, 0.0]) == 1.0  # only measured
    assert weighted_sum([ABSENT, ABSENT], [2.0, 0.25]) is None
    assert weighted_sum([ABSENT, *of(0.5)], [2.0, 0.0]) is None
    assert weighted_sum(of(0.5, 1.0), [0.0, 0.0]) == 0.0  # of distillation
    assert weighted_sum(of(3e38), [1e300]) is None
    assert weighted_sum(of(3e38, 3e38), [1.0, 1.0]) is None


def test_the_first_reward_with_a_threshold_that_applies_judges():
    assert is_right(of(0.5), [0.5]) is True
    assert is_right(of(0.49), [0.5]) is False
    assert is_right(of(0.0, 1.0), [None, 1.0]) is True
    assert is_right([ABSENT, *of(0.0)], [0.5, 1.0]) is False
    assert is_right([FAILED, *of(1.0)], [0.5, 1.0]) is False
    assert is_right([*of(1.0), FAILED], [0.5, 1.0]) is True
    assert is_right([ABSENT], [0.5]) is None
    assert is_right([FAILED], [None]) is None
    assert is_right(of(1.0), [None]) is None


def test_names_are_the_built_ins_or_the_functions_and_unique():
    rewards = [
        reward(name="iou"),
        reward(call="a.py:score"),
        reward(call="b.c:score"),
        reward(call="b.c:iou"),
        reward(name="iou"),
    ]
    assert reward_names(rewards) == ("iou", "score", "score_2", "iou_2", "iou_3")


def test_a_sample_has_the_last_user_turn_the_rows_columns_and_both_sizes():
    whole = group("<answer>7</answer>", answer=7, columns={"level": 2})
    made = make_sample(whole.prompt, whole.completions[0], "thousandths")
    assert (made.id, made.prompt, made.completion) == ("row-1", "Where is the 7?", "<answer>7</answer>")
    assert (made.token_count, made.is_truncated, made.answer, made.columns) == (18, False, 7, {"level": 2})
    assert made.images == (SampleImage(path="a.png", original_size=(200, 100), processed_size=(400, 50)),)
    assert made.coordinate_space == "thousandths"


def test_a_sample_has_the_pictures_that_an_environment_added_to_the_prompt():
    whole = group("<answer>7</answer>")
    prompt = replace(whole.prompt, images=whole.prompt.images * 2)
    assert [image.path for image in make_sample(prompt, whole.completions[0], None).images] == ["a.png", None]


@pytest.mark.parametrize(
    ("head", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<|Assistant|><seed:think>", "<seed:think>"),
        ("<|im_start|>assistant\n", ""),
        ("<assistant>\n", ""),  # a frame, not a thought
        ("<think></think>\nmodel:", ""),
    ],
)
def test_a_sample_has_what_the_template_opened(head, opened):
    whole = group("Two.</think>")
    prompt = replace(whole.prompt, text=f"<|im_start|>user\nThink in <think>.<|im_end|>\n{head}")
    assert make_sample(prompt, whole.completions[0], None).opened == opened


def test_a_tag_that_the_user_wrote_is_not_opened():
    whole = group("Two.</think>")
    asked = Message(role="user", content="Begin after <think>")
    prompt = replace(whole.prompt, text="USER: Begin after <think>\n", messages=(asked,))
    assert make_sample(prompt, whole.completions[0], None).opened == ""


def test_built_ins_score_groups_in_order():
    groups = [
        group("<answer>[40, 5, 400, 50]</answer>", "[40, 5, 220, 50]", answer=[20, 10, 200, 100]),
        group("<answer>none</answer>", id="row-2", answer=[20, 10, 200, 100]),
    ]
    with scorer(reward(name="iou", weight=2.0), reward(name="format", weight=0.25)) as open_scorer:
        first, second = open_scorer.score(groups)
    assert (first.group, second.group) == tuple(groups)
    assert [each.completion for each in first.completions] == list(groups[0].completions)
    # the second answer covers the left half of the right box
    assert [each.rewards["iou"].value for each in first.completions] == pytest.approx([1.0, 0.5])
    assert [each.total for each in first.completions] == pytest.approx([2.25, 1.0])
    assert [each.is_correct for each in first.completions] == [True, True]
    assert [(each.total, each.is_correct) for each in second.completions] == [(0.25, False)]


def test_correct_at_of_the_recipe_goes_before_the_built_ins_own():
    groups = [group("[40, 5, 220, 50]", answer=[20, 10, 200, 100])]
    assert scorer(reward(name="iou", correct_at=0.75)).score(groups)[0].completions[0].is_correct is False
    assert scorer(reward(name="format", correct_at=0.0)).score(groups)[0].completions[0].is_correct is True
    assert scorer(reward(name="format")).score(groups)[0].completions[0].is_correct is None


def test_a_malformed_row_fails_and_a_row_without_answer_is_masked():
    open_scorer = scorer(reward(name="number"))
    (malformed,) = open_scorer.score([group("7", answer="seven")])[0].completions
    assert malformed.total is None and malformed.is_correct is False
    assert malformed.rewards["number"].failure.startswith("row row-1, column answer: 'seven' does not contain a number")
    (absent,) = open_scorer.score([group("7")])[0].completions
    assert (absent.total, absent.is_correct, absent.rewards["number"]) == (None, None, ABSENT)


def test_rewards_of_the_users_sit_beside_built_ins_and_see_all_groups_as_one_batch(reward_file):
    call = reward_file("""
        def score(samples):
            return [len(samples) if sample.completion != "bad" else float("nan") for sample in samples]

        score.batched = True
        """)
    groups = [group("7", "bad", answer=7), group("8", id="row-2", answer=7)]
    with scorer(reward(call=call, weight=0.5, correct_at=3.0), reward(name="number")) as open_scorer:
        first, second = open_scorer.score(groups)
    assert [each.total for each in (*first.completions, *second.completions)] == [2.5, None, 1.5]
    assert [each.is_correct for each in (*first.completions, *second.completions)] == [True, False, True]
    assert "returned nan" in first.completions[1].rewards["score"].failure
    assert first.completions[1].rewards["number"] == RewardValue(value=0.0)


def test_all_functions_that_cannot_be_loaded_are_reported_at_once_and_nothing_is_left_running(reward_file):
    good = reward_file("def score(sample):\n    return 1\n")
    rewards = [reward(call=good), reward(call="no_such_module:a"), reward(name="format"), reward(call=f"{good}s")]
    with pytest.raises(RecipeError) as caught, scorer(*rewards):
        pass
    first, second = caught.value.problems
    assert first.startswith("rewards.1.call: no_such_module:a: ")
    assert second.startswith(f"rewards.3.call: {good}s: ") and "its functions are: score" in second


def test_no_groups_give_none():
    with scorer(reward(name="exact")) as open_scorer:
        assert open_scorer.score([]) == ()


def test_rewards_see_the_turns_and_only_drawn_tokens_count():
    whole = trajectory_group(outcome=RewardValue(value=0.5))
    made = make_sample(whole.prompt, whole.completions[0], "thousandths")
    assert made.turns == TURNS and made.token_count == 5 and made.completion == "Seven."
    with scorer(reward(name="environment"), reward(name="length", max_tokens=5)) as rewards:
        (found,) = rewards.score([whole])
        assert {name: value.value for name, value in found.completions[0].rewards.items()} == {
            "environment": 0.5,
            "length": 1.0,
        }
        (absent,) = rewards.score([trajectory_group()])
        assert absent.completions[0].rewards["environment"] == ABSENT


def test_a_completion_whose_environment_failed_cannot_be_scored():
    with scorer(reward(name="format")) as rewards:
        (found,) = rewards.score([trajectory_group(failure="it ended")])
    assert found.completions[0].total is None
    assert found.completions[0].rewards["format"].failure == "it ended"


def test_a_failed_environment_counts_without_rewards_too():
    """Distillation may have none, or only such that are measured."""
    for rewards in ((), (reward(name="format", weight=0),)):
        with scorer(*rewards) as found:
            groups = found.score([trajectory_group(failure="it ended"), trajectory_group()])
        assert [group.completions[0].total is None for group in groups] == [True, False]
        assert count_failures(groups).failed == 1 and count_failures(groups).first_failure == "it ended"
