"""A teacher on a server: what is requested, what is read from an answer, and faults that a real vLLM does not show on
demand. tests/vllm/test_teacher.py compares a real one with the same teacher in process."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.rollout.scripted_server import Raw, ScriptedServer, serving
from tests.tiny_models import tiny_prompts
from tests.training.test_loops import grpo_recipe, merged, write_rows
from tiercel.cli.main import main
from tiercel.config import DistillRecipe, GrpoRecipe, recipe_to_yaml
from tiercel.data.encoding import require_readable
from tiercel.data.reading import read_training_rows
from tiercel.errors import EnvironmentProblem, RecipeError, TrainingError
from tiercel.packing.batch import advantage_group
from tiercel.planning.frozen_models import teacher_size
from tiercel.rollout.vllm import http
from tiercel.training.distillation.served_teacher import ServedTeacher, open_served, recipe_of_teacher
from tiercel.training.process_guard import phase_limits
from tiercel.training.trainer import build_trainer
from tiercel.types import Completion, VideoSource

TOP_K = 3


class TeachingServer(ScriptedServer):
    """Gives at each place 0.4 to word 4, 0.2 to the placeholder, 0.1 to word 7, 0.05 to word 5 and 0.04 to word 6, and
    0.01 to the prompt's own token if it is none of them."""

    def __init__(self, placeholder: int):
        super().__init__(lambda messages: [], 0)
        self.adapters = {"base": ""}
        self.words = {4: 0.4, placeholder: 0.2, 7: 0.1, 5: 0.05, 6: 0.04}

    def completion(self, body: dict) -> dict:
        places = [{str(word): {"logprob": math.log(p), "rank": 1} for word, p in self.words.items()}]
        places = [{str(token): {"logprob": math.log(0.01), "rank": 9}} | places[0] for token in body["token_ids"]]
        return {
            "model": body["model"],
            "choices": [],
            "prompt_token_ids": body["token_ids"],
            "prompt_logprobs": [None, *places[1:]],
        }


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_SECONDS", (0.01,))


def test_a_teacher_is_read_in_its_own_dtype_beside_a_quantised_policy(tmp_path):
    teacher = {"path": "teacher", "dtype": "bfloat16", "coef": 0.5}
    changes = {"algorithm": {"teacher": teacher}, "model": {"path": "policy", "dtype": "bfloat16", "quantize": "nf4"}}
    recipe = grpo_recipe(tmp_path / "policy", tmp_path / "rows.jsonl", tmp_path / "run", **changes)
    found = recipe_of_teacher(recipe, recipe.taught_by).model
    assert (found.path, found.dtype, found.quantize) == ("teacher", "bfloat16", None)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def recipe_of(tiny_checkpoints, rows, tmp_path) -> Callable[..., DistillRecipe]:
    def recipe(url: str, **changes) -> DistillRecipe:
        checkpoint = tiny_checkpoints["qwen2_5_vl"]
        tree = grpo_recipe(checkpoint, rows, tmp_path / "run", rollout={"patience": 0.2, "request_timeout": 1.0})
        teacher = {"path": str(checkpoint), "url": url, "top_k": TOP_K}
        return DistillRecipe.model_validate(merged({**tree.model_dump(), "teacher": teacher}, changes))

    return recipe


@pytest.fixture
def server(tiny_checkpoints, recipe_of):
    family = open_served(recipe_of("http://c"), recipe_of("http://c").teacher).family
    with serving(TeachingServer(family.placeholder_ids[0])) as server:
        server.model_root = str(tiny_checkpoints["qwen2_5_vl"])
        yield server


def teacher_of(recipe: DistillRecipe) -> ServedTeacher:
    return open_served(recipe, recipe.teacher)


def groups_of(teacher: ServedTeacher) -> list:
    """Two completions of a prompt without a picture."""
    prompt = next(prompt for prompt in tiny_prompts(teacher.family) if not prompt.images)

    def completion(*ids: int) -> Completion:
        ids_L = torch.tensor(ids)
        return Completion(token_ids_L=ids_L, logprobs_L=torch.zeros(len(ids)), text="", is_truncated=False, seed=0)

    return [advantage_group(prompt, [completion(5, 9), completion(4)], [0.0, 0.0])]


def test_each_completion_is_asked_for_once_behind_its_prompt(server, recipe_of):
    teacher = teacher_of(recipe_of(server.url))
    (group,) = groups_of(teacher)
    teacher.tokens([group])
    ids = group.item.prompt.token_ids_P.tolist()
    assert sorted(len(body["token_ids"]) for body in server.requests) == [len(ids) + 1, len(ids) + 2]
    assert [*ids, 5, 9] in [body["token_ids"] for body in server.requests]
    sampling = server.requests[0]["sampling_params"]
    assert sampling["max_tokens"] == 1 and sampling["prompt_logprobs"] == TOP_K + len(teacher.family.placeholder_ids)
    assert sampling["temperature"] == 0 and server.requests[0]["model"] == "base"


def test_the_likeliest_words_are_told_and_placeholders_give_their_probability_to_the_others(server, recipe_of):
    one, other = teacher_of(recipe_of(server.url)).tokens(groups_of(teacher_of(recipe_of(server.url))))
    assert one.drawn_N.exp().tolist() == pytest.approx([0.05 / 0.8, 0.01 / 0.8])
    assert one.words_NK.tolist() == [[4, 7, 5], [4, 7, 5]] and other.words_NK.tolist() == [[4, 7, 5]]
    assert one.logprobs_NK.exp().tolist()[1] == pytest.approx([0.5, 0.125, 0.0625])
    assert one.logprobs_NK.dtype == one.drawn_N.dtype == torch.float32 and one.words_NK.dtype == torch.int64
    token = teacher_of(recipe_of(server.url, teacher={"divergence": "token", "top_k": None}))
    drawn = token.tokens(groups_of(token))
    assert torch.equal(drawn[0].drawn_N, one.drawn_N) and drawn[0].words_NK is None


