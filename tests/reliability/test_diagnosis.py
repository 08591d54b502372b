"""Faults that hand-made rows show: when they are found, how often, and what is not reported."""

import math

import pytest

from tiercel.reliability.diagnosis import FLAT_STEPS, QUIET_STEPS, Diagnosis, Symptom, symptoms


def row(step: int, **changes) -> dict:
    """A step of a run in which nothing is wrong: the reward rises, entropy falls slowly."""
    keys = {
        "reward": "reward/mean",
        "spread": "reward/std",
        "format": "reward/format/mean",
        "masked": "reward/masked",
        "failed": "reward/failed_fraction",
        "equal": "group/zero_std_fraction",
        "truncated": "completion/truncated_fraction",
        "gradient": "grad_norm",
        "entropy": "entropy/mean",
        "gap": "sampler/logprob_gap_mean",
        "skipped": "loss_scale/skipped",
        "left_out": "update/left_out",
        "turns": "turns/mean",
        "failed_calls": "tools/failed_fraction",
    }
    healthy = {
        "reward": 0.2 + 0.001 * step + 0.02 * math.sin(step),
        "spread": 0.3,
        "format": 0.5,
        "failed": 0.0,
        "equal": 0.25,
        "truncated": 0.1,
        "gradient": 0.7,
        "entropy": 1.5 - 0.001 * step,
        "gap": 0.004,
        "skipped": 0,
        "left_out": 0,
    }
    return {"step": step, **{keys[name]: value for name, value in (healthy | changes).items() if value is not None}}


def rows(count: int, start: int = 1, **changes) -> list[dict]:
    return [row(step, **changes) for step in range(start, start + count)]


def kinds(found: tuple[Symptom, ...]) -> list[tuple[str, int]]:
    return [(each.key, each.step) for each in found]


def test_a_healthy_run_shows_nothing():
    assert symptoms([{"step": 0, "eval/accuracy": 0.1}, *rows(300)]) == ()


@pytest.mark.parametrize(
    ("changes", "key", "step", "figure", "recipe_key"),
    (
        ({"equal": 0.97}, "equal rewards", 10, "97 % of the groups", "rollout.temperature"),
        ({"equal": 1.0, "reward": 0.0, "spread": 0.0}, "equal rewards", 10, "100 % of the groups", "rewards"),
        ({"truncated": 1.0}, "truncated", 5, "100 % of the completions", "rollout.max_new_tokens"),
        ({"truncated": 1.0, "turns": 6.0}, "truncated", 5, "100 % of the completions", "rollout.max_turns"),
        ({"failed_calls": 0.75}, "failed calls", 3, "75 % of the tool calls", "rollout.tools"),
        ({"format": 0.0}, "format", 10, "last 10 steps the reward format was 0", "data.system"),
        ({"gradient": 0.0}, "no gradient", 5, "last 5 steps the gradient was exactly 0", "lora.targets"),
        ({"failed": 0.6}, "failed rewards", 3, "60 % of the completions", "rewards"),
        ({"gap": 0.25}, "logprob gap", 3, "by 0.25 per token", "algorithm.correction.level"),
        ({"reward": 0.5}, "flat reward", 50, "stayed at 0.5, give or take 0", "rewards"),
    ),
)
def test_each_fault_is_found_as_soon_as_it_can_be_and_said_once(changes, key, step, figure, recipe_key):
    (found,) = symptoms(rows(120, **changes))
    assert (found.key, found.step, found.recipe_key) == (key, step, recipe_key)
    assert figure in found.text and found.text.endswith(".")
    assert found.line.startswith(f"warning at step {step}: {found.text} Likely cause: {found.cause}.")


def test_entropy_that_collapses_is_measured_against_the_first_step():
    falling = [row(step, entropy=1.5 * 0.9**step) for step in range(1, 120)]
    (found,) = symptoms(falling)
    assert found.key == "entropy" and "from 1.35 to" in found.text
    assert falling[found.step - 3]["entropy/mean"] < 0.05 * 1.35 <= falling[found.step - 4]["entropy/mean"]


def test_one_step_below_the_limit_starts_the_count_anew():
    assert symptoms([*rows(9, equal=1.0), row(10), *rows(9, start=11, equal=1.0)]) == ()
    assert symptoms([*rows(4, truncated=1.0), row(5), *rows(4, start=6, truncated=1.0)]) == ()


