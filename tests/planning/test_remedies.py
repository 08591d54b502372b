"""What would have to change in a recipe that does not fit, and the tables that say so."""

import json
from pathlib import Path

import pytest

from benchmarks.published import save_config
from tiercel.cli.main import main
from tiercel.cli.plan import in_tenths, show
from tiercel.config import load_recipe
from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.rollout import Vllm
from tiercel.config.schema import SftRecipe
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.memory import HOST_OPTIMIZER_BYTES, Layout, Measured, rank_memory
from tiercel.planning.options import Subject, option, study
from tiercel.planning.plan import MemoryPlan
from tiercel.planning.probe import LinearBytes
from tiercel.planning.remedies import Remedy, changed, find_remedy

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen25vl-72b-grpo.yaml"


def per_token(byte_count: float) -> Measured:
    """A learner whose passes hold so much for each token, and whose update holds nothing."""
    nothing = LinearBytes(constant=0, per_layer=0, per_token=0, per_layer_token=0)
    return Measured(learn=LinearBytes(constant=0, per_layer=0, per_token=byte_count, per_layer_token=0), step=nothing)


AWAKE = ("rollout.vllm.gpu_memory_utilization=0.3", "rollout.vllm.sleep_level=0")
LEARNER_72B = per_token(1.94e6)  # 15.9 GB for the recipe's 8,192 tokens, as it is measured


def machine(ranks: int, gigabytes: int, host: int | None = None) -> Machine:
    return Machine(ranks=ranks, memory_bytes=gigabytes * 10**9, device=DEVICES["h100"], host_bytes=host)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Subject:
    """Qwen2.5-VL-72B under the shipped recipe, but with an engine that never sleeps and has little memory."""
    directory = save_config("qwen2_5_vl", "72b", tmp_path_factory.mktemp("72b"))
    recipe = load_recipe("grpo", RECIPE, [f"model.path={directory}", *AWAKE], check_paths=False)
    return study(recipe, None)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Subject:
    """SFT of Qwen2.5-VL-7B on conversations of 4,096 tokens, in microbatches of 16,384."""
    directory = save_config("qwen2_5_vl", "7b", tmp_path_factory.mktemp("7b"))
    tree = {
        "model": {"path": str(directory)},
        "lora": {"rank": 16},
        "data": {"train": "rows.jsonl"},
        "learner": {"gradient_checkpointing": True},
        "train": {"steps": 1},
        "output": "run",
    }
    return study(SftRecipe.model_validate(tree), None)


def remedy_of(subject: Subject, measured: Measured, where: Machine) -> Remedy:
    """The remedy, which must be one: with its changes the recipe fits by the memory model of the plan itself."""
    found = find_remedy(subject, measured, where)
    assert found is not None
    strategy = found.option.memory.strategy
    again = option(changed(subject, found.changes), measured, found.machine, strategy)
    assert again == found.option and again.fits
    return found


@pytest.mark.parametrize(("ranks", "gigabytes"), ((4, 80), (8, 40)))
def test_offloading_together_with_another_share_of_the_engine_makes_72b_fit(large, ranks, gigabytes):
    found = remedy_of(large, LEARNER_72B, machine(ranks, gigabytes))
    assert found.machine.ranks == ranks
    assert found.changes["train.strategy"] == "deepspeed"
    assert found.changes["train.deepspeed.offload_parameters"] is True
    assert found.changes["rollout.vllm.gpu_memory_utilization"] > 0.55
    for section in ("train", "rollout"):  # neither is enough alone
        rest = {key: value for key, value in found.changes.items() if not key.startswith(section)}
        for strategy in ("fsdp2", "deepspeed"):
            alone = option(changed(large, rest), LEARNER_72B, found.machine, strategy)
            assert not alone.fits and alone.largest_tokens == 0


def test_a_machine_without_room_for_what_is_offloaded_is_told_otherwise(large):
    free = remedy_of(large, LEARNER_72B, machine(4, 80))
    needed, pictures = 4 * free.option.memory.host_bytes, 4 * free.option.memory.host["pictures of steps"]
    weights = 2 * large.sizes.language_weights + 2 * large.sizes.weights
    assert needed - pictures == pytest.approx(weights, rel=1e-6)
    bound = remedy_of(large, LEARNER_72B, machine(4, 80, needed - 1))
    assert 4 * bound.option.memory.host_bytes < needed
    assert sum(bound.option.seconds.values()) > sum(free.option.seconds.values())


def test_the_least_change_is_taken(small):
    # 15.2 GB of weights, and 9.8 GB for the passes of 16,384 tokens: on 24 GB, a smaller microbatch is enough.
    found = remedy_of(small, per_token(600_000), machine(1, 24))
    assert found.changes.keys() == {"learner.max_tokens_per_microbatch"}
    # On 16 GB the weights must be elsewhere, and then 4.9 GB for all tokens fit.
    found = remedy_of(small, per_token(300_000), machine(1, 16))
    assert found.changes == {"train.strategy": "deepspeed", "train.deepspeed.offload_parameters": True}


def test_more_ranks_are_the_last_resort(large):
    found = remedy_of(large, LEARNER_72B, machine(2, 80))
    assert found.machine.ranks == 4 and found.words(2).startswith("4 GPUs, train.strategy: deepspeed")
    assert find_remedy(large, LEARNER_72B, machine(8, 16)) is None


