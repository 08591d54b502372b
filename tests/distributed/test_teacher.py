"""A teacher on a server that two ranks ask, each for its own completions."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.distributed.test_launch import (
    STEPS,
    assert_same_weights,
    launched,
    make_recipe,
    rollouts,
    run,
    samples,
    token_ids,
)
from tests.rollout.scripted_server import Raw, serving
from tests.tiny_models import tiny_recipe
from tests.training.test_loops import write_rows
from tests.training.test_served_teacher import TeachingServer
from tiercel.errors import EXIT_TRAINING
from tiercel.models.families.loading import load_family
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.scale
FAMILY = "qwen2_5_vl"
PROMPTS = 4  # in each step; each rank has one half


@pytest.fixture(scope="module")
def server(tiny_checkpoints):
    family = load_family(tiny_recipe(tiny_checkpoints[FAMILY]).model)
    with serving(TeachingServer(family.placeholder_ids[0])) as server:
        server.model_root = str(tiny_checkpoints[FAMILY])
        yield server


@pytest.fixture(scope="module")
def write(tiny_checkpoints, tmp_path_factory, server) -> Callable[[str], Path]:
    """Write a recipe of rows without pictures, which ask for their own ids."""
    directory = tmp_path_factory.mktemp("teacher")
    rows = write_rows(directory)
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    asked = [{"id": each["id"], "messages": [{"role": "user", "content": f"{each['id']}?"}]} for each in records]
    rows.write_text("".join(json.dumps(record | {"answer": "4"}) + "\n" for record in asked))
    teacher = {"path": str(tiny_checkpoints[FAMILY]), "url": server.url, "top_k": 3}
    changes = {"algorithm": {"teacher": teacher}, "rollout": {"patience": 1.0}}
    return lambda name: make_recipe(tiny_checkpoints, directory, name, **changes)


@pytest.fixture(scope="module")
def asked(write, server) -> dict[str, list[list[int]]]:
    """What the server was asked by the runs of one rank and of two."""
    found = {}
    for name, ranks in (("one", "1"), ("two", "2")):
        before = len(server.requests)
        run(write(name), "--nproc", ranks)
        found[name] = [body["token_ids"] for body in server.requests[before:]]
    return found


def test_two_ranks_ask_what_one_asks_and_learn_the_same(asked, write):
    one, two = (write(name).with_suffix("") for name in asked)
    assert samples(two) == samples(one) and token_ids(two) == token_ids(one)
    assert sorted(asked["two"]) == sorted(asked["one"])
    assert len(asked["one"]) == sum(len(line["completions"]) for line in rollouts(one))
    for found, expected in zip(read_metrics(two), read_metrics(one), strict=True):
        assert found["teacher/kl"] == pytest.approx(expected["teacher/kl"], rel=1e-4)
    assert_same_weights(two, one)
    assert len(read_metrics(two)) == STEPS


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_whose_teacher_fails_ends_both_and_one_message_says_why(asked, write, server, tiny_checkpoints, rank):
    _, row, _ = samples(write("one").with_suffix(""))[rank * PROMPTS // 2]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints[FAMILY])

    def refusing(answer: dict) -> Raw:
        is_meant = f"{row}?" in tokenizer.decode(answer["prompt_token_ids"])
        return Raw(status=500, body=b"no") if is_meant else Raw(body=json.dumps(answer).encode())

    server.tamper = refusing
    try:
        said = launched(write(f"failing-{rank}"), "--nproc", "2", code=EXIT_TRAINING)
    finally:
        server.tamper = None
    reason = f"teacher.url: row {row} got no answer within rollout.patience (1 s)"
    told = [line for line in said.splitlines() if line.startswith("tiercel grpo") and reason in line]
    assert len(told) == 1 and told[0].startswith(f"tiercel grpo (rank {rank}): "), said
    assert "Traceback" not in said and f"(rank {1 - rank})" not in said
    assert not (write(f"failing-{rank}").with_suffix("") / "metrics.jsonl").exists()
