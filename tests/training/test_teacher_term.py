"""Distillation: the teacher's values against plain passes, and whole runs on and off policy."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.float64 import all_in_float64, in_float64
from tests.packing.test_examples import plain_words, random_pairs
from tests.tiny_models import FAMILY_NAMES, make_row, tiny_policy
from tests.training.test_loops import grpo_recipe, merged, run_grpo, write_rows
from tests.training.test_offline import bytes_of, without_times
from tiercel.algorithms.teacher import DIVERGENCES, Teacher
from tiercel.cli.main import main
from tiercel.config import DistillRecipe, recipe_to_yaml
from tiercel.config.schema import Data
from tiercel.data.encoding import prompt_encoder
from tiercel.distributed.ranks import ALONE
from tiercel.errors import DataError, ModelError, NonFiniteError, TrainingError
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.batch import advantage_group
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.pass_options import PassOptions
from tiercel.runs.directory import read_metrics
from tiercel.training.distillation.teacher_term import (
    LocalTeacher,
    Teaching,
    require_same_vocabulary,
    teacher_encoder,
    token_texts,
)
from tiercel.training.grpo import minibatch_updates
from tiercel.training.grpo.offpolicy_answers import answered_groups
from tiercel.training.policy_passes import NO_TOTALS, PolicyPasses
from tiercel.training.replay import replay
from tiercel.training.trainer import build_trainer
from tiercel.types import Completion, Message, Row


def passes_of(policy, form="split", max_tokens=300):
    return PolicyPasses(
        policy=policy,
        learner=PackedPolicy(policy, form, False),
        vision=VisionStore(policy, 0),
        ranks=ALONE,
        passes_are_private=True,
        temperature=1.0,
        max_tokens=max_tokens,
    )


def completion(ids):
    return Completion(token_ids_L=ids, logprobs_L=torch.zeros(len(ids)), text="", is_truncated=False, seed=0)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_divergence_and_gradient_equal_plain_passes_of_student_and_teacher(tiny_checkpoints, name):
    """The gradient is as near to that of plain passes in float64 as plain passes in float32 are; how much those round
    depends on the processor."""
    student, other = (tiny_policy(tiny_checkpoints[name], noise=noise) for noise in (0.1, 0.4))
    examples = random_pairs(student.family, 3)
    answers = [each for example in examples for each in example.conversations]
    groups = [
        advantage_group(each.prompt, [completion(side.token_ids_L) for side in each.conversations], [0.0, 0.0])
        for each in examples
    ]
    exact_student, exact_other = (in_float64(each, tiny_checkpoints[name]) for each in (student, other))
    passes = plain_passes(student, other, answers)
    with all_in_float64():
        exact_passes = plain_passes(exact_student, exact_other, answers)
    for divergence in ("reverse_kl", "jsd", "token"):
        plain = gradient(student, plain_divergence(passes, answers, divergence), again=True)
        with all_in_float64():
            expected = plain_divergence(exact_passes, answers, divergence)
            wanted = gradient(exact_student, expected, again=True)
        section = Teacher(path="teacher", divergence=divergence, coef=2.0)
        told_by = LocalTeacher(section=section, passes=passes_of(other), words=other.family.vocabulary_size)
        teaching = Teaching(section=section, told_by=told_by, encode=None, ranks=ALONE)
        learner = passes_of(student)
        found = 0.0
        for unit in learner.units(teaching.with_teacher_terms(groups), NO_TOTALS):
            assert unit.prefixes == ()
            for batch in unit.batches:
                features_KH = learner.vision.features(batch.packed.images)
                scores = learner.learner(
                    batch.packed, features_KH, 1.0, options=PassOptions(target=teaching.target(batch))
                )
                found = found + teaching.term(batch, scores).values_N.sum() / 2
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5), divergence
        errors = [float((each - wanted).norm() / wanted.norm()) for each in (gradient(student, found), plain)]
        assert errors[0] < max(1e-5, 1.5 * errors[1]), divergence


def test_rows_that_ask_the_same_have_teachers_of_their_own(tiny_checkpoints):
    """Two rows of one prompt and one completion of 80 tokens, whose answers the teacher is told: in one microbatch the
    student's tree has them once, and each row's divergence is what it is apart."""
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    student, other = (tiny_policy(checkpoint, noise=noise) for noise in (0.1, 0.4))
    section = Teacher(path="teacher", prompt="{prompt} It is {answer}.")
    told_by = LocalTeacher(section=section, passes=passes_of(other), words=other.family.vocabulary_size)
    encode = teacher_encoder(section, Data(train="rows.jsonl"), other.family, student.family)
    teaching = Teaching(section=section, told_by=told_by, encode=encode, ranks=ALONE)
    ids = torch.tensor(student.family.tokenizer(" is the seven" * 40)["input_ids"][:80])
    groups = []
    for number, answer in enumerate(("[1, 20]", "no seven 7 7")):
        row = replace(make_row("row", "Where is the seven?", 0), answer=answer)
        prompt = prompt_encoder(student.family, Data(train="rows.jsonl"))(row, number)
        groups.append(advantage_group(prompt, [completion(ids)], [0.0]))
    taught, learner = teaching.with_teacher_terms(groups), passes_of(student, max_tokens=20_000)

    def divergences(groups):
        (batch,) = [batch for unit in learner.units(groups, NO_TOTALS) for batch in unit.batches]
        scores = learner.learner(batch.packed, None, 1.0, options=PassOptions(target=teaching.target(batch)))
        return batch.packed.tree.length, scores.divergence_N.detach().view(len(groups), -1).sum(1)

    (length, first), (_, second), (together, both) = map(divergences, (taught[:1], taught[1:], taught))
    assert together == length and abs(first - second) > 1e-3
    torch.testing.assert_close(both, torch.cat([first, second]))


def plain_passes(student, other, answers):
    """Logprobs (L, V) of the policy and of the teacher at each answer's tokens, by transformers' own passes."""
    found = []
    for each in answers:
        with torch.no_grad():
            taught_LV = plain_words(other, each)
        # Placeholders have a probability of 0 in both, whose product with an infinite logprob is NaN.
        found.append(tuple(words.clamp_min(-1e30) for words in (plain_words(student, each), taught_LV)))
    return found


def plain_divergence(passes, answers, divergence):
    """Sum the divergence over the tokens of answers."""
    sums = []
    for each, (policy_LV, teacher_LV) in zip(answers, passes, strict=True):
        if divergence == "token":
            sums.append(((policy_LV - teacher_LV).gather(1, each.token_ids_L[:, None]).square() / 2).sum())
        else:
            sums.append(DIVERGENCES[divergence].of(policy_LV, teacher_LV, 0.5).sum())
    return torch.stack(sums).sum()


def gradient(policy, loss, *, again=False):
    policy.model.zero_grad()
    loss.backward(retain_graph=again)
    return torch.cat([parameter.grad.flatten() for parameter in policy.trained_parameters().values()])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def write(rows, tiny_checkpoints, tmp_path):
    def recipe(output, teacher, **changes):
        tree = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / output).model_dump()
        own = {"path": str(tiny_checkpoints["qwen2_5_vl"]), "dtype": "float32"}
        return DistillRecipe.model_validate(merged({**tree, "teacher": {**own, **teacher}}, changes))

    return recipe


def test_a_student_comes_nearer_to_what_a_hint_tells(write):
    recipe = write("run", {"prompt": "{prompt} It is {answer}."}, train={"steps": 6})
    kept = [row for row in read_metrics(run_grpo(recipe)) if "loss" in row]
    assert kept[-1]["teacher/kl"] < 0.8 * kept[0]["teacher/kl"]
    assert all(row["loss"] == pytest.approx(row["teacher/kl"], rel=0.2) and "reward/mean" in row for row in kept)


def test_rewards_are_not_needed(write):
    changes = {"rewards": [], "train": {"steps": 1}, "data": {"eval": None}}
    (row,) = read_metrics(run_grpo(write("run", {"prompt": "{prompt} So?"}, **changes)))
    assert row["teacher/kl"] > 0 and row["grad_norm"] > 0
    assert not [name for name in row if name.startswith(("reward/", "group/zero", "eval/"))]


def test_the_start_says_the_same_as_itself(write):
    run = run_grpo(write("run", {}, train={"steps": 1}))
    row = read_metrics(run)[1]
    assert row["teacher/kl"] == pytest.approx(0.0, abs=1e-6) and row["grad_norm"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("teacher", ({"rows_share": 0.5, "divergence": "jsd"}, {"top_k": 5, "prompt": "{prompt} So?"}))
def test_a_run_that_was_ended_goes_on_to_the_same_bytes(write, monkeypatch, teacher):
    whole = run_grpo(write("whole", teacher, data={"eval": None}))
    honest, calls = minibatch_updates.update_on_minibatch, iter(range(100))

    def failing(*inputs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return honest(*inputs)

    monkeypatch.setattr(minibatch_updates, "update_on_minibatch", failing)
    recipe = write("ended", teacher, data={"eval": None})
    with pytest.raises(KeyboardInterrupt):
        run_grpo(recipe)
    monkeypatch.setattr(minibatch_updates, "update_on_minibatch", honest)
    ended = run_grpo(recipe)
    assert bytes_of(ended) == bytes_of(whole) and without_times(ended) == without_times(whole)


@pytest.mark.parametrize("divergence", ("reverse_kl", "token"))
def test_each_drawn_token_is_recorded_with_its_gap(write, divergence):
    """A policy that is its own teacher agrees with itself, and not with itself asked otherwise."""
    for name, prompt in (("same", None), ("other", "{prompt} So?")):
        recipe = write(name, {"prompt": prompt, "divergence": divergence}, train={"steps": 1}, data={"eval": None})
        lines = (run_grpo(recipe) / "rollouts/step-000001.jsonl").read_text().splitlines()
        completions = [each for line in lines for each in json.loads(line)["completions"]]
        assert all(len(each["teacher"]) == len(each["token_ids"]) for each in completions)
        for each in completions:  # random bytes are not characters; the number of signs for them may differ
            text = "".join(text for text, _ in each["teacher"]).replace("\ufffd", "")
            assert text.startswith(each["text"].replace("\ufffd", ""))
        largest = max(abs(gap) for each in completions for _, gap in each["teacher"])
        assert (largest < 1e-4) == (name == "same")


def test_a_character_of_several_tokens_is_the_last_ones_text(tiny_checkpoints):
    family = tiny_policy(tiny_checkpoints["qwen2_5_vl"]).family
    text = "7 is 七 ✓"
    ids = family.tokenizer(text)["input_ids"]
    texts = token_texts(family, ids)
    assert len(texts) == len(ids) > len(text) and "".join(texts) == text and "" in texts


def test_answers_of_rows_take_the_place_of_completions(write):
    run = run_grpo(write("run", {"rows_share": 1.0}))
    assert not any(name.startswith("reward/") for row in read_metrics(run) for name in row)  # nothing was drawn
    groups = [json.loads(line) for line in (run / "rollouts/step-000001.jsonl").read_text().splitlines()]
    answers = {f"[{number}, 20]" for number in range(12)}
    assert {each["text"] for group in groups for each in group["completions"]} <= answers
    half = run_grpo(write("half", {"rows_share": 0.5}))
    lines = [
        json.loads(line) for file in sorted((half / "rollouts").iterdir()) for line in file.read_text().splitlines()
    ]
    assert {len(group["completions"]) for group in lines} == {3}  # so half of the loss is of rows too
    assert {group["completions"][0]["text"] in answers for group in lines} == {True, False}


def test_the_answer_of_a_row_is_its_last_turn(write, tiny_checkpoints):
    family = tiny_policy(tiny_checkpoints["qwen2_5_vl"]).family
    said = [("user", "one?"), ("assistant", "ALPHA"), ("user", "two?"), ("assistant", "BETA")]
    messages = tuple(Message(role=role, content=text) for role, text in said)
    row = Row(id="a", messages=messages, columns={}, file="rows.jsonl", line=1)
    recipe = write("run", {"rows_share": 1.0}, data={"max_prompt_tokens": 200}, rollout={"max_new_tokens": 50})
    prompt = prompt_encoder(family, recipe.data)(row, 0)
    (group,) = answered_groups(recipe, family, [prompt], 0)
    assert "ALPHA" in prompt.text and group.completions[0].text == "BETA"
    assert family.tokenizer.decode(group.completions[0].token_ids_L) == "BETA<|im_end|>"


def test_a_row_without_an_answer_is_rejected(write, rows, tmp_path):
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    for record in records:
        del record["messages"][1]
    bare = rows.with_name("bare.jsonl")
    bare.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match=r"teacher\.rows_share"):  # of all rows
        run_grpo(write("run", {"rows_share": 1.0}, data={"train": str(bare)}))
    with pytest.raises(DataError, match=r"its answer has.*tokens, more than rollout\.max_new_tokens 2;"):
        run_grpo(write("short", {"rows_share": 1.0}, rollout={"max_new_tokens": 2}))


def test_a_row_whose_answer_is_too_long_is_rejected(write, rows):
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    records[0]["messages"][1]["content"] = "a word " * 5
    file = rows.with_name("long.jsonl")
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"data": {"train": str(file), "eval": None, "max_bad_fraction": 0.2}, "rollout": {"max_new_tokens": 20}}
    said = "its answer has .* tokens, more than rollout.max_new_tokens 20; raise it"
    run = run_grpo(write("run", {"rows_share": 1.0}, **changes))
    (bad,) = map(json.loads, (run / "bad_rows.jsonl").read_text().splitlines())
    assert bad["id"] == "row-0" and bad["field"] == "messages" and re.search(said, bad["reason"])
    never = run_grpo(write("never", {"rows_share": 0.0}, **changes))  # its answer is not read
    assert not (never / "bad_rows.jsonl").exists()


def test_a_teacher_of_another_family_sees_its_own_pixels(write, tiny_checkpoints):
    run = run_grpo(write("run", {"path": str(tiny_checkpoints["qwen2_vl"])}))
    assert read_metrics(run)[1]["teacher/kl"] > 0


def test_a_row_without_a_column_of_the_teachers_prompt_is_rejected(write, rows):
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    del records[0]["answer"]
    file = rows.with_name("unanswered.jsonl")
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    teacher = {"prompt": "{prompt} It is {answer}."}
    run = run_grpo(write("run", teacher, data={"train": str(file), "eval": None, "max_bad_fraction": 0.2}))
    assert "prompt contains {answer}" in (run / "bad_rows.jsonl").read_text()


def test_a_row_that_is_too_long_for_the_teacher_is_rejected(write, rows):
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, record in enumerate(records):
        record["hint"] = "Where " * (2000 if number == 0 else 1)
    file = rows.with_name("hints.jsonl")
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": str(file), "eval": None, "max_bad_fraction": 0.2}
    run = run_grpo(write("run", {"prompt": "{prompt} {hint}"}, data=data))
    (rejected,) = map(json.loads, (run / "bad_rows.jsonl").read_text().splitlines())
    assert rejected["id"] == "row-0" and "data.max_prompt_tokens" in rejected["reason"]


def test_a_teacher_whose_vocabulary_is_padded_further_tells_the_policys_words(write, tiny_checkpoints, tmp_path):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    words = policy.family.vocabulary_size - 40
    section = Teacher(path="teacher", top_k=policy.family.vocabulary_size)
    told_by = LocalTeacher(section=section, passes=passes_of(policy), words=words)
    states_NH = torch.randn(3, policy.model.get_output_embeddings().weight.shape[1])
    told = told_by._told(states_NH, torch.tensor([0, 1, 2]))
    assert told.words_NK.shape == (3, words) and int(told.words_NK.max()) < words
    whole_MV = told_by.distribution(states_NH)
    torch.testing.assert_close(told.drawn_N, whole_MV[[0, 1, 2], [0, 1, 2]])


def test_check_asks_a_teachers_columns_of_rows_to_learn_from_alone(write, rows, tmp_path, capsys):
    records = [json.loads(line) | {"hint": "left"} for line in rows.read_text().splitlines()]
    file = rows.with_name("hinted.jsonl")
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = write("run", {"prompt": "{prompt} {hint}"}, data={"train": str(file)}, rewards=[{"name": "exact"}])
    (tmp_path / "run.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0, capsys.readouterr()


def test_a_teacher_that_sees_pictures_by_other_words_is_refused(tiny_checkpoints, monkeypatch):
    one, other = (tiny_policy(tiny_checkpoints[name]).family for name in ("qwen2_5_vl", "qwen2_vl"))
    require_same_vocabulary(one, other)
    monkeypatch.setattr(type(one), "placeholder_ids", other.placeholder_ids[:-1])
    with pytest.raises(ModelError, match="do not reserve the same words for pictures"):
        require_same_vocabulary(one, other)


@pytest.mark.parametrize(
    ("changes", "is_asked_the_same"), (({"depth": 9, "out_hidden_size": 99}, True), ({"patch_size": 16}, False))
)
def test_a_teacher_of_another_size_is_asked_what_the_policy_is(tiny_checkpoints, changes, is_asked_the_same):
    """Depth and width of its tower change no token and no pixel."""
    policy, teacher = (tiny_policy(tiny_checkpoints["qwen2_5_vl"]).family for _ in range(2))
    for name, value in changes.items():
        setattr(teacher.checkpoint.config.vision_config, name, value)
    encode = teacher_encoder(Teacher(path="teacher"), Data(train="rows.jsonl"), teacher, policy)
    assert (encode is None) == is_asked_the_same


def test_a_teacher_with_other_words_is_refused(write, tiny_checkpoints, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoints["qwen2_5_vl"], other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"Ġseven"', '"Ġeight"'), encoding="utf-8")
    with pytest.raises(ModelError, match=r"2 words have different ids, such as .*(seven|eight).*; use a teacher"):
        run_grpo(write("run", {"path": str(other)}))


def test_a_token_reward_goes_beside_the_rewards_of_grpo(rows, tiny_checkpoints, tmp_path):
    path = tiny_checkpoints["qwen2_5_vl"]
    teacher = {"path": str(path), "dtype": "float32", "divergence": "token", "prompt": "{prompt} So?", "coef": 0.1}
    with_teacher, without = (
        read_metrics(run_grpo(grpo_recipe(path, rows, tmp_path / name, algorithm={"teacher": section})))
        for name, section in (("with", teacher), ("without", None))
    )
    assert with_teacher[1]["reward/mean"] == without[1]["reward/mean"]
    assert "teacher/kl" in with_teacher[1] and "teacher/kl" not in without[1]
    assert with_teacher[1]["grad_norm"] != without[1]["grad_norm"]


def test_a_replayed_update_has_the_teachers_term(write, monkeypatch, capsys):
    honest = minibatch_updates.update_on_minibatch

    def spoilt(*inputs):
        raise NonFiniteError("the loss is not finite", [[]])

    recipe = write("run", {"prompt": "{prompt} So?"}, data={"eval": None})
    monkeypatch.setattr(minibatch_updates, "update_on_minibatch", spoilt)
    with pytest.raises(TrainingError):
        run_grpo(recipe)
    monkeypatch.setattr(minibatch_updates, "update_on_minibatch", honest)
    (kept,) = (tmp for tmp in (Path(recipe.output) / "nonfinite").iterdir())
    findings = replay(recipe, Path(recipe.output), kept)
    assert findings and all(finding.loss > 0 for finding in findings)  # without a teacher all would be 0


def test_a_teacher_of_another_family_is_refused_with_tools(write, tiny_checkpoints):
    recipe = write(
        "run", {"path": str(tiny_checkpoints["qwen2_vl"])}, rollout={"tools": ["zoom"], "max_trajectory_tokens": 50}
    )
    with pytest.raises(ModelError, match="makes different tokens or pixels from a row than the policy"):
        build_trainer(recipe)