def test_a_remedy_keeps_the_recipes_own_rules(large):
    # Reward penalties read the whole step. vLLM in process would break the rule on sampling ahead, which servers keep.
    served = {"rollout.engine": "vllm-server", "rollout.urls": ("http://a:1",), "rollout.vllm": Vllm()}
    found = remedy_of(changed(large, served), LEARNER_72B, machine(8, 40))
    assert not any(key.startswith("rollout") for key in found.changes)
    # The weights of full fine-tuning can reach vLLM, but not from ranks of DeepSpeed, and not an engine that drops its
    # own.
    whole = {"lora": None, "rollout.engine": "local", "rollout.vllm": Vllm()}
    subject = changed(large, whole)
    found = remedy_of(subject, per_token(0), machine(8, 400))
    assert not rule_problems(changed(subject, found.changes).recipe)
    if found.changes.get("rollout.engine") == "vllm":
        assert (
            found.changes.get("train.strategy") != "deepspeed" and found.changes.get("rollout.vllm.sleep_level", 0) < 2
        )


def test_offloaded_bytes_lie_in_the_hosts_memory(small):
    zero = {"train.deepspeed.offload_parameters": True, "train.deepspeed.offload_optimizer": True}
    recipe, sizes = changed(small, zero).recipe, small.sizes
    layout = Layout(strategy="deepspeed", ranks=4, tokens=100, on_gpu=True)
    memory = rank_memory(recipe, sizes, per_token(0), None, layout)
    assert memory.host == {
        "weights, offloaded": -(-2 * sizes.language_weights // 4),
        "optimizer, offloaded": -(-HOST_OPTIMIZER_BYTES * sizes.trained // 4),
    }
    assert memory.parts["learn"]["weights"] == 2 * sizes.vision_weights
    assert memory.parts["learn"]["optimizer moments"] == 0


def test_rounded_parts_add_up_to_the_rounded_sum():
    parts = {"a": 149_000_000, "b": 149_000_000, "c": 149_000_000, "fragmentation": 20_000_000}
    assert in_tenths(parts) == {"a": 1, "b": 1, "c": 1, "fragmentation": 2}  # 0.467 GB


def rows_of(said: str, title: str) -> list[list[str]]:
    """A printed table's rows below its title."""
    lines = said[said.index(title) :].splitlines()
    table = lines[: next(number for number, line in enumerate(lines) if line.startswith("└"))]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table if line.startswith("│")]


@pytest.mark.parametrize("where", (machine(8, 80), machine(4, 80), Machine(ranks=1, memory_bytes=10**11, device=None)))
def test_the_columns_of_a_plan_add_up_as_they_are_shown(large, capsys, where):
    options = tuple(option(large, LEARNER_72B, where, name) for name in ("fsdp2", "deepspeed"))
    chosen = next((each.memory.strategy for each in options if each.fits), None)
    show(
        MemoryPlan(
            machine=where,
            sizes=large.sizes,
            tokens=8192,
            prompt_tokens=1536,
            idle_ranks=0,
            options=options,
            chosen=chosen,
            reason="",
            change=None,
            remedy=None,
        ),
        "recipe",
    )
    said = capsys.readouterr().out
    most = {row[0]: row[1:] for row in rows_of(said, "GB on each rank ")}
    *parts, total = rows_of(said, "GB on each rank, ")
    number = 0 if f"GB on each rank, {options[0].memory.strategy}" in said else 1
    phases = list(options[number].memory.phases)
    assert total == ["all", *(most[f"most during {phase}"][number] for phase in phases)] and len(parts) > 6
    assert (parts[-1][0] == "fragmentation") == where.is_gpu
    for column in range(1, len(total)):
        assert sum(round(float(row[column]) * 10) for row in parts) == round(float(total[column]) * 10)


def test_idle_ranks_and_an_assumed_unit_are_told(tiny_checkpoints, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tiny_checkpoints['qwen2_5_vl']}}}\nlora: {{rank: 4}}\ntrain: {{steps: 1}}\noutput: run\n"
        "data: {train: rows.jsonl, max_prompt_tokens: 100}\noptim: {prompts_per_step: 5}\n"
        "learner: {max_tokens_per_microbatch: 200}\n"
    )
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpus", "8", "--gpu-memory", "80"]) == 0
    said = capsys.readouterr().out
    assert "--gpu-memory: no unit given, so 80 GB" in said
    assert "idle: 3 of 8 ranks, because a step has 5 rows to learn from" in said


@pytest.mark.scale
@pytest.mark.parametrize(("gpus", "memory"), (("4", "80GB"), ("8", "40GB")))
def test_the_keys_that_a_plan_prints_make_its_next_plan_fit(tmp_path, capsys, gpus, memory):
    words = ["plan", str(RECIPE), f"model.path={save_config('qwen2_5_vl', '72b', tmp_path)}", "--gpus", gpus]
    words += ["--gpu-memory", memory, "--json", *AWAKE]
    assert main(words) == 2
    plan = json.loads(capsys.readouterr().out)
    overrides = [f"{key}={json.dumps(value)}" for key, value in plan["remedy"]["changes"].items()]
    assert main([*words, *overrides]) == 0
