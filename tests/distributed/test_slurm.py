"""The Slurm template becomes a script that bash, torch's launcher and tiercel can read."""

import re
import shlex
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

from tiercel.cli.main import build_parser

DOCS = Path(__file__).parents[2] / "docs"
VALUES = {
    "name": "rec-7b",
    "nodes": "4",
    "gpus_per_node": "8",
    "cpus_per_node": "96",
    "time": "24:00:00",
    "python": "python",
    "max_restarts": "3",
    "command": "grpo",
    "recipe": "recipe.yaml",
}


def rendered() -> str:
    text = (DOCS / "tiercel.sbatch").read_text()
    assert set(re.findall(r"{{ (\w+) }}", text)) == set(VALUES)
    for name, value in VALUES.items():
        text = text.replace(f"{{{{ {name} }}}}", value)
    assert "{{" not in text
    return text


def test_bash_parses_it():
    done = subprocess.run(["bash", "-n"], input=rendered(), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_directives_come_before_the_first_command():
    lines = rendered().splitlines()
    directives = [line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH")]
    assert dict(pair for pair in directives if len(pair) == 2)["nodes"] == "4"
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < first_command


def test_torch_and_tiercel_read_the_command():
    command = rendered()[rendered().index("srun") :].replace("\\\n", " ")
    words = shlex.split(command)
    arguments = words[words.index("torch.distributed.run") + 1 :]
    arguments = [word.replace("$SLURM_JOB_NUM_NODES", "4") for word in arguments]
    options = get_args_parser().parse_args(arguments)
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("4", "8", 3)
    assert options.module and options.training_script == "tiercel"
    ours = build_parser().parse_args(options.training_script_args)
    assert ours.command == "grpo" and str(ours.recipe) == "recipe.yaml"


def test_the_page_fills_in_every_value():
    page = (DOCS / "distributed.md").read_text()
    assert set(re.findall(r"{{ (\w+) }}", page)) == set(VALUES)
