"""The files for SkyPilot and Kubernetes contain what these need, and torch's launcher and tiercel can read their
commands."""

import re
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tiercel.cli.main import build_parser

LAUNCH = Path(__file__).parents[2] / "docs/launch"


def read(name: str) -> dict:
    return yaml.safe_load((LAUNCH / name).read_text())


def launcher_options(words: Sequence[str]) -> Namespace:
    """What torch's launcher makes of a command that runs tiercel, whose own words are parsed as well."""
    assert list(words[:3]) == ["python", "-m", "torch.distributed.run"]
    options = get_args_parser().parse_args(words[3:])
    assert options.module and options.training_script == "tiercel"
    assert build_parser().parse_args(options.training_script_args).command == "grpo"
    return options


def values(container: dict) -> dict[str, str]:
    assert all(isinstance(each["value"], str) for each in container["env"])  # numbers are refused
    return {each["name"]: each["value"] for each in container["env"]}


def test_the_kubernetes_job_has_what_the_operator_needs():
    job = read("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, elastic = job["spec"], job["spec"]["elasticPolicy"]
    assert set(spec) == {"nprocPerNode", "elasticPolicy", "runPolicy", "pytorchReplicaSpecs"}
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]  # a Master would make it set RANK, as torch's launcher does
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])  # a part of the pods' host names
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"]
    assert elastic["rdzvBackend"] == "c10d" and worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert spec["nprocPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert int(values(container)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def test_torch_takes_the_operators_variables_and_the_command(monkeypatch):
    job = read("pytorchjob.yaml")["spec"]
    elastic = job["elasticPolicy"]
    given = {
        "PET_NPROC_PER_NODE": job["nprocPerNode"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": "rec-7b-worker-0:23456",
    }  # as the operator sets them in every pod
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    command = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
    options = launcher_options(command)
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2:2", "8", 3)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "rec-7b-worker-0:23456")


def test_skypilot_gets_only_fields_that_it_knows():
    task = read("skypilot.yaml")
    assert set(task) == {"name", "num_nodes", "envs", "resources", "volumes", "setup", "run", "workdir"}
    assert set(task["resources"]) == {"accelerators", "job_recovery"}
    assert set(task["resources"]["job_recovery"]) == {"max_restarts_on_errors"}
    assert all(isinstance(value, str) for value in task["envs"].values())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_torch_and_tiercel_read_skypilots_command(tmp_path):
    script = read("skypilot.yaml")["run"]
    given = {
        "RECIPE": "/shared/a recipe.yaml",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-1",
        "PATH": "/usr/bin:/bin",
    }
    show = "python() { printf '%s\\n' \"$@\"; }\n"
    words = subprocess.run(["bash", "-c", show + script], env=given, capture_output=True, text=True, check=True).stdout
    options = launcher_options(["python", *words.splitlines()])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 3)
    assert (options.rdzv_endpoint, options.rdzv_id) == ("10.0.0.1:29500", "sky-1")
    assert options.training_script_args == ["grpo", "/shared/a recipe.yaml"]


@pytest.mark.parametrize("name", ("pytorchjob.yaml", "skypilot.yaml", "ray.yaml", "tiercel_ray.py"))
def test_the_page_names_every_file(name):
    assert f"docs/launch/{name}" in (LAUNCH.parent / "distributed.md").read_text()
