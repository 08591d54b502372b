"""The sampler next to the learner: what a vLLM engine takes from a rank, and layouts of models too large for one
GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import save_config
from tiercel.cli.main import main
from tiercel.config.rollout import Vllm
from tiercel.config.schema import GrpoRecipe
from tiercel.errors import EnvironmentProblem
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.memory import (
    VLLM_WORKSPACE,
    Layout,
    Measured,
    cache_token_bytes,
    cached_rows,
    rank_memory,
    step_rollout,
)
from tiercel.planning.options import study
from tiercel.planning.plan import gathering_problem
from tiercel.planning.probe import LinearBytes
from tiercel.planning.seconds import phase_seconds, rollout_seconds
from tiercel.training import strategy_choice
from tiercel.training.trainer import build_trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen25vl-72b-grpo.yaml"


def recipe_of(directory: Path, vllm: Vllm) -> GrpoRecipe:
    return GrpoRecipe.model_validate(
        {
            "model": {"path": str(directory)},
            "lora": {"rank": 16, "alpha": 32},
            "data": {"train": "rows.jsonl", "max_prompt_tokens": 1000},
            "rewards": [{"name": "exact"}],
            "rollout": {"engine": "vllm", "vllm": vllm, "max_new_tokens": 1000, "group_size": 4},
            "optim": {"prompts_per_step": 16},
            "train": {"steps": 1},
            "output": "run",
        }
    )


def test_an_engine_holds_as_many_rows_as_its_share_of_the_memory_leaves(tmp_path):
    vllm = Vllm(tensor_parallel=2, gpu_memory_utilization=0.25, sleep_level=1)
    recipe = recipe_of(save_config("qwen2_5_vl", "7b", tmp_path), vllm)
    sizes = study(recipe, None).sizes
    rollout = step_rollout(recipe, ranks=4, prompt_tokens=1000, memory_bytes=80 * 10**9)
    assert (rollout.prompts, rollout.awake_bytes, rollout.asleep_bytes) == (4, 20 * 10**9, VLLM_WORKSPACE)
    # Keys and values of 28 layers, two of the 4 heads of 128, two bytes each.
    assert cache_token_bytes(recipe, sizes, 2) == 2 * 2 * 28 * 2 * 128
    room = 20 * 10**9 - VLLM_WORKSPACE - sizes.weights  # half of the weights, two bytes each
    assert cached_rows(recipe, sizes, rollout) == room // (28_672 * 2000)


def test_rows_that_do_not_fit_at_once_take_turns(tmp_path):
    directory = save_config("qwen2_5_vl", "7b", tmp_path)
    seconds, rows = [], []
    for share in (0.27, 0.5):
        recipe = recipe_of(directory, Vllm(gpu_memory_utilization=share))
        sizes = study(recipe, None).sizes
        rollout = step_rollout(recipe, ranks=1, prompt_tokens=1000, memory_bytes=80 * 10**9)
        seconds.append(rollout_seconds(recipe, sizes, rollout, DEVICES["h100"]))
        rows.append(cached_rows(recipe, sizes, rollout))
    assert rows[0] < 64 < rows[1]  # 16 prompts with 4 completions each
    assert seconds[0] > 1.5 * seconds[1]


def test_prompts_of_the_local_engine_take_turns_above_the_tokens_of_a_batch(tmp_path):
    """262,144 tokens are 32 prompts with 4 completions, each of 1,000 + 1,000 tokens."""
    recipe = recipe_of(save_config("qwen2_5_vl", "7b", tmp_path), Vllm())
    recipe = recipe.with_values({"rollout.engine": "local"})
    sizes, seconds = study(recipe, None).sizes, []
    for prompts in (32, 64):
        planned = recipe.with_values({"optim.prompts_per_step": prompts})
        rollout = step_rollout(planned, ranks=1, prompt_tokens=1000, memory_bytes=80 * 10**9)
        seconds.append(rollout_seconds(planned, sizes, rollout, DEVICES["h100"]))
    assert seconds[1] == pytest.approx(2 * seconds[0])


@pytest.mark.scale
def test_72b_with_vllm_over_eight_gpus_beside_the_learner_fits_and_neither_waits_for_the_other(tmp_path, capsys):
    path = f"model.path={save_config('qwen2_5_vl', '72b', tmp_path)}"
    assert main(["plan", str(RECIPE), path, "--gpus", "8", "--gpu-memory", "80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"] == "fsdp2"
    (layout,) = [option for option in plan["options"] if option["memory"]["strategy"] == "fsdp2"]
    components = layout["memory"]["components"]
    # The engine sleeps while the learner works, and nothing of the learner is offloaded.
    assert (components["vLLM, awake"], components["vLLM, asleep"]) == (44 * 10**9, VLLM_WORKSPACE)
    assert layout["memory"]["host"].keys() == {"pictures of steps", "vLLM's weights, asleep"}
    assert layout["seconds"]["rollout"] == pytest.approx(layout["seconds"]["learn"], rel=0.1)
    assert components["weights"] > 147 * 10**9 / 8
    assert max(layout["memory"]["phases"].values()) <= 80 * 10**9


@pytest.mark.scale
def test_what_the_local_engine_cannot_gather_is_advised_to_sample_by_vllm(tmp_path, capsys):
    path = f"model.path={save_config('qwen2_5_vl', '72b', tmp_path)}"
    assert main(["plan", str(RECIPE), path, "rollout.engine=local", "rollout.vllm={}", "--gpus", "8"]) == 2
    advice = capsys.readouterr().err
    print(advice)
    assert "this fits: train.strategy: " in advice
    assert "rollout.engine: vllm, rollout.vllm.tensor_parallel: " in advice


@pytest.mark.parametrize(("gigabytes", "fits"), ((24, True), (16, False)))
def test_a_shared_policy_that_no_rank_can_gather_is_refused_before_it_is_read(tmp_path, gigabytes, fits):
    """7.6 billion weights in two bytes are 15.2 GB."""
    recipe = recipe_of(save_config("qwen2_5_vl", "7b", tmp_path), Vllm())
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": "local"})})
    machine = Machine(ranks=8, memory_bytes=gigabytes * 10**9, device=DEVICES["h100"])
    problem = gathering_problem(recipe, machine, "fsdp2")
    assert (problem is None) == fits
    if problem is not None:
        assert "train.strategy: fsdp2 with rollout.engine: local gathers the whole policy" in problem
        assert "sample by vLLM: rollout.engine: vllm, rollout.vllm.tensor_parallel: 2" in problem


def test_a_run_whose_policy_cannot_be_gathered_ends_before_weights_are_read(tmp_path, monkeypatch):
    directory = save_config("qwen2_5_vl", "7b", tmp_path)
    recipe = recipe_of(directory, Vllm())
    rollout = recipe.rollout.model_copy(update={"engine": "local"})
    train = recipe.train.model_copy(update={"strategy": "fsdp2"})
    monkeypatch.setattr(strategy_choice, "rank_memory_bytes", lambda device, ranks: 8 * 10**9)
    recipe = recipe.model_copy(update={"rollout": rollout, "train": train})
    with pytest.raises(EnvironmentProblem, match=r"rollout\.engine: vllm-server, on other machines"):
        build_trainer(recipe)  # the directory has no weights


def test_servers_take_no_memory_of_the_ranks_and_sampling_ahead_hides_behind_learning(tmp_path):
    recipe = recipe_of(save_config("qwen2_5_vl", "7b", tmp_path), Vllm())
    served = {"engine": "vllm-server", "urls": ("http://a:1", "http://b:1")}
    seconds = {}
    for lookahead in (0, 1):
        rollout = recipe.rollout.model_copy(update={**served, "lookahead": lookahead})
        subject = study(recipe.model_copy(update={"rollout": rollout}), None)
        planned = step_rollout(subject.recipe, ranks=4, prompt_tokens=1000, memory_bytes=80 * 10**9)
        assert (planned.prompts, planned.engine_prompts) == (4, 8)
        assert (planned.awake_bytes, planned.asleep_bytes, planned.engine_bytes) == (0, 0, 72 * 10**9)
        layout = Layout(strategy="ddp", ranks=4, tokens=16384, on_gpu=True)
        seconds[lookahead] = phase_seconds(subject.recipe, subject.sizes, planned, DEVICES["h100"], layout, 80_000)
    assert seconds[1]["rollout"] == max(0, seconds[0]["rollout"] - seconds[0]["learn"])


@pytest.mark.parametrize(
    ("dtype", "strategy", "on_gpu", "asked", "expected"),
    [
        ("float32", "single", False, 10**9, 10**9),
        ("float32", "ddp", False, 10**12, None),  # all the memory there is
        ("bfloat16", "single", False, 10**9, 0),
        ("float32", "single", True, 10**9, 0),
        ("float32", "fsdp2", False, 10**9, 0),
    ],
)
def test_copies_that_a_cpu_decodes_from_are_counted(tmp_path, dtype, strategy, on_gpu, asked, expected):
    recipe = recipe_of(save_config("qwen2_5_vl", "3b", tmp_path), Vllm())
    recipe = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"dtype": dtype}),
            "rollout": recipe.rollout.model_copy(update={"engine": "local", "prepacked_bytes": asked}),
        }
    )
    sizes = study(recipe, None).sizes
    nothing = LinearBytes(constant=0, per_layer=0, per_token=0, per_layer_token=0)
    with_copies, without = (
        rank_memory(
            recipe,
            sizes,
            Measured(learn=nothing, step=nothing),
            replace(step_rollout(recipe, ranks=2, prompt_tokens=100, memory_bytes=10**11), prepacked_bytes=copies),
            Layout(strategy=strategy, ranks=2, tokens=1000, on_gpu=on_gpu),
        )
        for copies in (asked, 0)
    )
    expected = 4 * sizes.language_weights if expected is None else expected
    assert with_copies.components.get("weights prepacked for decoding", 0) == expected
    for phase, size in with_copies.phases.items():
        assert size - without.phases[phase] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_fine_tuning_with_fsdp2_by_hand(tmp_path, dtype):
    """Each of 8 ranks has an eighth of the float32 weights, moments and gradients; what it gathers is as wide as the
    passes. The passes take 7 GB without gradients, the sum of the root's gradients 6 or 8 bytes for each."""
    recipe = recipe_of(save_config("qwen2_5_vl", "3b", tmp_path), Vllm()).model_copy(update={"lora": None})
    recipe = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"dtype": dtype}),
            "rollout": recipe.rollout.model_copy(update={"engine": "local"}),
        }
    )
    sizes = study(recipe, None).sizes
    width, trained = {"bfloat16": 2, "float32": 4}[dtype], sizes.language_weights
    without_tokens = {"per_layer": 0, "per_token": 0, "per_layer_token": 0}
    parts = rank_memory(
        recipe,
        sizes,
        Measured(
            learn=LinearBytes(constant=10**12, **without_tokens),
            step=LinearBytes(constant=0, **without_tokens),
            gathered=lambda: LinearBytes(constant=7 * 10**9, **without_tokens),
        ),
        step_rollout(recipe, ranks=8, prompt_tokens=100, memory_bytes=10**11),
        Layout(strategy="fsdp2", ranks=8, tokens=1000, on_gpu=True),
    ).parts
    eighth = -(-4 * trained // 8)
    assert parts["update"]["weights"] == eighth + 4 * sizes.vision_weights
    assert parts["update"]["gradients and the update"] == eighth
    assert parts["rollout"]["weights gathered for the rollout"] == width * trained
    assert parts["learn"]["weights gathered for a pass"] == width * (sizes.root_weights + 3 * sizes.largest_layer)
    assert parts["learn"]["forward, backward and gradients"] == eighth + max(
        7 * 10**9, (width + 4) * sizes.root_weights
    )
