"""The scaling benchmark at toy size."""

import pytest
import torch

from benchmarks.flops import decoder_shape
from benchmarks.gpu.models import MODELS, random_policy
from benchmarks.prompt_scaling import (
    Options,
    Step,
    Timings,
    added_flops,
    group_rows,
    measure,
    prompt_rows,
    repeated_pair,
    steps_of,
    straight_line,
)

OPTIONS = Options(
    prompts=(6, 12),
    group_sizes=(2, 8),
    prompt=6,
    completion=3,
    repetitions=3,
    repeated_repetitions=2,
    repeated_tokens=80,
    clock="wall",
)


def toy_shape(policy):
    return decoder_shape(policy.family.checkpoint.config.get_text_config(), MODELS["toy"].lora_rank)


def test_the_repeated_form_takes_smaller_groups_where_its_steps_would_be_too_large():
    assert [repeated_pair(prompt, OPTIONS) for prompt in (2, 6, 12, 37, 40)] == [(8, 16), (4, 8), (2, 4), (1, 2), None]
    assert Step(form="repeated", prompt=6, group_size=8) in steps_of(OPTIONS)
    assert len(steps_of(OPTIONS)) == len(set(steps_of(OPTIONS))) == 5 + 5


def test_only_attention_grows_with_the_prompt():
    shape = toy_shape(random_policy(MODELS["toy"], torch.device("cpu"), torch.float32))
    short, long = (added_flops(shape, prompt, 3) for prompt in (6, 12))
    assert (short.linear, short.lora, short.head) == (long.linear, long.lora, long.head)
    # 3 tokens see 6 more, in 2 layers of 64, with 2 products forward and 5 backward.
    assert long.attention - short.attention == 3 * 6 * 2 * 64 * 7 * 2
    assert short.head == 4 * 3 * 320 * 64


def test_costs_are_differences_of_steps():
    seconds = {
        Step(form="split", prompt=prompt, group_size=size): [2.0 + prompt + size * (1 + prompt / 10)] * 3
        for prompt in (10, 20, 40)
        for size in (8, 16)
    }
    timings = Timings(seconds=seconds)
    assert timings.added("split", 20, (8, 16)) == pytest.approx([3.0] * 3)
    options = Options(
        prompts=(10, 20, 40),
        group_sizes=(),
        prompt=10,
        completion=3,
        repetitions=3,
        repeated_repetitions=1,
        repeated_tokens=0,
        clock="wall",
    )
    shape = toy_shape(random_policy(MODELS["toy"], torch.device("cpu"), torch.float32))
    line = straight_line(timings, shape, options)
    assert line["intercept_seconds"] == pytest.approx(1.0)
    assert line["slope_seconds"] == pytest.approx(0.1)
    assert line["largest_deviation"] < 1e-9
    assert [row["repeated_seconds"] for row in prompt_rows(timings, shape, options)] == [None] * 3


def test_a_toy_run_times_every_step():
    policy = random_policy(MODELS["toy"], torch.device("cpu"), torch.float32)
    timings = measure(policy, OPTIONS, say=lambda text: None)
    counts = {step.form: len(values) for step, values in timings.seconds.items()}
    assert counts == {"split": 3, "repeated": 2}
    assert all(value > 0 for values in timings.seconds.values() for value in values)
    by_group = group_rows(timings, toy_shape(policy), OPTIONS)
    assert [row["G"] for row in by_group] == [2, 8]
    assert all(row["repeated_ratio"] > 0 for row in by_group)
