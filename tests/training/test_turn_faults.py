"""A run whose environment misbehaves in many ways loses those trajectories, and nothing else."""

import re

import pytest

from tests.calling_models import call, save_calling_checkpoint
from tests.rewards.runtime.conftest import no_child_left as no_child_left
from tests.training.test_resume import write_recipe
from tests.training.turn_recipes import LOOKS, SCENE, records, turn_recipe
from tiercel.cli.main import main
from tiercel.runs.directory import read_metrics

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.catalogue]
STEPS = 2
FAULTS = {  # what the policy calls, and what is reported for its trajectory
    "hang": ("time.sleep(600)", "no answer within 2 s"),
    "leave": ("os._exit(7)", "its process ended with exit code 7"),
    "corrupt": ("return b'\\x89PNG nonsense'", "is not a PNG, JPEG or WEBP image"),
    "gigabyte": ("return 'x' * 10**9", "more than reliability.reward_memory_gb|answered a text of"),
    "nan": ("self.reward = float('nan')", "get_reward: returned nan"),
    "fork": ("os.fork() or time.sleep(600)", None),  # the child ends with the run, and costs nothing
    "fail": ("1 / 0", None),  # the policy is told
}


def source() -> str:
    methods = [
        f'    def {name}(self):\n        """Misbehave."""\n        {fault}\n' for name, (fault, _) in FAULTS.items()
    ]
    return "import os\nimport time\n" + SCENE + "\n" + "\n".join(methods)


def test_faults_of_environments_cost_their_trajectories_and_no_run(tiny_checkpoints, tmp_path):
    checkpoint = save_calling_checkpoint(
        tiny_checkpoints["qwen2_5_vl"], tmp_path / "model", [*LOOKS, *map(call, FAULTS)]
    )
    recipe = turn_recipe(
        checkpoint,
        tmp_path / "data",
        "run",
        rollout={"group_size": 4},
        reliability={"reward_timeout": 2.0, "reward_memory_gb": 0.5, "max_failed_reward_fraction": 1.0},
        train={"steps": STEPS},
    )
    (tmp_path / "data" / "scene.py").write_text(source())
    assert main(["grpo", str(write_recipe(tmp_path / "recipe.yaml", recipe))]) == 0
    run = tmp_path / "data" / "run"
    told, failures = set(), []
    for row in read_metrics(run):
        completions = [each for line in records(run, row["step"]) for each in line["completions"]]
        failed = [each for each in completions if each["total"] is None]
        assert row["environment/failed"] == len(failed) == row["reward/failed_fraction"] * len(completions) > 0
        assert row["grad_norm"] > 0  # from the others
        failures += [each["failures"]["environment"] for each in failed]
        told |= {each["name"] for done in completions for turn in done["turns"] for each in turn["calls"]}
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    for name, (_, reason) in FAULTS.items():
        assert name in told if reason is None else any(re.search(reason, failure) for failure in failures), name
    assert all(any(reason and re.search(reason, failure) for _, reason in FAULTS.values()) for failure in failures)
