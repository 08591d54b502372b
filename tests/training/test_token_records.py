"""What is recorded for each token: the learner's numbers at the right tokens, from whole runs and by hand."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.rewards.samples import scored, scored_group
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.distributed.ranks import ALONE
from tiercel.packing.batch import CompletionName
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import GroupTokens
from tiercel.training.grpo.token_records import token_records
from tiercel.training.optimizer_step import TokensSeen
from tiercel.types import ScoredGroup

FAMILY = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "".join(f"<{each}>" for each in ids)))


def lines(run: Path, folder: str, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / folder / f"step-{step:06d}.jsonl").read_text().splitlines()]


def values(groups: list[GroupTokens], name: str) -> list[float]:
    found = [getattr(each, name) for group in groups for each in group.completions]
    return [value for part in found if part is not None for value in part]


@pytest.fixture(scope="module")
def run(tiny_checkpoints, tmp_path_factory) -> Path:
    """Parts of groups, two minibatches, and the highest entropies alone in the policy term."""
    directory = tmp_path_factory.mktemp("tokens")
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        write_rows(directory),
        directory / "run",
        data={"max_prompt_tokens": 114},
        learner={"max_tokens_per_microbatch": 120, "skip_zero_advantage": False},
        optim={"minibatches": 2},
    )
    return run_grpo(recipe)


def test_means_over_the_recorded_tokens_are_the_metrics(run):
    for row in read_metrics(run)[1:]:
        groups = [GroupTokens.from_json(line) for line in lines(run, "tokens", row["step"])]
        assert len(values(groups, "gaps")) == row["tokens/completion"]
        gaps = [abs(value) for value in values(groups, "gaps")]
        assert statistics.fmean(gaps) == pytest.approx(row["sampler/logprob_gap_mean"], abs=1e-4)
        assert statistics.fmean(values(groups, "entropies")) == pytest.approx(row["entropy/mean"], abs=2e-4)


def test_tokens_are_those_of_the_completions(run):
    for group, tokens in zip(lines(run, "rollouts", 2), lines(run, "tokens", 2), strict=True):
        assert tokens["index"] == group["index"]
        for completion, each in zip(group["completions"], tokens["completions"], strict=True):
            assert len(each["texts"]) == len(each["logprobs"]) == len(each["gaps"]) == completion["tokens"]
            assert all(logprob <= 0 for logprob in each["logprobs"])


def test_only_so_many_prompts_are_recorded(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    for most in (0, 1):
        recipe = grpo_recipe(
            tiny_checkpoints["qwen2_5_vl"],
            rows,
            tmp_path / f"run-{most}",
            rollout={"record_tokens": most},
            train={"steps": 1},
        )
        files = list((run_grpo(recipe) / "tokens").iterdir())
        assert [len(file.read_text().splitlines()) for file in files] == [1] * most


def group_of(*logprobs: list[float]) -> ScoredGroup:
    """Return a group with completions whose tokens have these logprobs under the engine."""
    group = scored_group(*(scored(1.0) for _ in logprobs))
    completions = tuple(
        replace(
            each,
            completion=replace(each.completion, token_ids_L=torch.arange(len(values)), logprobs_L=torch.tensor(values)),
        )
        for each, values in zip(group.completions, logprobs, strict=True)
    )
    prompt = replace(group.group.prompt, index=7, row=replace(group.group.prompt.row, id="a"))
    return replace(group, group=replace(group.group, prompt=prompt), completions=completions)


def test_numbers_go_to_their_completions():
    """Two completions, of 2 and 1 tokens, of which the second was not learnt from; a later pass saw the first again."""
    name = CompletionName(row="a", index=7, number=0)
    other = CompletionName(row="b", index=8, number=0)
    seen = [
        TokensSeen(
            names_C=(other, name),
            completion_of_N=torch.tensor([0, 1, 1]),
            logprobs_N=torch.tensor([-9.0, -1.0, -2.0]),
            entropy_N=torch.tensor([9.0, 0.5, 0.25]),
        ),
        TokensSeen(
            names_C=(name,),
            completion_of_N=torch.tensor([0, 0]),
            logprobs_N=torch.tensor([-8.0, -8.0]),
            entropy_N=torch.tensor([8.0, 8.0]),
        ),
    ]
    (group,) = token_records(ALONE, FAMILY, [group_of([-1.5, -2.0], [-0.25])], seen, most=1)
    first, second = group.completions
    assert group.index == 7 and first.texts == ("<0>", "<1>")
    assert first.logprobs == (-1.5, -2.0) and first.gaps == (0.5, 0.0) and first.entropies == (0.5, 0.25)
    assert second.logprobs == (-0.25,) and second.gaps is None and second.entropies is None
