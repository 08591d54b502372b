"""Rules on several keys: what they accept. What they refuse is in test_wrong_recipes.py."""

from pathlib import Path

import pytest

from tiercel.config import load_recipe
from tiercel.config.conflicts.rewards import unlearnt_rewards
from tiercel.errors import RecipeError
from tiercel.rewards.registry import BY_NAME, OPTIONS, takers


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=2"],
        ["train={epochs: 0.5}", "optim.warmup_steps=1000"],
        ["optim.warmup_steps=10"],
        ["optim.prompts_per_step=16", "optim.minibatches=16"],
        ["rollout.min_new_tokens=256", "rollout.max_new_tokens=256"],
        ["model.min_pixels=3136", "model.max_pixels=3136"],
        ["learner.max_tokens_per_microbatch=4352"],  # 4096 + 256
        ["rollout={tools: [zoom, mine.py:look], max_turns: 3, max_trajectory_tokens: 4096}"],
        ["rollout.environment=mine.py:Game", "rewards.0={name: environment, weight: 2}"],
        ["rollout={branches: [2, 2, 2], branch_at: </think>, engine: vllm}"],
        ["rollout={branches: [2, 4], tools: [zoom], max_turns: 2}"],
        ["rollout.environment={shop: shop.py:Shop, map: maps.town:Map}", "rewards.0={name: environment}"],
        ["rollout.engine=vllm", "rollout.vllm.options={max_num_seqs: 4, enforce-eager: true, kv_cache_dtype: auto}"],
        ["rollout.environment=openenv:http://127.0.0.1:8000/shop", "rewards.0={name: environment}"],
        ["optim={name: muon, momentum: 0.9}", "lora=null", "train.strategy=ddp"],
        ["rollout.top_p=0.9", "rollout.top_k=50"],
        ["optim.minibatches=2"],
        ["lora.dropout=0.1", "learner.form=repeated"],
        ["lora=null", "freeze=[vision, projector]"],
        ["lora=null", "model.dtype=float16"],
        ["lora.targets=vision"],
        ["lora.targets='.*(q_proj|v_proj)'", "freeze=[vision, projector, language]"],
        ["lora.targets='.*language_model.*[qkvo]_proj'"],
        ["lora.targets='.*language_model.layers.*'"],
        ["lora.targets='.*visual.*'"],
        ["lora.targets='.*vision_tower.*'"],
        ["lora.targets='(vision|projector)'"],
        ["lora.targets='languages?'"],
        ["model.vision_cache_bytes=1000"],
        ["train.eval_every=5", "data.eval=rows.jsonl"],
        ["rewards.0={call: mine.py:score, correct_at: 0.5}"],
        ["rewards.0={call: package.module:function}"],
        ["rewards.0={call: mine.py:score, env: [SERVICE_KEY]}", "reliability.reward_memory_gb=0.5"],
        ["rewards.0={name: length, max_tokens: 100}"],
        ["rewards.0={name: choice, choices: [yes, no], answer_column: label}"],
        ["rewards.0={name: number, tolerance: 0}", "rewards.1.weight=-0.5"],
        ["model.path=checkpoint"],
        ["model.path=./checkpoint/"],
        ["model.revision=abc"],
        ["data.image_root=empty", "output=new/directory"],
    ],
    ids=" ".join,
)
def test_good_grpo_recipes_stay_good(workplace: Path, overrides: list[str]):
    load_recipe("grpo", "grpo.yaml", overrides)


def test_sft_recipes_may_have_dropout(workplace: Path):
    recipe = load_recipe("sft", "sft.yaml", ["lora.dropout=0.1", "learner.form=auto"])
    assert recipe.lora is not None and recipe.lora.dropout == 0.1


def test_an_adapter_to_go_on_from(workplace: Path):
    (workplace / "empty" / "adapter_config.json").write_text("{}", encoding="utf-8")
    recipe = load_recipe("grpo", "grpo.yaml", ["lora.init=empty"])
    assert recipe.lora is not None and recipe.lora.init == "empty"
    with pytest.raises(RecipeError, match=r"lora\.start: .*lora\.init"):
        load_recipe("grpo", "grpo.yaml", ["lora.init=empty", "lora.start=loftq", "model.quantize=nf4"])


def test_a_key_that_several_rewards_take_is_of_one_type_in_all():
    for option in OPTIONS:
        fields = [BY_NAME[name].model_fields[option] for name in takers(option)]
        assert all((each.annotation, each.metadata) == (fields[0].annotation, fields[0].metadata) for each in fields)


@pytest.mark.parametrize(
    ("rewards", "unlearnt"),
    (
        ("[{name: exact}, {name: format, weight: 0.2}]", ["format"]),
        ("[{name: format}, {name: exact}]", ["format"]),
        ("[{name: exact}, {name: format, weight: 0}]", []),
        ("[{name: exact}, {name: iou}]", ["iou"]),
        ("[{name: exact, where: {column: kind, equals: [a]}}, {name: iou}, {name: number}]", ["number"]),
    ),
)
def test_rewards_that_pass_at_k_does_not_learn_from_are_named(workplace: Path, rewards, unlearnt):
    words = [f"rewards={rewards}", "algorithm={advantage: pass_k, pass_k: 2}"]
    told = unlearnt_rewards(load_recipe("grpo", "grpo.yaml", words))
    assert [line.partition("; reward ")[2].partition(" is ")[0] for line in told] == unlearnt
    assert unlearnt_rewards(load_recipe("grpo", "grpo.yaml", words[:1])) == []
