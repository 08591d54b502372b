"""An engine whose logprobs go wrong after the gate: limits worked by hand, and whole runs against a server."""

import json

import pytest
import torch

from tests.rollout.sampling_server import SamplingServer, version_of
from tests.rollout.scripted_server import Answer, Raw, serving
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.config import GrpoRecipe
from tiercel.errors import TrainingError
from tiercel.runs.directory import open_run, read_metrics
from tiercel.training.grpo import loop as grpo
from tiercel.training.grpo.train_inference_mismatch import gap_counts, gap_limits, gap_metrics, gap_problem

WRONG_FROM = 2  # from this version of the policy on, the server's logprobs are 5 too low


def recipe_with(**rollout) -> GrpoRecipe:
    return GrpoRecipe.model_validate(
        {
            "model": {"path": "m", "dtype": rollout.pop("dtype", "bfloat16")},
            "lora": {"dropout": rollout.pop("dropout", 0.0)},
            "learner": {"form": "repeated"},
            "data": {"train": "rows.jsonl"},
            "rewards": [{"name": "exact"}],
            "rollout": rollout,
            "algorithm": {"correction": {"level": "none"}},
            "train": {"steps": 1},
            "output": "run",
        }
    )


def summed(recipe: GrpoRecipe, gaps: list[float]) -> dict[str, float]:
    counts = gap_counts(torch.tensor(gaps), torch.ones(len(gaps), dtype=torch.bool), gap_limits(recipe))
    return {name: float(value) for name, value in counts.items()}


def test_the_limits_are_the_gates_and_what_a_healthy_run_adds():
    def limits(**rollout) -> tuple[float, float, bool]:
        found = gap_limits(recipe_with(**rollout))
        return found.far, found.extreme, found.is_cut

    assert limits(dtype="float32") == (pytest.approx(0.004), pytest.approx(0.1), False)
    assert limits() == (1.0, 25.0, False)
    assert limits(parity_tolerance=0.05) == (pytest.approx(0.2), 5.0, False)
    assert limits(dropout=0.1) == (3.0, 75.0, False)
    assert limits(engine="vllm", top_p=0.9) == (1.0, 25.0, True)
    assert limits(engine="vllm", top_k=20) == (1.0, 25.0, True)
    assert limits(top_p=0.9) == (1.0, 25.0, False)  # the local engine reports the policy's own


@pytest.mark.parametrize(
    ("gaps", "is_wrong"),
    (
        ([0.01] * 95 + [0.9] * 5, False),  # the tail of a healthy run in bfloat16
        ([0.01] * 95 + [2.0] * 5, False),  # 5 %, and no more
        ([0.01] * 94 + [2.0] * 6, True),
        ([0.01] * 94 + [-2.0] * 6, True),
        ([2.0] * 3, False),  # a few tokens of a short step
        ([2.0] * 4, True),
        ([0.01] * 999 + [26.0], True),  # rounding cannot do that
        ([], False),
    ),
)
def test_many_tokens_far_off_or_one_extremely_are_another_engine(gaps, is_wrong):
    recipe = recipe_with()
    problem = gap_problem(recipe, summed(recipe, gaps), {"sampler/logprob_gap_max": 2.0})
    assert (problem is not None) == is_wrong
    if problem is not None:
        assert problem.startswith("rollout.engine: local: its logprobs are no longer the learner's: of ")


def test_logprobs_among_the_tokens_that_were_left_may_be_higher_and_not_lower():
    recipe = recipe_with(engine="vllm", top_k=5)
    assert gap_problem(recipe, summed(recipe, [-3.0] * 100), {}) is None
    assert gap_problem(recipe, summed(recipe, [3.0] * 100), {}) is not None


def test_metrics_are_the_mean_and_the_share_that_is_far_off():
    recipe = recipe_with()
    found = gap_metrics(summed(recipe, [0.5, -0.5, 2.0, 0.0]))
    assert found == {"sampler/logprob_gap_mean": 0.75, "sampler/gap_far_fraction": 0.25}
    assert gap_metrics(summed(recipe, [])) == {}


def too_low(answer: Answer) -> Raw:
    if version_of(answer) >= WRONG_FROM:
        for choice in answer["choices"]:
            for entry in choice["logprobs"]["content"]:
                entry["logprob"] -= 5.0
    return Raw(body=json.dumps(answer).encode())


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path) -> GrpoRecipe:
    return grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        data={"eval": None, "workers": 0},
        train={"steps": 4, "save_every": 100},
    )


def served(recipe: GrpoRecipe, url: str, **rollout) -> GrpoRecipe:
    tree = recipe.model_dump()
    tree["rollout"] |= {"engine": "vllm-server", "urls": [url], "patience": 30.0, **rollout}
    return GrpoRecipe.model_validate(tree)


def test_a_run_stops_in_the_step_whose_logprobs_are_wrong_and_learns_nothing_of_it(recipe):
    with serving(SamplingServer(recipe)) as server:
        server.tamper = too_low
        recipe = served(recipe, server.url)
        with open_run(recipe) as run, pytest.raises(TrainingError) as caught:
            grpo.train(recipe, run)
    text = str(caught.value)
    assert text.startswith(f"step 3: rollout.engine: vllm-server ({server.url}): its logprobs are no longer")
    assert "the mean gap is 5, the largest 5 (rollout.parity_tolerance: 0.001)" in text
    assert "this update was not made; start the servers again" in text and "rollout.parity_action: warn" in text
    rows = read_metrics(run.path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sampler/logprob_gap_max"] < 1e-3 and row["sampler/gap_far_fraction"] == 0 for row in rows)


def test_with_warn_the_run_goes_on_and_says_it_once_a_step(recipe, capsys):
    with serving(SamplingServer(recipe)) as server:
        server.tamper = too_low
        recipe = served(recipe, server.url, parity_action="warn")
        with open_run(recipe) as run:
            grpo.train(recipe, run)
    rows = read_metrics(run.path)
    assert [round(row["sampler/gap_far_fraction"], 3) for row in rows] == [0.0, 0.0, 1.0, 1.0]
    warnings = [line for line in (run.path / "log.txt").read_text().splitlines() if "warning: step" in line]
    assert len(warnings) == 2 and "step 3: rollout.engine: vllm-server" in warnings[0] and "step 4" in warnings[1]
