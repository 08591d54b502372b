"""A teacher that a real vLLM computes, against the same teacher in the trainer's own process."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tests.training.test_loops import merged
from tests.vllm.servers import KEY, run_tiercel
from tiercel.config import DistillRecipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_training_rows
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.packing.batch import advantage_group
from tiercel.runs.directory import read_metrics
from tiercel.training.trainer import build_trainer
from tiercel.types import Completion

pytestmark = pytest.mark.vllm
STUDENT, TEACHER = "qwen2_5_vl", "qwen2_vl"
NEAR = 1e-3  # nats
EVERY_WORD = 319  # of 321, two of which are placeholders
FLAGS = "--enable-scale-out --max-logprobs 321 --max-model-len 512"


@pytest.fixture
def server(fleet, write_recipe):
    return fleet.started("teacher", write_recipe(TEACHER), FLAGS).wait()


@pytest.fixture
def recipe_of(vllm_checkpoints, rows, tmp_path, monkeypatch) -> Callable[..., DistillRecipe]:
    """A recipe of a teacher on a server (`url`) or in process."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    def recipe(url: str | None, name: str = "run", *, path: str = TEACHER, **changes) -> DistillRecipe:
        own = {"url": url} if url else {"dtype": "float32"}
        tree = {
            "model": {"path": str(vllm_checkpoints[STUDENT]), "dtype": "float32"},
            "lora": {"rank": 4, "alpha": 8},
            "data": {"train": str(rows), "workers": 0, "max_prompt_tokens": 200},
            "rollout": {"group_size": 3, "max_new_tokens": 12, "patience": 1.0},
            "optim": {"lr": 1e-2, "prompts_per_step": 4},
            "train": {"steps": 2, "threads": 1},
            "teacher": {"path": str(vllm_checkpoints[path]), "top_k": EVERY_WORD, **own},
            "output": str(tmp_path / name),
        }
        return DistillRecipe.model_validate(merged(tree, changes))

    return recipe


def groups_of(trainer, recipe: DistillRecipe) -> list:
    """Random completions of rows with no, one and two pictures."""
    family, generator = trainer.family, torch.Generator().manual_seed(0)
    words = [word for word in range(family.vocabulary_size) if word not in family.placeholder_ids]
    encode, table = prompt_encoder(family, recipe.data), read_training_rows(recipe.data, "grpo")

    def completion(length: int) -> Completion:
        ids_L = torch.tensor(words)[torch.randint(len(words), (length,), generator=generator)]
        return Completion(token_ids_L=ids_L, logprobs_L=torch.zeros(length), text="", is_truncated=False, seed=0)

    return [
        advantage_group(encode(row, number), [completion(5 + number), completion(9)], [0.0, 0.0])
        for number, row in enumerate(table.rows[:6])
    ]


def told(recipe: DistillRecipe, *, with_placeholders: bool = False) -> list:
    """What the recipe's teacher says of the same completions. `with_placeholders`: they keep their probability."""
    trainer = build_trainer(recipe)
    if with_placeholders:
        trainer.teacher.told_by.passes.learner.head.placeholder_ids = ()
    return [each for group in trainer.teacher.with_teacher_terms(groups_of(trainer, recipe)) for each in group.teacher]


