"""`--nproc`: real ranks through the command line, killed by real signals, resumed on other numbers of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_strategies import nursery
from tests.forked import run_ranks
from tests.training.test_loops import grpo_recipe, write_rows
from tests.training.test_resume import final_hashes, write_recipe
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.scale

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
BY_TWO = ("--nproc", "2", "train.strategy=ddp")
STEPS = 6  # the steps that `final_hashes` reads


def command(recipe: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tiercel", "grpo", str(recipe), *arguments]


def run(recipe: Path, *arguments: str) -> str:
    """What the command says, which must end with 0. Its process has all imports done; with `--nproc N` in front it is N
    such ranks, without their launcher."""
    if arguments[:1] == ("--nproc",):
        words = ["grpo", str(recipe), *arguments[2:]]
        return run_ranks(nursery(), int(arguments[1]), "tiercel", words, timeout=300)
    done = nursery().run(["grpo", str(recipe), *arguments], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def launched(recipe: Path, *arguments: str, code: int = 0) -> str:
    """Standard error of the command line itself, which must end with the code."""
    done = subprocess.run(
        command(recipe, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def make_recipe(tiny_checkpoints, directory: Path, name: str, **changes) -> Path:
    directory.mkdir(exist_ok=True)
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(directory)
    tree = {"train": {"steps": STEPS, "save_every": 2, "threads": 1}, "data": {"eval": None, "workers": 1}, **changes}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, directory / name, **tree)
    return write_recipe(directory / f"{name}.yaml", recipe)


def samples(run_directory: Path) -> list[tuple[int, str, list[int]]]:
    """Global index, prompt id and sampling seeds of all steps, in the order of the files."""
    lines = rollouts(run_directory)
    return [(line["index"], line["id"], [c["seed"] for c in line["completions"]]) for line in lines]


def token_ids(run_directory: Path) -> list[list[list[int]]]:
    return [[completion["token_ids"] for completion in line["completions"]] for line in rollouts(run_directory)]


def rollouts(run_directory: Path) -> list[dict]:
    return [
        json.loads(line)
        for file in sorted((run_directory / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def whole(tiny_checkpoints, tmp_path_factory) -> Path:
    """A run of one process that nothing interrupts."""
    root = tmp_path_factory.mktemp("whole")
    run(make_recipe(tiny_checkpoints, root, "alone"))
    return root / "alone"


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 3), ("fsdp2", 2)])
def test_a_step_with_fewer_prompts_than_ranks_is_shared_out(tiny_checkpoints, tmp_path, strategy, ranks):
    """One prompt a step: each rank draws some of its four completions, and learns from some."""
    sizes = {"optim": {"prompts_per_step": 1, "lr": 1e-2}, "rollout": {"group_size": 4, "max_new_tokens": 6}}
    for name in ("one", "several"):
        make_recipe(tiny_checkpoints, tmp_path, name, **sizes)
    run(tmp_path / "one.yaml")
    run(tmp_path / "several.yaml", "--nproc", str(ranks), f"train.strategy={strategy}")
    assert samples(tmp_path / "several") == samples(tmp_path / "one")
    assert token_ids(tmp_path / "several") == token_ids(tmp_path / "one")
    assert_same_weights(tmp_path / "several", tmp_path / "one")


def test_a_run_goes_on_with_other_ranks_and_another_strategy(tiny_checkpoints, whole):
    recipe = make_recipe(tiny_checkpoints, whole.parent, "moved")
    assert "2 ranks" in launched(recipe, "--nproc", "2", "train.steps=2", "train.strategy=ddp")
    assert "going on from step 2" in run(recipe, "train.steps=4", "train.strategy=single")
    assert "going on from step 4" in run(recipe, "--nproc", "2", "train.strategy=fsdp2")
    moved = whole.parent / "moved"
    assert samples(moved) == samples(whole)
    rows = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    alone = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert set(rows[0]) == set(alone[0])
    assert rows[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-4)
    assert (moved / "report.html").is_file()
    assert_same_weights(moved, whole)


def assert_same_weights(run_directory: Path, other: Path) -> None:
    """Adapter and moments of the last step, to rounding: a moment or a step count lost would show."""
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(at / f"checkpoints/step-{STEPS:06d}" / name) for at in (run_directory, other))
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key].float(), value.float(), rtol=1e-3, atol=1e-5, msg=key)


def test_deepspeed_goes_on_from_a_checkpoint_and_others_from_its(tiny_checkpoints, whole):
    recipe = make_recipe(tiny_checkpoints, whole.parent, "zero")
    run(recipe, "train.steps=2")
    run(recipe, "--nproc", "2", "train.steps=4", "train.strategy=deepspeed")
    run(recipe, "--nproc", "2", "train.strategy=ddp")
    assert samples(whole.parent / "zero") == samples(whole)
    assert_same_weights(whole.parent / "zero", whole)


@pytest.mark.parametrize("strategy", ("fsdp2", "deepspeed"))
def test_full_fine_tuning_is_saved_whole(tiny_checkpoints, tmp_path, strategy):
    recipe = make_recipe(
        tiny_checkpoints, tmp_path, "run", lora=None, optim={"lr": 1e-3, "prompts_per_step": 4}, train={"steps": 2}
    )
    run(recipe, "train.steps=1", "output=" + str(tmp_path / "alone"))
    run(recipe, "--nproc", "2", "train.steps=1", f"train.strategy={strategy}")
    run(recipe, "--nproc", "2", f"train.strategy={strategy}")
    file = Path("checkpoints/step-000001/model/model.safetensors")
    mine, theirs = load_file(tmp_path / "run" / file), load_file(tmp_path / "alone" / file)
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.fixture(scope="module")
def by_muon(tiny_checkpoints, tmp_path_factory) -> Path:
    """The folder of recipes that train a whole model by Muon: `one`, `two` and `killed`; and the run of `two`."""
    root = tmp_path_factory.mktemp("muon")
    optim = {"name": "muon", "lr": 1e-3, "weight_decay": 0.1, "prompts_per_step": 4}
    for name in ("one", "two", "killed"):
        make_recipe(tiny_checkpoints, root, name, lora=None, freeze=[], optim=optim)
    run(root / "two.yaml", *BY_TWO)
    return root


def test_muon_makes_the_update_of_one_rank_on_two(by_muon, tiny_checkpoints):
    """The momentum is equal to rounding. Muon then rounds it to bfloat16, so that a step may differ by a few of the
    units there, 2^-8 each, and no more."""
    run(by_muon / "one.yaml", "train.steps=2")
    file = Path("checkpoints/step-000002")
    mine, theirs = (load_file(by_muon / name / file / "optimizer.safetensors") for name in ("two", "one"))
    assert set(mine) == set(theirs) and any(key.endswith(".momentum_buffer") for key in theirs)
    start = load_file(tiny_checkpoints["qwen2_5_vl"] / "model.safetensors")
    mine, theirs = (load_file(by_muon / name / file / "model/model.safetensors") for name in ("two", "one"))
    steps = [torch.cat([(after[key] - start[key]).flatten() for key in sorted(start)]) for after in (mine, theirs)]
    error = float((steps[0] - steps[1]).norm() / steps[1].norm())
    print(f"two ranks and one, steps of Muon: relative difference {error:.1e}")
    assert error < 0.01


def test_muon_goes_on_with_the_same_bytes_after_a_killed_rank(by_muon):
    finish_with_a_kill(by_muon / "killed.yaml", by_muon / "killed")
    assert final_hashes(by_muon / "killed") == final_hashes(by_muon / "two")


def test_a_strategy_of_many_runs_alone_too(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run", train={"steps": 1})
    run(recipe, "train.strategy=fsdp2")


def test_a_killed_rank_costs_nothing_but_time(tiny_checkpoints, whole):
    run(make_recipe(tiny_checkpoints, whole.parent, "two"), *BY_TWO)
    finish_with_a_kill(make_recipe(tiny_checkpoints, whole.parent, "killed"), whole.parent / "killed")
    assert final_hashes(whole.parent / "killed") == final_hashes(whole.parent / "two")


def finish_with_a_kill(recipe: Path, output: Path) -> None:
    """Run the recipe on two ranks, and kill the second one in its third step or soon after."""
    process = subprocess.Popen(
        command(recipe, *BY_TWO, "--max-restarts", "1"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "going on from step 2" in said


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no rank {rank}")


def test_without_restarts_a_killed_rank_ends_the_run_with_a_remedy(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run", train={"steps": 500, "threads": 1})
    process = subprocess.Popen(command(recipe, "--nproc", "2"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    other = rank_process(process.pid, 0)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert "run the same command again to resume from the newest checkpoint" in said.lower()
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.parametrize("reaches", ("the launcher", "all processes"))
def test_sigterm_saves_on_all_ranks(tiny_checkpoints, tmp_path, reaches):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run", train={"steps": 500, "save_every": 500, "threads": 1})
    process = subprocess.Popen(
        command(recipe, "--nproc", "2", "--max-restarts", "3"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    if reaches == "all processes":  # the ranks get it once more from the launcher
        os.kill(rank_process(process.pid, 0), signal.SIGTERM)
        os.kill(rank_process(process.pid, 1), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "saved" in said and json.loads((tmp_path / "run/end.json").read_text())["exit_code"] == 75
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


def test_a_wrong_recipe_is_refused_before_any_process_starts(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    said = launched(recipe, "--nproc", "2", "rollout.group_size=1", code=2)
    assert "rollout.group_size" in said and "rank" not in said
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_recipes_are_refused_by_name(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    program = (
        "import os, sys; from tiercel.cli.main import main; "
        f"sys.exit(main(['grpo', {str(recipe)!r}] + ['optim.lr=1e-3'] * (os.environ['RANK'] == '1')))"
    )
    script = tmp_path / "rank.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "the ranks differ" in done.stderr and "on rank 0" in done.stderr and "on rank 1" in done.stderr
    assert not (tmp_path / "run").exists()


TWO_RUNS = """
import os, sys
del os.environ["LOCAL_WORLD_SIZE"]  # which only torchrun sets
import tiercel as tc
for name in ("one", "two"):
    tc.grpo(sys.argv[1], output=f"{sys.argv[2]}/{name}", train={"strategy": "fsdp2"}, steps=1)
"""


ONE_STOPS = """
import os, sys
import tiercel as tc
tc.grpo(
    sys.argv[1], output=f"{sys.argv[2]}/run", steps=3,
    on_step=lambda step: os.environ["RANK"] == "1" and step.number == 1 and step.stop(),
)
print("left after step 1")
"""


def by_torchrun(script: str, recipe: Path, directory: Path) -> str:
    """Run a script on two ranks, with the recipe and the directory as its words, and return what it prints."""
    (directory / "script.py").write_text(script)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(directory / "script.py")]
    done = subprocess.run(
        [sys.executable, *words, str(recipe), str(directory)],
        env={**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_runs_of_a_script_under_torchrun(tiny_checkpoints, tmp_path):
    """The second run of the processes finds the ranks, although torchrun's store has the addresses of the first."""
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    by_torchrun(TWO_RUNS, recipe, tmp_path)
    assert [len(rollouts(tmp_path / name)) > 0 for name in ("one", "two")] == [True, True]


def test_a_stop_that_one_rank_asks_for_is_that_of_all(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    said = by_torchrun(ONE_STOPS, recipe, tmp_path)
    assert said.count("left after step 1") == 2
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1
    assert (tmp_path / "run/report.html").is_file()
