"""Completions of several turns, built by hand."""

import time
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from tests.rollout.scripted_dialogues import ScriptedDialogue, observation
from tests.tiny_models import FAMILY_NAMES, tiny_prompts
from tiercel.config.schema import Model
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.rollout import trajectory
from tiercel.rollout.dialogue import Limits
from tiercel.rollout.trajectory import TrajectoryBuilder, completes_a_stop, ended_trajectories, written_text
from tiercel.types import Completion, Observation

LIMITS = Limits(max_turns=3, max_tokens=60)


@pytest.fixture
def family(tiny_checkpoints) -> Family:
    return load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"])))


def ids_of(family: Family, text: str, *, has_end: bool = True) -> list[int]:
    ids = family.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, family.checkpoint.end_token_ids[0]] if has_end else ids


def builder_of(family: Family, answers: list[Observation | None], **limits: int) -> TrajectoryBuilder:
    """Of the tiny prompt with one picture."""
    dialogue = ScriptedDialogue(lambda number, text: answers[number - 1])
    return TrajectoryBuilder(family, tiny_prompts(family)[1], dialogue, replace(LIMITS, **limits), 20, 7)


def write(builder: TrajectoryBuilder, text: str, **how: bool) -> bool:
    """Add a turn and its reply, and return whether another turn follows."""
    ids = ids_of(builder.family, text, **how)
    reply = builder.add_turn(ids, [-1.0] * len(ids), is_truncated=not how.get("has_end", True))
    return reply is not None and builder.add_reply(reply.result())


def by_turns(completion: Completion) -> list[tuple[str, str | None]]:
    return [(turn.text, turn.answer) for turn in completion.trajectory.turns]


def test_a_completion_has_what_was_sampled_and_what_was_observed(family):
    seen = observation(family, " is", pictures=1)
    builder = builder_of(family, [seen, None])
    assert write(builder, " the seven") and not write(builder, " the 7")
    completion = builder.completion()
    first, last = ids_of(family, " the seven"), ids_of(family, " the 7")
    shown = seen.token_ids_L.tolist()[1:]  # the turn has its end token
    assert completion.token_ids_L.tolist() == first + shown + last
    assert completion.is_sampled_L.tolist() == [True] * len(first) + [False] * len(shown) + [True] * len(last)
    assert completion.logprobs_L.tolist() == [-1.0] * len(first) + [0.0] * len(shown) + [-1.0] * len(last)
    assert (completion.text, completion.seed, completion.is_truncated) == (" the 7", 7, False)
    assert by_turns(completion) == [(" the seven", "answer 1"), (" the 7", None)]
    assert [turn.token_count for turn in completion.trajectory.turns] == [len(first), len(last)]
    assert completion.trajectory.images == seen.images
    assert (completion.trajectory.outcome.value, completion.trajectory.failure) == (2.0, None)
    assert builder.dialogue.ended == 1


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_positions_and_spans_are_those_of_the_whole_sequence(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    builder = builder_of(
        family, [observation(family, " is", 1), observation(family, " is", 2, 3), None], max_tokens=300
    )
    assert write(builder, " the seven") and write(builder, "?") and not write(builder, " the")
    completion, prompt = builder.completion(), builder.prompt
    ids_T = torch.cat([prompt.token_ids_P, completion.token_ids_L])
    plans = [image.plan for image in (*prompt.images, *completion.trajectory.images)]
    start = len(prompt.token_ids_P)
    assert len(plans) == 4
    assert torch.equal(completion.trajectory.positions_DL, family.positions(ids_T, plans)[:, start:])
    spans = tuple((first + start, last + start) for first, last in completion.trajectory.picture_spans)
    assert (*prompt.picture_spans, *spans) == family.picture_spans(ids_T)
    whole = builder.so_far()
    assert torch.equal(whole.token_ids_P, ids_T) and len(whole.images) == 4
    assert whole.picture_spans == family.picture_spans(ids_T)


def test_a_truncated_turn_ends_the_trajectory_unasked(family):
    builder = builder_of(family, [])
    assert not write(builder, " the seven", has_end=False)
    completion = builder.completion()
    assert completion.is_truncated and by_turns(completion) == [(" the seven", None)]
    assert builder.dialogue.texts == []


def test_the_last_turn_is_answered_and_its_observation_is_dropped(family):
    seen = observation(family, " is", pictures=1)
    builder = builder_of(family, [seen, seen], max_turns=2)
    assert write(builder, " the") and not write(builder, " seven")
    completion = builder.completion()
    assert [text for text, _ in builder.dialogue.texts] == [" the", " seven"]
    assert completion.is_truncated and len(completion.trajectory.images) == 1
    assert int(completion.token_ids_L[-1]) == family.checkpoint.end_token_ids[0]


def test_turns_that_run_out_at_the_end_are_not_truncated(family):
    builder = builder_of(family, [observation(family, " is"), None], max_turns=2)
    assert write(builder, " the") and not write(builder, " seven")
    assert not builder.completion().is_truncated


def test_an_observation_leaves_room_for_a_token_or_is_dropped(family):
    seen = observation(family, " is", pictures=1)
    first = ids_of(family, " the")
    needed = len(first) + len(seen.token_ids_L)
    builder = builder_of(family, [seen], max_tokens=needed)
    assert write(builder, " the") and builder.budget == 1
    builder = builder_of(family, [seen], max_tokens=needed - 1)
    assert not write(builder, " the")
    completion = builder.completion()
    assert completion.is_truncated and completion.trajectory.images == ()
    assert completion.token_ids_L.tolist() == first


def test_the_budget_of_a_turn(family):
    builder = builder_of(family, [observation(family, " the" * 40)])
    assert builder.budget == 20  # for a turn
    assert write(builder, " the")
    assert builder.budget == 60 - len(builder.token_ids) < 20  # for the trajectory


def test_a_turn_without_an_end_token_is_closed_before_what_comes_back(family):
    seen = observation(family, " is")
    builder = builder_of(family, [seen])
    ids = ids_of(family, " the seven", has_end=False)
    reply = builder.add_turn(ids, [-1.0] * len(ids), is_truncated=False)  # a stop string ended it
    assert builder.add_reply(reply.result())
    assert builder.token_ids == [*ids, *seen.token_ids_L.tolist()]
    assert builder.is_sampled == [True] * len(ids) + [False] * len(seen.token_ids_L)


def test_texts_and_stops(family):
    assert written_text(family, ids_of(family, " the seven")) == " the seven"
    assert written_text(family, ids_of(family, " the seven", has_end=False)) == " the seven"
    rows = [ids_of(family, text, has_end=False) for text in (" the seven", " the", " seven the 1 2 3 4 5 6 7 8 9")]
    assert completes_a_stop(family, rows, ("seven", "x")) == [True, False, False]


def test_trajectories_end_side_by_side_and_in_their_order(monkeypatch):
    """Each waits until the other has begun to end; without a beat they would be ended as a stall."""
    monkeypatch.setattr(trajectory, "BEAT_SECONDS", 0.01)
    both, beats = Barrier(2), []

    def ends(text):
        def completion():
            both.wait(timeout=20)
            time.sleep(0.05)
            return text

        return SimpleNamespace(completion=completion)

    assert ended_trajectories([ends("a"), ends("b")], lambda: beats.append(1)) == ["a", "b"] and beats
    assert ended_trajectories([], lambda: None) == []
