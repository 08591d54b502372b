"""vLLM's prefix cache with questions of one picture: how many tokens of prompts it had computed before."""

import re
import urllib.request
from pathlib import Path

import pytest

from tests.training.test_grouped_pictures import write_questions
from tests.vllm.test_runs import by_server, finished

pytestmark = pytest.mark.vllm
BLOCK = 32  # tokens that the cache keeps together
PICTURES, QUESTIONS, GROUP = 2, 4, 2


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> Path:
    """Rows that ask four questions about each picture; each picture takes up to 60 tokens."""
    return write_questions(tmp_path_factory.mktemp("sheets"), PICTURES, QUESTIONS, size=(280, 168))


def cached(url: str) -> tuple[float, float]:
    """Return how many tokens of prompts the server was asked for, and how many of them its cache had."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        lines = answer.read().decode()
    names = ("queries", "hits")
    asked, found = (re.findall(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", lines, re.MULTILINE) for name in names)
    return sum(map(float, asked)), sum(map(float, found))


def test_a_step_of_questions_about_one_picture_finds_its_picture_in_the_cache(fleet, write_recipe, sheets):
    data = {"train": str(sheets), "max_prompt_tokens": 200}
    server = fleet.started("prefixes", write_recipe("qwen2_5_vl", data=data), f"--block-size {BLOCK}").wait()
    shares = {}
    for grouped in (False, True):
        asked, found = cached(server.url)
        recipe = write_recipe(
            "qwen2_5_vl",
            data=data | ({"group_by_prefix": True} if grouped else {"shuffle": False}),
            rollout=by_server(server.url, group_size=GROUP),
            optim={"prompts_per_step": QUESTIONS},
            train={"steps": PICTURES},
        )
        finished(recipe)
        now = cached(server.url)
        shares[grouped] = (now[1] - found) / (now[0] - asked)
    print(f"prompt tokens from the cache: rows as they come {shares[False]:.3f}, grouped by picture {shares[True]:.3f}")
    assert shares[True] > shares[False]