def test_a_missing_number_is_no_fault():
    assert kinds(symptoms(rows(60, equal=None, entropy=None, gap=None))) == []
    assert symptoms([{"step": step, "grad_norm": 10**400, "reward/mean": None} for step in range(60)]) == ()


def test_the_cause_of_a_missing_gradient_is_told_apart():
    equal = {found.key: found for found in symptoms(rows(10, gradient=0.0, equal=1.0))}
    assert list(equal) == ["no gradient", "equal rewards"]
    assert equal["no gradient"].recipe_key == "rollout.temperature"
    (dropped,) = symptoms(rows(10, gradient=0.0, equal=None))
    assert dropped.recipe_key == "rewards" and "usable reward" in dropped.cause


def test_updates_that_were_not_made_are_no_missing_gradient():
    assert symptoms(rows(20, gradient=0.0, skipped=1)) == ()
    assert symptoms([row(step, gradient=0.0, left_out=step) for step in range(1, 20)]) == ()


def test_a_reward_that_rises_little_but_steadily_is_not_flat():
    assert symptoms([row(step, reward=0.5 + 1e-5 * step) for step in range(1, 120)]) == ()


def test_a_reward_that_chance_moves_is_not_flat():
    assert symptoms([row(step, reward=0.5 + 0.03 * (-1) ** step) for step in range(1, 120)]) == ()


def test_a_flat_reward_of_equal_groups_has_that_cause_alone():
    assert kinds(symptoms(rows(120, reward=0.5, equal=1.0))) == [("equal rewards", 10)]


def test_sft_may_lose_its_entropy():
    losses = [{"step": step, "grad_norm": 1.0, "entropy/mean": 0.5**step} for step in range(1, 60)]
    assert symptoms(losses) == ()
    assert kinds(symptoms([{**each, "grad_norm": 0.0} for each in losses])) == [("no gradient", 5)]


def test_a_fault_is_news_again_only_after_it_was_away():
    def with_pause(length: int) -> list[dict]:
        before, pause = rows(10, truncated=1.0), rows(length, start=11)
        return [*before, *pause, *rows(10, start=11 + length, truncated=1.0)]

    assert kinds(symptoms(with_pause(QUIET_STEPS - 5))) == [("truncated", 5)]
    assert kinds(symptoms(with_pause(QUIET_STEPS))) == [("truncated", 5), ("truncated", 15 + QUIET_STEPS)]


@pytest.mark.parametrize("cut", (1, 4, 5, 30, 80))
def test_a_run_that_goes_on_finds_what_a_whole_one_does_and_repeats_nothing(cut):
    whole = [row(step, truncated=1.0, reward=0.5, entropy=1.5 * 0.9**step) for step in range(1, 120)]
    resumed = Diagnosis(whole[:cut])
    later = tuple(found for each in whole[cut:] for found in resumed.add(each))
    assert symptoms(whole[:cut]) + later == symptoms(whole)
    assert {"truncated", "flat reward", "entropy"} == {found.key for found in symptoms(whole)}


@pytest.mark.parametrize("cut", (150, 180, 240))
def test_a_long_run_that_goes_on_needs_its_first_and_last_rows_alone(cut):
    whole = [row(step, truncated=float(step % 60 < 30), reward=0.5, entropy=1.5 * 0.99**step) for step in range(1, 300)]
    known = Diagnosis()
    for each in whole[:cut]:
        known.add(each)
    resumed = Diagnosis(whole[:cut])
    assert [resumed.add(each) for each in whole[cut:]] == [known.add(each) for each in whole[cut:]]


def test_no_more_rows_are_kept_than_are_looked_at():
    diagnosis = Diagnosis(rows(500))
    assert len(diagnosis._rows) == FLAT_STEPS


def test_rewards_that_all_return_none_are_told_at_once():
    assert kinds(symptoms([row(1, reward=None, masked=8)])) == [("no reward", 1)]
    for other in ({"masked": 8}, {"reward": None, "masked": 8, "failed": 1.0}, {"reward": None}):
        assert symptoms([row(1, **other)]) == ()