def largest(one: list, other: list, of: str) -> float:
    assert len(one) == len(other) == 12
    return max(float((getattr(a, of) - getattr(b, of)).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("prompt", (None, "{prompt} The answer is {answer}."))
def test_it_says_what_the_same_teacher_says_in_process(server, recipe_of, prompt):
    ours, theirs = (told(recipe_of(url, teacher={"prompt": prompt})) for url in (None, server.url))
    gaps = [largest(ours, theirs, of) for of in ("drawn_N", "logprobs_NK")]
    print(f"largest differences: drawn tokens {gaps[0]:.1e}, words {gaps[1]:.1e}")
    assert max(gaps) < NEAR
    for one, other in zip(ours, theirs, strict=True):  # likelier words first; equal ones may be in any order
        ours_NK, theirs_NK = (each.logprobs_NK.gather(1, each.words_NK.argsort(1)) for each in (one, other))
        assert float((ours_NK - theirs_NK).abs().max()) < NEAR
        assert torch.equal(one.words_NK.sort(1).values, other.words_NK.sort(1).values)


@pytest.mark.parametrize("teacher", ({"divergence": "token", "top_k": None}, {"top_k": 8}))
def test_of_fewer_words_placeholders_that_are_not_told_keep_their_probability(server, recipe_of, teacher):
    plain, theirs = (told(recipe_of(url, teacher=teacher), with_placeholders=url is None) for url in (None, server.url))
    ours = told(recipe_of(None, teacher=teacher))
    assert largest(plain, theirs, "drawn_N") < NEAR
    shift = largest(ours, theirs, "drawn_N")
    print(f"placeholders shift the drawn tokens by {shift:.4f}")
    assert NEAR < shift < 0.02  # 2 of 321 random words
    if teacher["top_k"]:
        assert theirs[0].words_NK.shape == (5, 8)


def test_a_run_learns_the_same(server, recipe_of):
    found = []
    for name, url in (("local", None), ("served", server.url)):
        recipe = recipe_of(url, name, teacher={"divergence": "jsd"})
        file = Path(recipe.output).with_suffix(".yaml")
        file.write_text(yaml.safe_dump(json.loads(recipe.model_dump_json(exclude_unset=True))))
        ended = run_tiercel("distill", file)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        found.append([row for row in read_metrics(Path(recipe.output)) if "loss" in row])
    local, served = found
    assert len(local) == len(served) == 2
    for key in ("teacher/kl", "loss", "grad_norm"):
        assert [row[key] for row in served] == pytest.approx([row[key] for row in local], rel=NEAR), key
    print("teacher/kl:", [row["teacher/kl"] for row in local], [row["teacher/kl"] for row in served])


def test_pictures_that_came_between_turns_are_sent(server, recipe_of):
    """The trajectory has an observation with a picture, whose tokens are given, not sampled."""
    found = []
    for url in (None, server.url):
        recipe = recipe_of(url, model={"path": recipe_of(None).teacher.path})
        trainer = build_trainer(recipe)
        groups = groups_of(trainer, recipe)
        shown, bare = groups[1].item.prompt, groups[0]
        given = len(shown.token_ids_P)
        each = bare.item.continuations[0]
        ids_L = torch.cat([each.token_ids_L, shown.token_ids_P, each.token_ids_L])
        whole_T = torch.cat([bare.item.prompt.token_ids_P, ids_L])
        positions = trainer.family.positions(whole_T, [image.plan for image in shown.images])
        each = replace(
            each,
            token_ids_L=ids_L,
            positions_DL=positions[:, len(bare.item.prompt.token_ids_P) :],
            is_scored_L=torch.tensor([True] * 5 + [False] * given + [True] * 5),
            images=shown.images,
        )
        group = replace(
            bare.part(0, 1),
            item=replace(bare.item, continuations=(each,)),
            sampler_logprobs=(torch.zeros(10),),
        )
        found.append(trainer.teacher.with_teacher_terms([group])[0].teacher[0])
    assert float((found[0].drawn_N - found[1].drawn_N).abs().max()) < NEAR and len(found[0].drawn_N) == 10


def test_a_server_that_cannot_teach_is_told_why(server, fleet, write_recipe, recipe_of, tmp_path):
    with pytest.raises(
        EnvironmentProblem, match=r"serves '.*/qwen2_vl', but the recipe's teacher.path is .*qwen2_5_vl"
    ):
        build_trainer(recipe_of(server.url, path=STUDENT))
    with pytest.raises(
        EnvironmentProblem, match=r"accepts 512 tokens, but .* up to 913; start it with --max-model-len"
    ):
        build_trainer(recipe_of(server.url, data={"max_prompt_tokens": 900}))
    few = fleet.started("few words", write_recipe(TEACHER), "--enable-scale-out --max-model-len 512").wait()
    with pytest.raises(
        EnvironmentProblem, match=r"prompt logprobs of 21, .* max allowed: 20.* a greater --max-logprobs"
    ):
        told(recipe_of(few.url, teacher={"top_k": 19}))
    recipe = recipe_of(few.url, teacher={"top_k": 18})
    trainer = build_trainer(recipe)
    groups = groups_of(trainer, recipe)
    assert len(trainer.teacher.with_teacher_terms(groups)) == 6
    few.kill()
    with pytest.raises(TrainingError, match=r"teacher.url: row row-0 got no answer within rollout.patience \(1 s\)"):
        trainer.teacher.with_teacher_terms(groups)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(json.loads(recipe.model_dump_json(exclude_unset=True))))
    said = run_tiercel("check", file)
    assert said.returncode == 2 and f"teacher.url: {few.url}: /v1/models: ConnectError" in said.stderr, said.stderr
