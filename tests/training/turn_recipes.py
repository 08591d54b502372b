"""Recipes and records of tiny runs with a tool that returns pictures."""

import json
from pathlib import Path

from tests.calling_models import call
from tests.training.test_loops import grpo_recipe, merged, write_rows
from tiercel.config.schema import GrpoRecipe

SCENE = '''
from PIL import Image


class Scene:
    """A scene of which parts are looked at."""

    def reset(self, id, seed, **row):
        self.begun = f"{id} {seed}"
        self.reward = 0.0

    def look(self, part: int) -> list:
        """Look at a part of the scene.

        Args:
            part: Its number.
        """
        if part > 8:
            raise ValueError(f"there is no part {part}")
        self.reward += 1 / (1 + part)
        picture = Image.new("RGB", (40 + 9 * part, 60), (30 * part, 200, sum(self.begun.encode()) % 256))
        return [{"type": "text", "text": f"part {part}"}, {"type": "image", "image": picture}]

    def get_reward(self) -> float:
        return self.reward
'''
LOOKS = [call("look", part=part) for part in range(10)]
CALLS = [*LOOKS, call("look"), call("touch", part=1), "<tool_call>{</tool_call>"]


def turn_recipe(checkpoint: Path, directory: Path, name: str, **changes) -> GrpoRecipe:
    """Three turns of up to 40 tokens, on rows in `directory`."""
    directory.mkdir(exist_ok=True)
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(directory)
        (directory / "scene.py").write_text(SCENE)
    tree = {
        "data": {"eval": None, "workers": 0},
        "rewards": [{"name": "environment"}, {"call": f"{directory}/mine.py:variety"}],
        "rollout": {
            "environment": f"{directory}/scene.py:Scene",
            "max_turns": 3,
            "max_new_tokens": 40,
            "max_trajectory_tokens": 300,
            "stop": ["</tool_call>"],
        },
        "learner": {"max_tokens_per_microbatch": 1200},
    }
    return grpo_recipe(checkpoint, rows, directory / name, **merged(tree, changes))


def records(run: Path, step: int) -> list[dict]:
    """Prompts and completions of a step."""
    return [json.loads(line) for line in (run / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]
