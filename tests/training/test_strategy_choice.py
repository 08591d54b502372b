"""Strategy and microbatches that a run takes from the plan, on one rank as well. No GPU is needed to plan for one."""

import json

import pytest
import torch

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.doctor.machine import free_memory
from tiercel.errors import EnvironmentProblem, RunError
from tiercel.log import printed
from tiercel.runs.directory import RunDirectory
from tiercel.training import strategy_choice
from tiercel.training.offline.loop import train
from tiercel.training.run import ready_run
from tiercel.training.strategy_choice import StrategyChoice, chosen_strategy, read_token_budget

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def chosen(recipe, device=GPU):
    """What is chosen, and what the log says."""
    said = []
    with printed(said.append):
        return chosen_strategy(recipe, ALONE, device), said


@pytest.fixture
def memory(monkeypatch):
    """Set the bytes of the GPU that is planned for."""
    return lambda size: monkeypatch.setattr(strategy_choice, "rank_memory_bytes", lambda device, ranks: round(size))


def recipe_of(checkpoint, tmp_path, tokens, **train):
    learner = {"max_tokens_per_microbatch": tokens}
    return grpo_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", learner=learner, train={"steps": 2} | train)


def test_one_gpu_is_planned_for_and_the_log_says_what_was_found(tiny_checkpoints, tmp_path, memory):
    memory(80e9)
    choice, said = chosen(recipe_of(tiny_checkpoints["qwen2_5_vl"], tmp_path, 1000))
    assert (choice.strategy, choice.tokens) == ("single", 1000)
    assert said[0].startswith("plan: a rank holds up to 1.") and said[0].endswith(
        "of 80.0 GB, in microbatches of 1,000"
    )
    assert said[1:] == ["train.strategy: single, which fits into 80 GB"]


@pytest.mark.catalogue  # it searches the remedies
def test_what_one_gpu_cannot_hold_ends_before_weights_are_read_and_names_a_number_that_fits(
    tiny_checkpoints, tmp_path, memory
):
    memory(1.65e9)
    fits = r"no strategy that fits into 2 GB on 1 ranks .*; learner.max_tokens_per_microbatch: \d+ fits; name"
    with pytest.raises(EnvironmentProblem, match=fits) as e:
        chosen(recipe_of(tiny_checkpoints["qwen2_5_vl"], tmp_path, 200_000))
    assert "this fits: learner.max_tokens_per_microbatch: " in str(e.value)


def test_ranks_on_a_machine_share_its_memory_under_any_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = strategy_choice.rank_memory_bytes(CPU, ALONE)
    assert strategy_choice.rank_memory_bytes(CPU, Ranks(world_size=8, local_size=4)) == whole // 4


def test_a_strategy_and_a_number_that_are_given_need_no_plan(tiny_checkpoints, tmp_path, memory):
    memory(1)
    named = recipe_of(tiny_checkpoints["qwen2_5_vl"], tmp_path, 1000, strategy="single")
    assert chosen(named) == (StrategyChoice(strategy="single", tokens=1000), [])
    assert chosen(recipe_of(tiny_checkpoints["qwen2_5_vl"], tmp_path, 1000), CPU)[0].tokens == 1000


@pytest.mark.catalogue
def test_auto_takes_what_fits_up_to_the_tokens_of_a_step(tiny_checkpoints, tmp_path, memory):
    recipe = recipe_of(tiny_checkpoints["qwen2_5_vl"], tmp_path, "auto")
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_new_tokens": 100})})
    memory(80e9)
    most, said = chosen(recipe)
    rollout, data = recipe.rollout, recipe.data
    step = recipe.optim.prompts_per_step * (data.max_prompt_tokens + rollout.group_size * rollout.max_new_tokens)
    assert most.tokens % 1024 == 0 and 0 <= most.tokens - step < 1024
    assert f"learner.max_tokens_per_microbatch: auto takes {most.tokens:,} tokens; up to " in said[-1]
    memory(1.64e9)
    less, said = chosen(recipe)
    assert data.max_prompt_tokens + rollout.max_new_tokens <= less.tokens < most.tokens
    memory(1e9)
    with pytest.raises(EnvironmentProblem, match=r"auto, but by the plan not even one prompt with one completion \("):
        chosen(recipe)


def test_a_run_takes_auto_once_and_keeps_it_when_it_goes_on(tiny_checkpoints, tmp_path, monkeypatch):
    recipe = sft_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        learner={"max_tokens_per_microbatch": "auto"},
        train={"steps": 1},
    )
    with ready_run(recipe, ALONE) as run:
        train(recipe, run)
    first = json.loads((tmp_path / "run" / "chosen.json").read_text())
    assert "learner.max_tokens_per_microbatch: auto takes " in (tmp_path / "run" / "log.txt").read_text()
    monkeypatch.setattr(strategy_choice, "free_memory", lambda: 1)  # nothing would fit
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 2})})
    with ready_run(longer, ALONE) as run:
        train(longer, run)
        assert json.loads((run.path / "chosen.json").read_text()) == first
        (run.path / "chosen.json").write_text("{}")
        with pytest.raises(RunError, match=r"chosen\.json does not say learner\.max_tokens_per_microbatch"):
            read_token_budget(recipe, run)
    given = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"max_tokens_per_microbatch": 99})})
    assert read_token_budget(given, RunDirectory(path=tmp_path / "run")) is None


def test_free_memory_is_what_programs_can_take(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   1000 kB\n")
    assert free_memory(tmp_path / "meminfo") == 1_024_000
    assert free_memory(tmp_path / "none") > 1_024_000
