"""Checkpoints that vLLM computes on a CPU, recipes for them, and servers that live as long as the tests."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.full_processors import full_processor
from tests.generic_models import GENERIC, save_generic_checkpoint
from tests.tiny_models import save_tiny_checkpoint
from tests.training.test_loops import merged, write_rows, write_video_rows
from tests.vllm.servers import Fleet, Server
from tiercel.config.schema import Model
from tiercel.models.families.loading import load_family

MODELS = ("qwen2_vl", "qwen2_5_vl")
MODELS_IN_PROCESS = ("qwen3_vl", "internvl")
MODELS_IN_BFLOAT16 = ("qwen3_5",)  # on a CPU, vLLM computes their delta nets in no other dtype
TEXT_ONLY = "qwen3"
LONGEST_PROMPT = 480  # tokens that the servers take; the models have 512 positions


@pytest.fixture(scope="session")
def vllm_checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    in_process = (*MODELS_IN_PROCESS, *MODELS_IN_BFLOAT16)
    saved = {name: save_tiny_checkpoint(name, root / name, heads=2) for name in (*MODELS, *in_process)}
    for name in in_process:  # vLLM asks for the processor's own settings for these
        full_processor(load_family(Model(path=str(saved[name])))).save_pretrained(saved[name])
    text = GENERIC[TEXT_ONLY]
    text = replace(text, keys=text.keys | {"num_attention_heads": 2, "head_dim": 32})
    saved[TEXT_ONLY] = save_generic_checkpoint(text, root / TEXT_ONLY)
    return saved


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="session")
def video_data(tmp_path_factory) -> dict:
    """The section `data` for rows of which every other one has a video. At its rate, vLLM would by itself compute other
    positions than the trainer."""
    path = write_video_rows(tmp_path_factory.mktemp("videos"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::2]:
        (frames,) = row["videos"]
        row["videos"] = [{"frames": [*frames, *frames, frames[0]], "fps": 2.4}]
    for row in rows[1::2]:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace("<video>", "")
        del row["videos"]
    path.write_text("\n".join(map(json.dumps, rows)))
    limits = {"min_pixels": 28 * 28, "max_pixels": 84 * 56}
    return {"train": str(path), "video": limits, "max_prompt_tokens": LONGEST_PROMPT}


@pytest.fixture(scope="session")
def write_recipe(vllm_checkpoints, rows, tmp_path_factory) -> Callable[..., Path]:
    """A recipe file of one of the models; sections of it may be changed."""

    def write(model: str, output: Path | str = "run", **changes) -> Path:
        directory = tmp_path_factory.mktemp("recipe")
        tree = {
            "model": {"path": str(vllm_checkpoints[model]), "dtype": "float32"},
            "lora": {"rank": 4, "alpha": 8},
            "data": {"train": str(rows), "workers": 0, "max_prompt_tokens": 200},
            "rewards": [{"call": f"{rows.parent}/mine.py:variety"}],
            "rollout": {"group_size": 4, "max_new_tokens": 16},
            "optim": {"lr": 1e-3, "prompts_per_step": 4},
            "train": {"steps": 10, "save_every": 2, "threads": 1},
            "output": str(directory / output),
        }
        path = directory / "recipe.yaml"
        path.write_text(yaml.safe_dump(merged(tree, changes)))
        return path

    return write


@pytest.fixture(scope="session")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("servers"))
    yield fleet
    fleet.end()


@pytest.fixture(scope="session")
def server_of(fleet, write_recipe, video_data):
    """A running server of a model, or one that is starting."""

    def server(model: str, name: str = "") -> Server:
        return fleet.started(f"{model}{name}", write_recipe(model, data=video_data))

    return server