@pytest.mark.parametrize("fault", ("500", "drops", "hangs", "nonsense", "other policy"))
def test_a_fault_is_asked_again(fault, server, recipe_of):
    teacher = teacher_of(recipe_of(server.url, rollout={"patience": 20.0}))
    expected = teacher.tokens(groups_of(teacher))
    server.faults = [fault, fault]
    found = teacher.tokens(groups_of(teacher))
    assert all(torch.equal(a.logprobs_NK, b.logprobs_NK) for a, b in zip(expected, found, strict=True))


def spoilt(place: dict | None = None, **fields) -> Callable[[dict], Raw]:
    """An answer whose last place, or another field, is as given."""

    def tamper(answer: dict) -> Raw:
        places = answer["prompt_logprobs"]
        own = fields or {"prompt_logprobs": [*places[:-1], {**places[-1], **place} if place else None]}
        return Raw(body=json.dumps(answer | own).encode())

    return tamper


@pytest.mark.parametrize(
    ("tamper", "said"),
    (
        (spoilt({"4": {"logprob": 0.5}}), r"prompt_logprobs\[\d+\]: got .*, not 5 logprobs"),
        (spoilt({"4": {"logprob": -9999.0}}), ", not 5 logprobs"),
        (spoilt({"4": {"logprob": -0.01}}), ", not 5 logprobs"),  # with the others, more than 1
        (spoilt({"4": {"logprob": "-1"}}), "got '-1'; Input should be a valid number"),
        (spoilt({"-4": {"logprob": -1}}), "got '-4'; Input should be greater"),
        (spoilt({"70000": {"logprob": -9.0}}), r"for token \d+"),
        (spoilt(None), ", not 5 logprobs"),
        (spoilt(prompt_logprobs=[None]), "got 1 places of 'base'"),
    ),
)
def test_an_answer_that_cannot_be_right_is_never_learnt_from(tamper, said, server, recipe_of):
    server.tamper = tamper
    teacher = teacher_of(recipe_of(server.url, rollout={"patience": 20.0}))
    with pytest.raises(TrainingError, match=rf"teacher.url: row .* got 3 invalid answers, .*{said}"):
        teacher.tokens(groups_of(teacher))


def test_an_old_server_and_another_prompt_are_told(server, recipe_of):
    teacher = teacher_of(recipe_of(server.url))
    server.tamper = spoilt(prompt_logprobs=None)
    with pytest.raises(EnvironmentProblem, match=r"returns no logprobs of prompts; start vLLM 0.32 or newer"):
        teacher.tokens(groups_of(teacher))
    server.tamper = spoilt(prompt_token_ids=[1, 2])
    with pytest.raises(EnvironmentProblem, match="the engine's prompt is not the trainer's from token 0 on"):
        teacher.tokens(groups_of(teacher))


def test_a_server_that_is_gone_or_was_started_again_otherwise_ends_the_run(server, recipe_of):
    teacher = teacher_of(recipe_of(server.url))
    server.faults = ["500"] * 100
    with pytest.raises(TrainingError, match=r"no answer within rollout.patience \(0.2 s\): http.*: 500 EngineCore"):
        teacher.tokens(groups_of(teacher))
    server.faults, server.model_root = ["500"], "models/other"
    with pytest.raises(EnvironmentProblem, match=r"serves 'models/other', but the recipe's teacher.path is /"):
        teacher.tokens(groups_of(teacher))


def test_a_run_learns_from_it(server, recipe_of):
    trainer = build_trainer(recipe_of(server.url))
    (group,) = trainer.teacher.with_teacher_terms(groups_of(teacher_of(recipe_of(server.url))))
    assert [len(each.drawn_N) for each in group.teacher] == [2, 1] and trainer.teacher.with_teacher_terms([]) == []


def test_check_says_whether_it_answers(server, recipe_of, tmp_path, capsys):
    for url, code in ((server.url, 0), ("http://127.0.0.1:9", 2)):
        (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe_of(url)))
        assert main(["check", str(tmp_path / "recipe.yaml")]) == code
        said = capsys.readouterr()
        assert (f"the teacher at {url}: answers" in said.out) == (code == 0)
        assert (f"teacher.url: {url}: /v1/models: Connect" in said.err) == (code == 2)


def test_it_takes_no_memory_and_its_patience_is_no_stall(recipe_of):
    recipe = recipe_of("http://c", rollout={"patience": 500.0, "request_timeout": 70.0})
    assert teacher_size(recipe) is None
    assert phase_limits(recipe)["advantages"] == recipe.reliability.stall_timeout + 570
    assert "learn" not in phase_limits(recipe_of(None, teacher={"url": None}))


def test_it_is_shown_no_videos(recipe_of):
    recipe = recipe_of("http://c")
    table = read_training_rows(recipe.data, "grpo")
    row = replace(table.rows[0], videos=(VideoSource(path="a.mp4"),))
    with pytest.raises(RecipeError, match=r"a teacher's url: a server takes only images, but row row-0 .*; use no url"):
        require_readable(recipe, replace(table, rows=[row]))
    require_readable(GrpoRecipe.model_validate(recipe.model_dump(exclude={"teacher"})), replace(table, rows=[row]))
