"""A museum of wrong recipes: each message must name the key at fault and say what to write instead."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.config.recipes import GOOD
from tiercel.config import BaseRecipe, GrpoRecipe, Kind, load_recipe
from tiercel.config.keys import RECIPES
from tiercel.config.loading import require_sound
from tiercel.config.schema import Data, Model
from tiercel.errors import RecipeError

ROOT = Path(__file__).parents[2]
EXIT_USER = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrong:
    """A recipe spoilt by overrides, or a text of its own, and what its line must hold."""

    overrides: tuple[str, ...] = ()
    text: str | None = None
    kind: Kind = "grpo"
    key: str  # the beginning of the line
    says: str  # what to write instead, or the reason


def grpo(override: str, key: str, says: str) -> Wrong:
    return Wrong(overrides=tuple(override.split(" & ")), key=key, says=says)


def sft(override: str, key: str, says: str) -> Wrong:
    return Wrong(overrides=tuple(override.split(" & ")), kind="sft", key=key, says=says)


def of(kind: Kind, override: str, key: str, says: str) -> Wrong:
    return Wrong(overrides=tuple(override.split(" & ")), kind=kind, key=key, says=says)


def text(content: str, key: str, says: str) -> Wrong:
    return Wrong(text=content, key=key, says=says)


SERVED = "teacher.url=http://127.0.0.1:8000 & teacher.top_k=8"
WRONG = [
    # quantised weights
    grpo("model.quantize=int4", "model.quantize", "nf4"),
    grpo("model.quantise=nf4", "model.quantise", "model.quantize"),
    grpo("load_in_4bit=true", "load_in_4bit", "model.quantize"),
    sft("model.quantize=nf4 & lora=null", "model.quantize", "add the section lora"),
    grpo("model.quantize=nf4 & train.strategy=fsdp2", "model.quantize", "train.strategy: ddp"),
    of("dpo", "model.quantize=int8 & train.strategy=deepspeed", "model.quantize", "train.strategy: ddp"),
    grpo("model.quantize=nf4 & learner.compile=true", "learner.compile", "model.quantize: null"),
    grpo("model.quantize=nf4 & rollout.engine=vllm", "algorithm.correction.level", "rollout.engine: local"),
    grpo("a." * 50 + "b=1", "override", "51 names joined by dots"),
    grpo("data.ids=number", "data.ids", "must be one of own, line"),
    sft("data.columns=question", "data.columns", "texts by name"),
    grpo("data.columns={question: 5}", "data.columns", "text"),
    sft("data.column_mapping=names", "data.column_mapping", "data.columns"),
    grpo("data.image_key=picture", "data.image_key", "data.columns"),
    # the space of the boxes in rows
    grpo("data.boxes=norm1000", "data.boxes", "thousandths"),
    sft("data.bbox_type=norm1", "data.bbox_type", "data.boxes"),
    grpo("data.mix=[{path: rows.jsonl, boxes: relative}]", "data.mix.0.boxes", "must be one of pixels"),
    # kinds of adapters and their start
    grpo("lora.kind=vera", "lora.kind", "must be one of lora, rslora, dora"),
    sft("lora.use_dora=true", "lora.use_dora", "lora.kind"),
    sft("lora.use_rslora=true", "lora.use_rslora", "lora.kind"),
    grpo("lora.kind=dora & rollout.engine=vllm", "lora.kind", "rslora, or set rollout.engine: local"),
    of("dpo", "lora.kind=dora & train.strategy=fsdp2", "lora.kind", "train.strategy: ddp"),
    sft("lora.kind=dora & learner.compile=true", "learner.compile", "lora.kind: lora or rslora"),
    sft("lora.start=pissa", "lora.start", "must be loftq"),
    sft("lora.start=loftq", "lora.start", "set model.quantize: nf4"),
    sft("lora.start=loftq & model.quantize=nf4 & lora.kind=dora", "lora.start", "set lora.kind: lora or rslora"),
    grpo("optim.name=sgd", "optim.name", "must be one of adamw, adamw_8bit"),
    grpo("optim.name=adamw_8bit & train.strategy=deepspeed", "optim.name", "adamw, or set train.strategy: ddp"),
    sft("optim.name=paged_adamw & train.strategy=fsdp2 & lora=null", "optim.name", "adamw"),
    sft("optim.optimizer=adamw_8bit", "optim.optimizer", "optim.name"),
    grpo("train.shard_size=8", "train.shard_size", "train.strategy: fsdp2"),
    grpo("train.shard_size=8 & train.strategy=ddp", "train.shard_size", "train.strategy: fsdp2"),
    grpo("train.shard_size=0 & train.strategy=fsdp2", "train.shard_size", "above 0"),
    grpo("train.context_parallel=0", "train.context_parallel", "above 0"),
    sft("train.context_parallel=2 & train.strategy=single", "train.context_parallel", "train.strategy: auto"),
    grpo("train.context_parallel=2 & learner.form=split", "train.context_parallel", "learner.form: auto"),
    of("dpo", "train.context_parallel=2 & learner.form=repeated", "train.context_parallel", "learner.form: auto"),
    sft("train.sequence_parallel_size=2", "train.sequence_parallel_size", "train.context_parallel"),
    # unknown keys: spelling, another section
    grpo("optim.learnign_rate=1e-5", "optim.learnign_rate", "optim.lr"),
    grpo("rollout.group_sise=4", "rollout.group_sise", "rollout.group_size"),
    grpo("lr=1e-5", "lr", "optim.lr"),
    grpo("algorithm.group_size=8", "algorithm.group_size", "rollout.group_size"),
    grpo("max_pixels=3136", "max_pixels", "model.max_pixels"),
    grpo("temperature=0.9", "temperature", "rollout.temperature"),
    grpo("seed=3", "seed", "train.seed"),
    grpo("reward=[{name: iou}]", "reward", "rewards"),
    grpo("rewards.1.wieght=2", "rewards.1.wieght", "rewards.1.weight"),
    grpo("optimizer.lr=1e-5", "optimizer.lr", "optim.lr"),
    grpo("train.gradient_checkpointing=true", "train.gradient_checkpointing", "learner.gradient_checkpointing"),
    grpo("zzz=1", "zzz", "the sections are model, lora, freeze"),
    grpo("lora.zzz=1", "lora.zzz", "the keys of lora are rank, alpha, dropout, targets, init"),
    # unknown keys: other frameworks
    grpo("learning_rate=1e-5", "learning_rate", "optim.lr"),
    grpo("num_generations=8", "num_generations", "rollout.group_size"),
    grpo("beta=0.04", "beta", "algorithm.kl.coef"),
    grpo("per_device_train_batch_size=1", "per_device_train_batch_size", "optim.prompts_per_step (it is global"),
    grpo("gradient_accumulation_steps=8", "gradient_accumulation_steps", "optim.prompts_per_step (it is global"),
    grpo("max_completion_length=512", "max_completion_length", "rollout.max_new_tokens"),
    grpo("max_prompt_length=512", "max_prompt_length", "data.max_prompt_tokens"),
    grpo("lora.r=8", "lora.r", "lora.rank"),
    grpo("lora_alpha=16", "lora_alpha", "lora.alpha"),
    grpo("lora.target_modules=all-linear", "lora.target_modules", "lora.targets"),
    grpo("reward_funcs=[format]", "reward_funcs", "rewards (a list"),
    grpo("epsilon_high=0.28", "epsilon_high", "algorithm.clip_high"),
    grpo("use_vllm=true", "use_vllm", "rollout.engine (local, vllm or vllm-server"),
    grpo("deepspeed=zero3.json", "deepspeed", "train.deepspeed"),
    grpo("train.deepspeed.stage=2", "train.deepspeed", "train.strategy: deepspeed"),
    grpo("train.strategy=zero3", "train.strategy", "deepspeed"),
    grpo("learner.use_reentrant=true", "learner.use_reentrant", "checkpointing is always non-reentrant"),
    grpo("freeze_vit=true", "freeze_vit", "freeze (list the part: freeze: [vision])"),
    grpo("learner.gradient_checkpointing=some", "learner.gradient_checkpointing", "one of false, selective, full"),
    grpo("attn_impl=flash_attn", "attn_impl", "learner.form"),
    grpo("data.train_files=a.parquet", "data.train_files", "data.train"),
    grpo("actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.n", "rollout.group_size"),
    grpo("output_dir=runs/x", "output_dir", "output"),
    grpo("report_to=wandb", "report_to", "trackers (a list, such as [tensorboard])"),
    sft("logging.tracker=wandb", "logging.tracker", "trackers (a list"),
    sft("use_wandb=true", "use_wandb", "trackers: [wandb]"),
    grpo("wandb_project=mine", "wandb_project", "export WANDB_PROJECT"),
    # trackers
    grpo("trackers=[wnadb]", "trackers.0", "wandb"),
    sft("trackers=[tensorboard, tb]", "trackers.1", "tensorboard"),
    sft("trackers=[comet]", "trackers.0", "comet is not in this version"),
    grpo("trackers=wandb", "trackers", "must be a list; use [wandb]"),
    sft(
        "trackers=[wandb, tensorboard, wandb]",
        "trackers.2",
        "is wandb, which is already in the list; remove one of the two",
    ),
    sft("num_train_epochs=1", "num_train_epochs", "train.epochs"),
    sft("torch_dtype=bfloat16", "torch_dtype", "model.dtype"),
    sft("num_generations=8", "num_generations", "remove it, or use `tiercel grpo`"),
    # values
    grpo("model.dtype=bf16", "model.dtype", "bfloat16"),
    grpo("model.dtype=fp16", "model.dtype", "float16"),
    grpo("optim.schedule=cos", "optim.schedule", "cosine"),
    grpo("optim.schedule=cosin", "optim.schedule", "cosine"),
    grpo("rollout.engine=vllm & rollout.vllm.options={dtype: half}", "rollout.vllm.options", "model.dtype"),
    grpo("rollout.engine=vllm & rollout.vllm.options={hf-overrides: {}}", "rollout.vllm.options", "remove it"),
    grpo("rollout.engine=vllm & rollout.vllm.options={logprobs_mode: raw}", "rollout.vllm.options", "remove it"),
    grpo(
        "rollout.engine=vllm & rollout.vllm.options={kv_cache_dtype: fp8}",
        "rollout.vllm.options",
        "other than the trained one",
    ),
    grpo("rollout.engine=vllm & rollout.vllm.options={spec-method: ngram}", "rollout.vllm.options", "remove it"),
    grpo("rollout.engine=vllm & rollout.vllm.options={hf_token: x}", "rollout.vllm.options", "variable HF_TOKEN"),
    grpo(
        "rollout.engine=vllm & rollout.vllm.options={watermark-config: {}}",
        "rollout.vllm.options",
        "other than the trained one",
    ),
    grpo("rollout.vllm.options={max_num_seqs: 4}", "rollout.vllm", "rollout.engine: vllm"),
    grpo("optim.min_lr=1e-6", "optim.min_lr", "optim.schedule"),
    grpo("optim.min_lr=1 & optim.schedule=cosine", "optim.min_lr", "below optim.lr"),
    grpo(
        "optim.decay_steps=3 & optim.schedule=cosine",
        "optim.decay_steps",
        "only optim.schedule: wsd has a decay of its own",
    ),
    grpo("rewards.0.name=accuracy", "rewards.0.name", "math"),
    grpo("rewards.0.name=fromat", "rewards.0.name", "format"),
    grpo("rollout.engine=sglang", "rollout.engine", "sglang is not in this version"),
    grpo("rollout.engine=vllm-server", "rollout.urls", "list the servers' addresses, such as [http://127.0.0.1:8000]"),
    grpo("rollout.urls=[http://a:1]", "rollout.urls", "rollout.engine: vllm-server"),
    grpo(
        "rollout.engine=vllm-server & rollout.urls=[127.0.0.1:8000]",
        "rollout.urls.0",
        "an address such as http://127.0.0.1:8000",
    ),
    grpo(
        "rollout.engine=vllm-server & rollout.urls=[http://a:b]",
        "rollout.urls.0",
        "an address such as http://127.0.0.1:8000",
    ),
    grpo("rollout.engine=vllm-server & rollout.urls=[http://me:pw@a:1]", "rollout.urls.0", "put the key into"),
    grpo("rollout.lookahead=1", "rollout.lookahead", "0, or set rollout.engine: vllm-server"),
    grpo("rollout.max_staleness=0", "rollout.max_staleness", "above 0"),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 2} & algorithm.correction.level=token",
        "rollout.lookahead",
        "rollout.max_staleness: 2, or use a lower value",
    ),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 2, max_staleness: 2} & lora=null & "
        "algorithm.correction.level=token",
        "rollout.lookahead",
        "1, or add the section lora, so that versions are kept side by side",
    ),
    grpo("optim.name=muon", "optim.name", "adamw, or remove lora"),
    grpo("optim.name=muon & lora=null & train.strategy=fsdp2", "optim.name", "the update of the whole matrix"),
    grpo("optim.name=muon & lora=null & train.strategy=deepspeed", "optim.name", "train.strategy: ddp"),
    grpo("optim.momentum=0.9", "optim.momentum", "optim.betas, or set optim.name: muon"),
    grpo("rollout={branches: [8], branch_at: x}", "rollout.branches", "has no fork"),
    grpo("rollout={branches: [2, 3], branch_at: x}", "rollout.branches", "rollout.group_size: 6"),
    grpo("rollout={branches: [2, 0], branch_at: x}", "rollout.branches.1", "above 0"),
    grpo("rollout.branches=[2, 4]", "rollout.branch_at", "is not set, but rollout.branches is [2, 4]"),
    grpo("rollout={branches: [2, 4], branch_at: ''}", "rollout.branch_at", "the string that ends"),
    grpo("rollout={branches: [2, 4], branch_at: x, stop: [x]}", "rollout.branch_at", "remove it from rollout.stop"),
    grpo("rollout.branch_at=x", "rollout.branch_at", "set it, for example to [2, 4]"),
    grpo("rollout={branches: [2, 4], branch_at: x, tools: [zoom]}", "rollout.branch_at", "fork after a turn"),
    grpo("rollout={branches: [2, 4], tools: [zoom], max_turns: 1}", "rollout.branches", "rollout.max_turns: 2"),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 1, branches: [2, 4], branch_at: x} & "
        "algorithm.correction.level=token",
        "rollout.branches",
        "rollout.lookahead: 0",
    ),
    grpo(
        "rollout.tools=[look]",
        "rollout.tools.0",
        "name a tool of your own as file.py:function or package.module:function",
    ),
    grpo("rollout.environment=Game", "rollout.environment", "a class of yours as file.py"),
    grpo("rollout.environment={}", "rollout.environment", "does not name a class"),
    grpo("rollout.environment={shop: Shop}", "rollout.environment.shop", "a class of yours as file.py"),
    grpo("rollout.environment={shop: 3}", "rollout.environment.shop", "must be text"),
    grpo("rollout.environment=[shop.py:Shop]", "rollout.environment", "must be a text or texts by name"),
    grpo("rewards.0={name: environment}", "rewards.0.name", "get_reward"),
    grpo("rollout.max_turns=3", "rollout.max_turns", "remove this key, or set one of them"),
    grpo(
        "rollout={tools: [zoom], max_new_tokens: 200, max_trajectory_tokens: 100}",
        "rollout.max_new_tokens",
        "a turn is a part of a completion",
    ),
    grpo(
        "rollout.tools=[zoom] & rollout.max_trajectory_tokens=13000",
        "learner.max_tokens_per_microbatch",
        "rollout.max_trajectory_tokens (13000) = 17096",
    ),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 1, tools: [zoom]} & "
        "algorithm.correction.level=token",
        "rollout.lookahead",
        "use 0",
    ),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 1}",
        "algorithm.correction.level",
        "token or sequence",
    ),
    grpo(
        "algorithm.correction.level=token & rollout.top_p=0.9",
        "rollout.top_p",
        "remove this key, or set algorithm.correction.level: none",
    ),
    grpo(
        "rollout={engine: vllm, vllm: {sleep_level: 2}} & lora=null",
        "rollout.vllm.sleep_level",
        "1, or add the section lora",
    ),
    grpo("rollout.vllm.sleep_level=1", "rollout.vllm", "rollout.engine: vllm or vllm-server"),
    grpo(
        "algorithm.scale=batch & algorithm.advantage=gdpo",
        "algorithm.scale",
        "algorithm.advantage gdpo has a scale of its own",
    ),
    grpo("algorithm.advantage=pass_k", "algorithm.pass_k", "the number of tries of which one must be right, such as 4"),
    grpo("algorithm.advantage=pass_k & algorithm.pass_k=8", "algorithm.pass_k", "must be below rollout.group_size (8)"),
    grpo("algorithm.pass_k=2", "algorithm.pass_k", "algorithm.advantage: pass_k"),
    grpo(
        "algorithm={advantage: pass_k, pass_k: 2} & rewards=[{name: format}]",
        "algorithm.advantage",
        "correct_at for one of them, or add one of exact, normalised",
    ),
    grpo("algorithm.delta=1.1", "algorithm.delta", "a larger value, such as 4"),
    grpo("algorithm={loss: sapo, clip_high: 0.3}", "algorithm.clip_high", "algorithm.loss sapo does not use it"),
    grpo("algorithm={loss: cispo, delta: 4}", "algorithm.delta", "algorithm.loss cispo does not use it"),
    grpo("algorithm.gate_negative=1.2", "algorithm.gate_negative", "algorithm.loss grpo does not use it"),
    grpo("algorithm={loss: gspo, top_entropy: 0.2}", "algorithm.top_entropy", "algorithm.loss: gspo_token"),
    grpo(
        "algorithm={loss: gspo, correction: {level: token}}",
        "algorithm.correction.level",
        "sequence, or set algorithm.loss: gspo_token",
    ),
    grpo("algorithm.ratio=sequences", "algorithm.ratio", "sequence"),
    grpo("algorithm.surrogate=clip", "algorithm.surrogate", "clipped"),
    grpo(
        "algorithm={ratio: sequence, top_entropy: 0.2}",
        "algorithm.top_entropy",
        "algorithm.ratio: sequence_at_token",
    ),
    grpo(
        "algorithm={ratio: sequence, correction: {level: token}}",
        "algorithm.correction.level",
        "sequence, or set algorithm.ratio: sequence_at_token",
    ),
    grpo(
        "algorithm={loss: cispo, ratio: sequence_at_token}",
        "algorithm.ratio",
        "algorithm.ratio: sequence",
    ),
    grpo(
        "algorithm={loss: gspo_token, surrogate: weighted}",
        "algorithm.surrogate",
        "algorithm.ratio: sequence",
    ),
    grpo(
        "algorithm={surrogate: gated, clip_low: 0.1}", "algorithm.clip_low", "algorithm.surrogate gated does not use it"
    ),
    grpo(
        "algorithm={loss: {call: mine.py:score}, ratio: token}", "algorithm.ratio", "a loss of your own does not use it"
    ),
    grpo("algorithm={loss: {call: mine.py:score}, delta: 4}", "algorithm.delta", "a loss of your own does not use it"),
    grpo("algorithm.loss={call: none.py:loss}", "algorithm.loss.call", "no such file"),
    grpo("algorithm.loss={call: mine}", "algorithm.loss.call", "must be file.py:function or package.module:function"),
    grpo("algorithm.loss={}", "algorithm.loss.call", "is required; give file.py:function or package.module:function"),
    grpo("algorithm.advantage={call: none.py:mine}", "algorithm.advantage.call", "no such file"),
    grpo("algorithm.advantage={call: 3}", "algorithm.advantage.call", "must be text"),
    grpo(
        "algorithm.advantage={call: mine.py:score} & rollout.group_size=1",
        "rollout.group_size",
        "2 or more, or set algorithm.advantage.least_group: 1",
    ),
    grpo(
        "algorithm.kl={coef: 0.1, estimator: k1}",
        "algorithm.kl.estimator",
        "k2 or k3, or set algorithm.kl.place: reward",
    ),
    grpo("algorithm.kl.place=reward", "algorithm.kl.place", "a coefficient, such as 0.04"),
    grpo("algorithm.kl.by_ratio=true", "algorithm.kl.by_ratio", "a coefficient, such as 0.04"),
    grpo("algorithm.kl={coef: 0.1, by_ratio: true, estimator: k2}", "algorithm.kl.by_ratio", "k3 and loss"),
    grpo("algorithm.kl={coef: 0.1, by_ratio: true, place: reward}", "algorithm.kl.by_ratio", "k3 and loss"),
    grpo("algorithm.entropy_mean=token", "algorithm.entropy_mean", "a coefficient, such as 0.001"),
    grpo("algorithm.top_entropy_of=all", "algorithm.top_entropy_of", "a fraction, such as 0.2"),
    grpo("algorithm.correction.floor=0.5", "algorithm.correction.floor", "token or sequence"),
    grpo("algorithm.correction.mode=mask", "algorithm.correction.mode", "token or sequence"),
    grpo("algorithm.correction.cap=3", "algorithm.correction.cap", "token or sequence"),
    grpo("algorithm.kl.estimator=k2", "algorithm.kl.estimator", "a coefficient, such as 0.04"),
    grpo("algorithm.kl.sync_mix=0.5", "algorithm.kl.sync_mix", "a coefficient, such as 0.04"),
    grpo("algorithm.correction={level: token, floor: 1}", "algorithm.correction.floor", "below 1"),
    grpo("algorithm.gamma_power_positive=1", "algorithm.gamma_power_positive", "algorithm.loss grpo does not use it"),
    grpo("algorithm={loss: vespo, clip_high: 0.3}", "algorithm.clip_high", "algorithm.loss vespo does not use it"),
    grpo("algorithm={loss: luspo, top_entropy: 0.2}", "algorithm.top_entropy", "algorithm.ratio: sequence_at_token"),
    grpo("algorithm={ratio: product, top_entropy: 0.2}", "algorithm.top_entropy", "algorithm.ratio: product_at_token"),
    grpo("algorithm={loss: vespo, ratio: product_at_token}", "algorithm.ratio", "algorithm.ratio: product"),
    grpo("algorithm.kl.sync_every=9", "algorithm.kl.sync_every", "a coefficient, such as 0.04"),
    grpo("algorithm.kl={coef: 0.1, sync_mix: 0.5}", "algorithm.kl.sync_mix", "the reference would never move"),
    grpo("algorithm={advantage: gdpo, kl: {coef: 0.1, place: reward}}", "algorithm.kl.place", "use loss"),
    grpo(
        "algorithm.kl={coef: 0.1, sync_every: 9} & train.strategy=deepspeed",
        "algorithm.kl.sync_every",
        "train.strategy: fsdp2",
    ),
    grpo("optim.rollout_epochs=2 & rollout.top_p=0.9", "rollout.top_p", "or optim.rollout_epochs: 1"),
    grpo("algorithm.off_policy_delta=1 & rollout.top_k=50", "rollout.top_k", "algorithm.off_policy_delta: null"),
    grpo(
        "rollout={engine: vllm-server, urls: [http://a:1], lookahead: 1, resample_tries: 2} & "
        "algorithm.correction.level=token",
        "rollout.resample_tries",
        "one of the two to 0",
    ),
    grpo(
        "rollout={group_size: 1, resample_tries: 2} & algorithm.advantage=reinforce_pp",
        "rollout.resample_tries",
        "never differ",
    ),
    grpo(
        "rollout.group_size=1 & algorithm.advantage=reinforce_pp & optim.prompts_per_step=1",
        "optim.prompts_per_step",
        "use 2 or more",
    ),
    grpo(
        "rewards=[{name: cosine, max_tokens: 9}]",
        "rewards.0.name",
        "put one before it, such as exact, or set correct_at for one",
    ),
    grpo("rewards=[{name: soft_overlong, max_tokens: 9}]", "rewards.0.buffer", "the reward soft_overlong needs"),
    grpo(
        "rewards=[{name: soft_overlong, max_tokens: 9, buffer: 10}]",
        "rewards.0.buffer",
        "must be at most max_tokens (9), because otherwise even an empty completion would be penalised",
    ),
    grpo("rewards=[{name: judge}]", "rewards.0.judge", "needs the section that names the server to ask"),
    grpo(
        "rewards=[{name: judge, judge: {url: there, model: m}}]",
        "rewards.0.judge.url",
        "an address such as http://127.0.0.1:8000/v1",
    ),
    grpo(
        "rewards=[{name: judge, judge: {url: http://a, model: m, key: sk-1234}}]",
        "rewards.0.judge.key",
        "must be the name of an environment variable",
    ),
    grpo("rewards=[{name: model}]", "rewards.0.model", "needs the section that says which reward model"),
    grpo("rewards=[{name: model, model: {path: a/b, dtype: bf16}}]", "rewards.0.model.dtype", "bfloat16"),
    grpo(
        "rewards=[{name: model, model: {dtype: float32}}]",
        "rewards.0.model.path",
        "give a local directory with a config.json, or a model id on the hub",
    ),
    grpo("rewards.0.model={path: checkpoint}", "rewards.0.model", "is not a key of the reward exact"),
    grpo("rewards=[{name: model, model: {path: ./none}}]", "rewards.0.model.path", "no such directory"),
    grpo("rewards=[{name: model, model: {path: empty}}]", "rewards.0.model.path", "no config.json"),
    grpo(
        "rewards=[{name: model, model: {path: checkpoint, revision: main}}]",
        "rewards.0.model.revision",
        "remove one of them",
    ),
    grpo(
        "rewards=[{name: model, model: {path: a/b, template: none.jinja}}]", "rewards.0.model.template", "no such file"
    ),
    grpo(
        "rewards=[{name: model, model: {path: a/b, batch_tokens: 4095}}]",
        "rewards.0.model.batch_tokens",
        "must hold the longest conversation: model.max_tokens is 4096",
    ),
    grpo("rewards=[{name: model, model: {path: a/b, label: -1}}]", "rewards.0.model.label", "at least 0"),
    grpo("rewards=[{name: model, model: {path: a/b, device: cuda:1}}]", "rewards.0.model.device", "auto"),
    grpo(
        "rewards=[{name: model, model: {path: a/b, max_token: 9}}]",
        "rewards.0.model.max_token",
        "rewards.0.model.max_tokens",
    ),
    grpo("rewards=[{name: reward_model, model: {path: a/b}}]", "rewards.0.name", "model"),
    grpo("reward_model=a/b", "reward_model", "rewards.0.model.path"),
    grpo("rewards=[{name: json, json_schema: none.json}]", "rewards.0.json_schema", "no such file"),
    grpo(
        "rewards=[{name: exact, where: {column: task}}]",
        "rewards.0.where.equals",
        'give the values of such rows, as text: 7 is "7", true is "true"',
    ),
    grpo("dynamic_sample=true", "dynamic_sample", "rollout.resample_tries"),
    grpo("overlong_filter=true", "overlong_filter", "algorithm.overlong"),
    grpo("num_iterations=2", "num_iterations", "optim.rollout_epochs"),
    grpo("scale_rewards=group", "scale_rewards", "algorithm.scale"),
    grpo("algorithm.loss=gmpo", "algorithm.loss", "gmpo is not in this version"),
    grpo("train.strategy=megatron", "train.strategy", "megatron is not in this version"),
    grpo("freeze=[vit]", "freeze.0", "vision"),
    grpo("freeze=vision", "freeze", "[vision]"),
    grpo("rewards=[iou]", "rewards.0", "{name: iou}"),
    grpo('optim.lr="1e-5"', "optim.lr", "1e-5 without quotes"),
    grpo("optim.lr=-1e-5", "optim.lr", "must be a number, above 0"),
    grpo("optim.lr=.nan", "optim.lr", "must be a finite number, above 0"),
    grpo("optim.lr=true", "optim.lr", "must be a number"),
    grpo("train.steps=1.5", "train.steps", "must be a whole number"),
    grpo("train.steps=1e3", "train.steps", "1000"),
    grpo("data.shuffle=yes", "data.shuffle", "true"),
    grpo("data.system=7", "data.system", 'put it in quotes: "7"'),
    grpo("rollout.top_p=1.5", "rollout.top_p", "at most 1"),
    grpo("optim.betas=[0.9]", "optim.betas.1", "such as [0.9, 0.999]"),
    grpo("lora.targets=[q_proj, v_proj]", "lora.targets", ".*(q_proj|v_proj)"),
    grpo(
        "train=null",
        "train",
        "must be a section; leave it out",
    ),
    grpo("optim=adamw", "optim", "must be a section with the keys name, lr"),
    grpo("rollout.group_size=null", "rollout.group_size", "remove the key to get 8"),
    # keys that do not fit together
    grpo("rollout.group_size=1", "rollout.group_size", "advantage of a single completion is undefined"),
    grpo("train.steps=10 & train.epochs=2", "train.steps", "remove one of them"),
    grpo("train={}", "train.steps", "set one of them"),
    grpo("optim.prompts_per_step=4 & optim.minibatches=3", "optim.minibatches", "one of 1, 2, 4"),
    grpo("optim.prompts_per_step=2 & optim.minibatches=4", "optim.minibatches", "one of 1, 2"),
    grpo("rollout.min_new_tokens=300", "rollout.min_new_tokens", "lower one or raise the other"),
    grpo("model.min_pixels=9000 & model.max_pixels=8000", "model.min_pixels", "lower one or raise the other"),
    grpo("learner.max_tokens_per_microbatch=4351", "learner.max_tokens_per_microbatch", "(4096) + "),
    sft(
        "learner.max_tokens_per_microbatch=4095", "learner.max_tokens_per_microbatch", "data.max_prompt_tokens is 4096"
    ),
    grpo("rollout.top_p=0.9 & optim.minibatches=2", "rollout.top_p", "or optim.minibatches: 1"),
    grpo("rollout.top_k=50 & optim.minibatches=2", "rollout.top_k", "rollout.top_k: 0"),
    grpo("lora.dropout=0.1", "lora.dropout", "0, or set learner.form: repeated"),
    grpo("lora.dropout=0.1 & learner.form=dense", "lora.dropout", "0, or set learner.form: repeated"),
    grpo("lora=null & freeze=[vision, projector, language]", "freeze", "nothing is trained"),
    grpo("lora.targets=all-linear", "lora.targets", "all"),
    grpo("lora.targets=vision_towr", "lora.targets", "vision"),
    grpo("lora.targets='q_proj('", "lora.targets", "regular expression"),
    grpo(
        "model.vision_cache_bytes=9 & lora.targets=all",
        "model.vision_cache_bytes",
        "0, or train only the language model",
    ),
    grpo("model.vision_cache_bytes=9 & lora=null & freeze=[vision]", "model.vision_cache_bytes", 'freeze ["vision"]'),
    grpo("algorithm.kl.coef=0.04 & lora=null & train.strategy=deepspeed", "algorithm.kl.coef", "train.strategy: fsdp2"),
    grpo(
        "algorithm.kl={coef: 0.1, sync_every: 9} & lora=null",
        "algorithm.kl.sync_every",
        "remove this key, or train with lora only",
    ),
    grpo("model.reference=cpu & lora=null", "model.reference", "algorithm.kl.coef above 0"),
    of("distill", "model.reference=cpu & lora=null", "model.reference", "algorithm.kl.coef above 0"),
    of("dpo", "model.reference=cpu", "model.reference", "a dpo.loss with a reference, dpo.precompute_reference: false"),
    of("dpo", "model.reference=cpu & lora=null & dpo.loss=orpo", "model.reference", "a dpo.loss with a reference"),
    of(
        "kto",
        "model.reference=cpu",
        "model.reference",
        "`tiercel kto` keeps no copy of the initial weights, because that requires a part that is trained whole",
    ),
    of("reward", "model.reference=cpu & lora=null", "model.reference", "`tiercel reward` does not use a reference"),
    grpo("model.reference=cpu & algorithm.kl.coef=0.1", "model.reference", "a part that is trained whole"),
    sft("model.reference=cpu & lora=null", "model.reference", "`tiercel sft` does not use a reference"),
    grpo("freeze=[] & lora.targets=all", "freeze", "or take it out of lora.targets"),
    sft("freeze=[projector] & lora.targets=vision", "freeze", "add vision to freeze"),
    grpo(
        "optim.part_lr.vision=1e-6",
        "optim.part_lr.vision",
        "remove this key, or train vision: take it out of freeze, or add it to lora.targets",
    ),
    grpo(
        "optim.part_lr.language=1e-6 & lora=null & freeze=[language]",
        "optim.part_lr.language",
        "remove this key, or train language: take it out of freeze, or add it to lora.targets",
    ),
    grpo("optim.part_lr.vision=0", "optim.part_lr.vision", "number, above 0"),
    grpo("vit_lr=1e-6", "vit_lr", "optim.part_lr.vision"),
    grpo("rollout={engine: vllm} & freeze=[]", "rollout.engine", "freeze: [vision, projector]"),
    grpo("train.profile={steps: [5, 11]}", "train.profile.steps", "steps from 1 to 10"),
    grpo("train.profile={steps: []}", "train.profile.steps", "at least 1"),
    grpo("train.profile={steps: [0]}", "train.profile.steps.0", "above 0"),
    grpo("train.eval_every=5", "train.eval_every", "data.eval"),
    grpo("train.keep_best=eval/accuracy", "train.keep_best", "data.eval"),
    grpo("train.keep_best=eval/loss & data.eval=rows.jsonl", "train.keep_best", "eval/accuracy or eval/reward"),
    sft("train.keep_best=eval/accuracy & data.eval=rows.jsonl", "train.keep_best", "eval/loss"),
    grpo("train.keep_best=best", "train.keep_best", "eval/accuracy"),
    grpo(
        "train.strategy=deepspeed & reliability.max_skipped_updates=2",
        "reliability.max_skipped_updates",
        "keeps the gradients",
    ),
    grpo("optim.warmup_steps=11", "optim.warmup_steps", "fewer warmup steps"),
    sft("optim.minibatches=2", "optim.minibatches", "a step of an SFT recipe is one update"),
    grpo(
        "rollout.stop=['']", "rollout.stop", 'contains "", which every text contains, so no completion could be sampled'
    ),
    # rewards
    grpo("rewards=[]", "rewards", "for example, rewards: [{name: exact}]"),
    grpo("rewards.0={weight: 1}", "rewards.0", "neither name nor call"),
    grpo("rewards.0.call=mine.py:score", "rewards.0", "both name (exact) and call (mine.py:score)"),
    grpo("rewards.0.pattern=abc", "rewards.0.pattern", "is not a key of the reward exact"),
    grpo("rewards.1.pattern='(a'", "rewards.1.pattern", "not a regular expression"),
    grpo(
        "rewards.0.name=length",
        "rewards.0.max_tokens",
        "the reward length needs the number of tokens up to which it is 1",
    ),
    grpo("rewards.1.name=exact", "rewards.1.name", "keep one entry"),
    grpo("rewards.1={name: exact, weight: 0.5}", "rewards.1.name", "keep one entry"),
    grpo("rewards.0={call: mine.py}", "rewards.0.call", "must be file.py:function"),
    grpo("rewards.0={call: yours.py:score}", "rewards.0.call", "no such file"),
    grpo("rewards.0.weight=0 & rewards.1.weight=0", "rewards.0.weight", "all advantages would be 0"),
    grpo("rewards.0.weight=.inf", "rewards.0.weight", "must be a finite number"),
    grpo("rewards.0.weight=.nan", "rewards.0.weight", "must be a finite number"),
    grpo("rewards.0.correct_at=.nan", "rewards.0.correct_at", "must be a finite number, or null"),
    grpo("rewards.0.env=[SERVICE_KEY]", "rewards.0.env", "it belongs to call"),
    grpo("rewards.0={call: mine.py:score, env: [KEY=abc]}", "rewards.0.env", "names of environment variables"),
    grpo("rewards.0={call: mine.py:score, arguments: {api_key: abc}}", "rewards.0.arguments.api_key", "like a secret"),
    grpo(
        "rewards.0={call: mine.py:score, arguments: {tokenizer: org/name, judge: {auth_token: abc}}}",
        "rewards.0.arguments.judge.auth_token",
        "like a secret",
    ),
    grpo(
        "rewards.0={call: mine.py:score, arguments: {judges: [{url: here, secrets: [abc]}]}}",
        "rewards.0.arguments.judges.secrets",
        "like a secret",
    ),
    grpo("rewards.0.arguments={most: 1}", "rewards.0.arguments", "it belongs to call"),
    grpo("reliability.reward_memory_gb=0", "reliability.reward_memory_gb", "must be a number, above 0"),
    grpo("reliability.reward_file_mb=.inf", "reliability.reward_file_mb", "must be a finite number, above 0"),
    grpo("rewards.0={name: choice, choices: [a]}", "rewards.0.choices", "two or more"),
    # files
    grpo("data.train=nowhere.jsonl", "data.train", "no such file"),
    grpo(
        "data.train=empty",
        "data.train",
        "this directory has no data set: neither the state.json that save_to_disk writes, nor .parquet files",
    ),
    grpo("data.train=~/rows.jsonl", "data.train", "~ is not expanded"),
    grpo("data.train=$HOME/rows.jsonl", "data.train", "variables are not expanded"),
    grpo("model.path=$HOME/models/mine", "model.path", "variables are not expanded"),
    grpo("output=~/runs/first", "output", "~ is not expanded"),
    grpo("output=runs/$NAME", "output", "variables are not expanded"),
    grpo("data.eval=nowhere.jsonl", "data.eval", "no such file"),
    grpo("data.image_root=nowhere", "data.image_root", "no such directory"),
    grpo("data.image_root=/", "data.image_root", "the directory of the images"),
    grpo("data.image_roots=[nowhere]", "data.image_roots.0", "no such directory"),
    grpo("data.image_roots=[empty, rows.jsonl]", "data.image_roots.1", "a directory"),
    grpo("data.image_roots=[/]", "data.image_roots.0", "this is the whole file system"),
    grpo("data.image_roots=[everything]", "data.image_roots.0", "this is the whole file system"),
    grpo("data.mix=[{path: rows.jsonl, image_root: everything}]", "data.mix.0.image_root", "the whole file system"),
    grpo("data.image_roots=empty", "data.image_roots", "must be a list; use [empty]"),
    grpo("data.image_root=[empty]", "data.image_root", "must be a text"),
    # held-out rows
    grpo("data.eval={fraction: 0}", "data.eval.fraction", "above 0, below 1"),
    sft("data.eval={fraction: 1}", "data.eval.fraction", "above 0, below 1"),
    grpo("data.eval={fraction: '0.1'}", "data.eval.fraction", "0.1 without quotes"),
    grpo("data.eval={count: 1.5}", "data.eval.count", "must be a whole number"),
    grpo("data.eval={count: 0}", "data.eval.count", "above 0"),
    sft(
        "data.eval={}",
        "data.eval",
        "{fraction: 0.01} or {count: 100}",
    ),
    grpo("data.eval={fraction: 0.1, count: 10}", "data.eval", "{fraction: 0.01} or {count: 100}"),
    grpo("data.eval={ratio: 0.1}", "data.eval.ratio", "data.eval.fraction"),
    grpo("data.eval=0.01", "data.eval", "{fraction: 0.01} or {count: 100} of the training rows"),
    grpo("data.eval=[rows.jsonl, nowhere.jsonl]", "data.eval.1", "no such file"),
    grpo("data.mix=[{path: [rows.jsonl, nowhere.jsonl]}]", "data.mix.0.path.1", "no such file"),
    grpo("data.mix=[{path: []}]", "data.mix.0.path", "for example"),
    grpo("data.train=[]", "data.train", "for example, data.train: [rows.jsonl]"),
    grpo("data.train=[rows.jsonl, 5]", "data.train.1", "must be text"),
    grpo("data.train={count: 5}", "data.train", "text or list"),
    sft("split_dataset_ratio=0.01", "split_dataset_ratio", "data.eval.fraction"),
    # parts of files, and data sets of the hub
    grpo("data.train=rows.jsonl#0", "data.train", "a number above 0"),
    grpo("data.train=nowhere.jsonl#5", "data.train", "no such file"),
    grpo("data.eval='rows.jsonl#many'", "data.eval", "no such file"),
    grpo("data.mix=[{path: 'rows.jsonl#0'}]", "data.mix.0.path", "a number above 0"),
    grpo("data.train='hf:'", "data.train", "hf:ORGANISATION/NAME"),
    grpo("data.train=hf:json", "data.train", "hf:ORGANISATION/NAME"),
    grpo("data.train=hf:a/b/c/d", "data.train", "with /CONFIG, :SPLIT and #N"),
    grpo("data.train=hf:a/b:train#x", "data.train", "'x' after # is not a number of rows"),
    grpo("data.train=hf:./nowhere", "data.train", "no such directory"),
    grpo("data.train=hf:a/b#0", "data.train", "or hf:a/b for all rows"),
    grpo("data.template=nowhere.jinja", "data.template", "no such file"),
    grpo("model.path=./nowhere", "model.path", "no such directory"),
    grpo("model.path=qwen2vl", "model.path", "organisation/name"),
    grpo("model.path=empty", "model.path", "no config.json"),
    grpo("model.path=checkpoint/config.json", "model.path", "its directory, checkpoint"),
    grpo("model.path=checkpoint & model.revision=main", "model.revision", "remove one of them"),
    grpo("lora.init=empty", "lora.init", "no adapter_config.json"),
    grpo("output=rows.jsonl", "output", "a directory"),
    # the two kinds
    sft("rollout.group_size=8", "rollout", "use `tiercel grpo`"),
    sft("rewards=[{name: exact}]", "rewards", "use `tiercel grpo`"),
    Wrong(text=GOOD["sft"], key="rewards", says="use `tiercel sft`"),
    # overrides
    grpo(
        "optim.lr",
        'override "optim.lr"',
        "must have the form key=value, without spaces around =, such as optim.lr=1e-5",
    ),
    grpo("--optim.lr=1e-5", 'override "--optim.lr=1e-5"', "without dashes"),
    grpo("optim.lr=", 'override "optim.lr="', "has no value"),
    grpo("output.x=1", 'override "output.x=1"', 'output is the value "runs/grpo"'),
    grpo("rewards.7.weight=1", 'override "rewards.7.weight=1"', "its entries are 0 to 1"),
    grpo("rollout.stop=[a", 'override "rollout.stop=[a"', "close the bracket"),
    # the file as a whole
    text("", "the file is empty", "model, data, train and output"),
    text("- model\n", 'the top level is ["model"]', "sections"),
    text("model: {path: a/b\n", "line 2, column 1", "close the bracket"),
    text("train:\n\tsteps: 1\n", "line 2, column 1", "use spaces"),
    text(GOOD["grpo"] + "output: runs/other\n", "output: is set twice", "lines 6 and 7"),
    text(GOOD["grpo"].replace("output: runs/grpo\n", ""), "output", "is required; give the run directory"),
    text(GOOD["grpo"].replace("data: {train: rows.jsonl}\n", ""), "data", "is required; add the section with train"),
    # tokens
    sft("sft.loss=focal", "sft.loss", "must be one of nll, dft"),
    sft("sft.loss=cross_entropy", "sft.loss", "nll"),
    of("dpo", "dpo.loss=aot_pair", "dpo.loss", "aot_unpaired"),
    sft("sft.label_smoothing=1", "sft.label_smoothing", "below 1"),
    sft("sft={loss: dft, label_smoothing: 0.1}", "sft.label_smoothing", "remove one of the two"),
    sft("sft.neftune_alpha=0", "sft.neftune_alpha", "above 0"),
    sft("sft.neftune_alpha=5 & data.group_by_prefix=true", "sft.neftune_alpha", "remove one of the two"),
    sft("neftune_noise_alpha=5", "neftune_noise_alpha", "sft.neftune_alpha"),
    sft("enable_dft_loss=true", "enable_dft_loss", "sft.loss: dft"),
    sft("label_smoothing_factor=0.1", "label_smoothing_factor", "sft.label_smoothing"),
    of("dpo", "sft.loss=dft", "sft", "tiercel sft"),
    of("dpo", "ld_alpha=0.5", "ld_alpha", "dpo.ld_alpha"),
    # pairs and labels
    of("dpo", "dpo.loss=dpo", "dpo.loss", "must be one of sigmoid, ipo, hinge"),
    of("dpo", "dpo={beta: 0.1}", "dpo.loss", "is required; give the loss of a pair"),
    of("dpo", "dpo.beta=0", "dpo.beta", "above 0"),
    of("dpo", "beta=0.1", "beta", "dpo.beta"),
    of("dpo", "dpo.label_smoothing=0.5", "dpo.label_smoothing", "below 0.5"),
    of("dpo", "dpo.gamma=1.0", "dpo.gamma", "it belongs to simpo"),
    of("dpo", "dpo.loss=aot & dpo.wpo=true", "dpo.wpo", "the loss aot does not use it"),
    of("dpo", "use_weighting=true", "use_weighting", "dpo.wpo"),
    of("dpo", "dpo.tau=0.1", "dpo.tau", "it belongs to discopop"),
    of("dpo", "dpo.loss=simpo & dpo.ld_alpha=0.5", "dpo.ld_alpha", "the loss simpo does not use it"),
    of("dpo", "dpo.ld_alpha=2", "dpo.ld_alpha", "at most 1"),
    of("dpo", "dpo.ld_alpha=0.5 & dpo.length_normalised=true", "dpo.ld_alpha", "remove one of the two"),
    of("dpo", "dpo.loss=aot & dpo.length_normalised=true", "dpo.length_normalised", "the loss aot does not use it"),
    of("dpo", "dpo.loss=ipo & dpo.divergence=js", "dpo.divergence", "sigmoid, hinge, robust, exo_pair, discopop)"),
    of("dpo", "dpo.divergence=kl", "dpo.divergence", "must be one of reverse_kl, forward_kl"),
    of("dpo", "dpo.divergence=js & dpo.length_normalised=true", "dpo.divergence", "remove one of the two"),
    of("dpo", "dpo.divergence_alpha=0.5", "dpo.divergence_alpha", "dpo.divergence: alpha"),
    of("dpo", "dpo={loss: sigmoid, divergence: alpha, divergence_alpha: 1}", "dpo.divergence_alpha", "below 1"),
    of("kto", "kto.loss=apo_zero", "kto.loss", "apo_zero_unpaired"),
    of("dpo", "dpo.loss=exo_pair", "dpo.label_smoothing", "a small value, such as 0.001"),
    of(
        "dpo",
        "dpo.loss=cpo_hinge & dpo.label_smoothing=0.1",
        "dpo.label_smoothing",
        "the loss cpo_hinge does not use it",
    ),
    of("dpo", "dpo.loss=hinge & dpo.label_smoothing=0.1", "dpo.label_smoothing", "the loss hinge does not use it"),
    of("dpo", "dpo.loss=orpo & dpo.length_normalised=true", "dpo.length_normalised", "simpo, cpo, cpo_ipo, cpo_hinge)"),
    of(
        "dpo",
        "dpo.loss=simpo & dpo.precompute_reference=true",
        "dpo.precompute_reference",
        "discopop, aot, aot_unpaired, mpo)",
    ),
    of("dpo", "dpo.sft_coef=-1", "dpo.sft_coef", "at least 0"),
    of("dpo", "loss_type=ipo", "loss_type", "dpo.loss"),
    of("dpo", "rpo_alpha=1", "rpo_alpha", "dpo.sft_coef"),
    of("dpo", "simpo_gamma=1", "simpo_gamma", "dpo.gamma"),
    of("dpo", "precompute_ref_log_probs=true", "precompute_ref_log_probs", "dpo.precompute_reference"),
    of("dpo", "rollout.group_size=8", "rollout", "`tiercel grpo`, or remove the section"),
    of("dpo", "optim.minibatches=2", "optim.minibatches", "a step of a DPO recipe is one update"),
    of("dpo", "optim.rollout_epochs=2", "optim.rollout_epochs", "a step of a DPO recipe is one update"),
    of("dpo", "data.train_turns=last", "data.train_turns", "`tiercel dpo` trains only on the last answer"),
    of("dpo", "lora.dropout=0.1", "lora.dropout", "0, or set learner.form: repeated"),
    of("dpo", "learner.max_tokens_per_microbatch=6000", "learner.max_tokens_per_microbatch", "two answers, twice"),
    of("kto", "learner.max_tokens_per_microbatch=6000", "learner.max_tokens_per_microbatch", "two answers, twice"),
    of(
        "kto",
        "learner.form=repeated & learner.max_tokens_per_microbatch=9000",
        "learner.max_tokens_per_microbatch",
        "three times",
    ),
    of(
        "dpo",
        "train.keep_best=eval/reward/mean & data.eval=rows.jsonl",
        "train.keep_best",
        "eval/loss or eval/accuracy",
    ),
    of("dpo", "kto.beta=0.2", "kto", "use `tiercel kto`"),
    of("dpo", "lora=null & train.strategy=deepspeed", "train.strategy", "dpo.precompute_reference: true"),
    of("kto", "kto.beta=-1", "kto.beta", "above 0"),
    of("kto", "beta=0.1", "beta", "kto.beta"),
    of("kto", "kto.desirable_weight=-1", "kto.desirable_weight", "at least 0"),
    of("kto", "kto.undesirable_weight=x", "kto.undesirable_weight", "must be a number"),
    of("kto", "dpo.loss=ipo", "dpo", "use `tiercel dpo`"),
    of("kto", "data.group_by_prefix=true", "data.group_by_prefix", "compares a row with the next row's answer"),
    of("kto", "train.keep_best=eval/accuracy & data.eval=rows.jsonl", "train.keep_best", "eval/loss"),
    of("reward", "ranking.margin=-1", "ranking.margin", "at least 0"),
    of("reward", "ranking.margin_column=3", "ranking.margin_column", "must be text"),
    of("reward", "ranking.centre_coef=-1", "ranking.centre_coef", "at least 0"),
    of("reward", "ranking.margins=1", "ranking.margins", "ranking.margin"),
    of("reward", "center_rewards_coefficient=0.1", "center_rewards_coefficient", "ranking.centre_coef"),
    of("reward", "dpo.loss=ipo", "dpo", "use `tiercel dpo`"),
    of("reward", "rewards=[{name: iou}]", "rewards", "`tiercel grpo`, or remove the section"),
    of("reward", "optim.minibatches=2", "optim.minibatches", "a step of a reward-model recipe is one update"),
    grpo("rewards=[{name: model, model: {path: a/b, adapter: empty}}]", "rewards.0.model.adapter", "adapter_config"),
    grpo(
        "rewards=[{name: model, model: {path: a/b, min_pixels: 9, max_pixels: 4}}]",
        "rewards.0.model.min_pixels",
        "lower one or raise the other",
    ),
    grpo("ranking.margin=1", "ranking", "use `tiercel reward`"),
    of("distill", "data.eval=rows.jsonl", "data.eval", "there are no rewards to score held-out completions"),
    of(
        "distill",
        "teacher=null",
        "teacher",
        "must be a section; leave it out",
    ),
    of("distill", "teacher={top_k: 8}", "teacher.path", "is required; give a local directory"),
    of("distill", "teacher.path=no/such/place", "teacher.path", "no such directory"),
    of("distill", "teacher.path=checkpoint & teacher.revision=main", "teacher.revision", "has no revisions"),
    of("distill", "teacher.adapter=empty", "teacher.adapter", "has no adapter_config.json"),
    of("distill", "teacher.dtype=int8", "teacher.dtype", "must be one of float32, bfloat16"),
    of("distill", "teacher.max_pixels=0", "teacher.max_pixels", "above 0"),
    of("distill", "teacher.template=none.jinja", "teacher.template", "no such file"),
    of("distill", "teacher.prompt=3", "teacher.prompt", "must be text"),
    of("distill", "teacher.prompt='{prompt'", "teacher.prompt", "to write a brace as text, double it"),
    of("distill", "teacher.divergence=kl", "teacher.divergence", "must be one of reverse_kl, forward_kl"),
    of("distill", "teacher.divergence=jsd & teacher.mix=1", "teacher.mix", "below 1"),
    of("distill", "teacher.mix=0.3", "teacher.mix", "jsd"),
    of("distill", "teacher.top_k=0", "teacher.top_k", "above 0"),
    of(
        "distill",
        "teacher.divergence=token & teacher.top_k=8",
        "teacher.top_k",
        "teacher.divergence token uses only the sampled token",
    ),
    of("distill", "teacher.coef=0", "teacher.coef", "above 0"),
    of("distill", "teacher.url=host:8000 & teacher.top_k=8", "teacher.url", "an address such as http://127.0.0.1:8000"),
    of("distill", "teacher.url=http://a:b@c & teacher.top_k=8", "teacher.url", "put the key into the environment"),
    of("distill", f"{SERVED} & teacher.top_k=null", "teacher.top_k", "teacher.top_k: 20, or teacher.divergence"),
    of("distill", f"{SERVED} & teacher.adapter=checkpoint", "teacher.adapter", "serves a whole model"),
    of("distill", f"{SERVED} & teacher.dtype=float32", "teacher.dtype", "(--dtype)"),
    of("distill", f"{SERVED} & rollout.temperature=0.7", "rollout.temperature", "or remove teacher.url"),
    grpo(
        "algorithm.teacher={path: a/b, url: http://c}",
        "algorithm.teacher.top_k",
        "algorithm.teacher.top_k: 20, or algorithm.teacher.divergence: token",
    ),
    of("distill", "teacher.rows_share=2", "teacher.rows_share", "at most 1"),
    of("distill", "teacher.prompt='{prompt}' & rollout.tools=[zoom]", "teacher.prompt", "the policy's own prompt"),
    of("distill", "teacher.rows_share=0.5 & rollout.tools=[zoom]", "teacher.rows_share", "have no turns"),
    of("distill", "algorithm.teacher.path=a/b", "algorithm.teacher", "the recipe already has the section teacher"),
    of("distill", "algorithm.loss=dapo", "algorithm.loss", "not from rewards"),
    of("distill", "algorithm.correction.level=token", "algorithm.correction.level", "not from rewards"),
    of("distill", "algorithm.kl.place=reward & algorithm.kl.coef=0.1", "algorithm.kl.place", "not from rewards"),
    of(
        "distill",
        "rollout.resample_tries=2",
        "rollout.resample_tries",
        "distillation does not need rewards that differ",
    ),
    of("distill", "teacher_model_name_or_path=a/b", "teacher_model_name_or_path", "teacher.path"),
    of("distill", "lmbda=0.5", "lmbda", "teacher.rows_share"),
    of("distill", "dpo.loss=ipo", "dpo", "`tiercel dpo`, or remove the section"),
    of("distill", "data.train_turns=last", "data.train_turns", "`tiercel distill` trains on completions"),
    of(
        "distill",
        "data.eval=rows.jsonl & train.keep_best=eval/accuracy",
        "data.eval",
        "there are no rewards to score held-out completions",
    ),
    grpo("algorithm.teacher={path: a/b, rows_share: 0.5}", "algorithm.teacher.rows_share", "teacher.rows_share"),
    grpo("algorithm.teacher={path: a/b, mix: 0.2}", "algorithm.teacher.mix", "jsd"),
    grpo("teacher.path=a/b", "teacher", "`tiercel distill`, or remove the section"),
    sft("dpo.loss=sigmoid", "dpo", "use `tiercel dpo`"),
    sft("data.group_by_prefix=yes", "data.group_by_prefix", "true or false"),
    sft(
        "data.group_by_prefix=true & data.mix=[{path: rows.jsonl}]",
        "data.group_by_prefix",
        "one file, or remove one of the two",
    ),
    sft("data.group_by_prefix=true & lora.dropout=0.1", "lora.dropout", "0, or set learner.form: repeated"),
    grpo("data.rows_per_prefix=4", "data.rows_per_prefix", "data.group_by_prefix: true"),
    grpo("data.rows_per_prefix=0 & data.group_by_prefix=true", "data.rows_per_prefix", "above 0"),
    grpo(
        "data.group_by_prefix=true & data.mix=[{path: rows.jsonl}]",
        "data.group_by_prefix",
        "one file, or remove one of the two",
    ),
    grpo("dpo.loss=sigmoid", "dpo", "use `tiercel dpo`"),
    text(
        GOOD["grpo"] + "data2: !!python/object:os.system x\n",
        "line 7, column 8",
        "put text that begins with ! in quotes",
    ),
]


def identifier(wrong: Wrong) -> str:
    return " ".join(wrong.overrides) or f"text-{WRONG.index(wrong)}"


def recipe_file(wrong: Wrong) -> str:
    """The file to load, in the working directory."""
    if wrong.text is None:
        return f"{wrong.kind}.yaml"
    Path("wrong.yaml").write_text(wrong.text, encoding="utf-8")
    return "wrong.yaml"


@pytest.mark.parametrize("kind", GOOD)
def test_the_recipes_to_spoil_are_good(workplace: Path, kind: Kind):
    assert load_recipe(kind, f"{kind}.yaml").output == f"runs/{kind}"


@pytest.mark.parametrize("wrong", WRONG, ids=identifier)
def test_key_and_remedy_are_named(workplace: Path, wrong: Wrong):
    with pytest.raises(RecipeError) as caught:
        load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides)
    lines = [line for line in caught.value.problems if line.startswith(wrong.key)]
    assert any(wrong.says in line for line in lines), caught.value
    assert all("\n" not in line for line in caught.value.problems)


@pytest.mark.parametrize(("kind", "section"), [("kto", "kto"), ("reward", "ranking")])
def test_a_required_section_without_required_keys_may_be_empty(workplace: Path, kind: Kind, section: str):
    others = "".join(line for line in GOOD[kind].splitlines(keepends=True) if not line.startswith(section))
    Path("lacking.yaml").write_text(others)
    with pytest.raises(RecipeError, match=f"{section}: is required; `{section}: {{}}` takes its defaults"):
        load_recipe(kind, "lacking.yaml")
    Path("empty.yaml").write_text(f"{others}{section}: {{}}\n")
    load_recipe(kind, "empty.yaml")


@pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if wrong.text is None], ids=identifier)
def test_one_mistake_is_one_line(workplace: Path, wrong: Wrong):
    with pytest.raises(RecipeError) as caught:
        load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides)
    assert len(caught.value.problems) == 1, caught.value


@pytest.mark.parametrize("wrong", WRONG, ids=identifier)
def test_words_are_plain(workplace: Path, wrong: Wrong):
    with pytest.raises(RecipeError) as caught:
        load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides)
    for jargon in ("pydantic", "Input should", "valid integer", "Extra inputs", "Field required", "type=", "NoneType"):
        assert jargon not in str(caught.value)


@pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if wrong.text is None], ids=identifier)
def test_a_recipe_made_in_python_is_judged_alike(workplace: Path, wrong: Wrong, monkeypatch):
    """What the schema accepts but rules or paths refuse in a file is refused in an object too, with the same lines."""
    with monkeypatch.context() as patch, pytest.raises(RecipeError) as caught:
        patch.setattr(BaseRecipe, "judge", lambda recipe: [])
        recipe = admitted(wrong)  # None if the schema itself refuses
        patch.undo()
        load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides)
    if recipe is None:
        return
    with pytest.raises((ValidationError, RecipeError)) as made:
        require_sound(RECIPES[wrong.kind].model_validate(recipe.model_dump()))
    for line in caught.value.problems:
        assert line in str(made.value)


def admitted(wrong: Wrong) -> BaseRecipe | None:
    try:
        return load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides, check_paths=False)
    except RecipeError:
        return None


def test_rules_judge_what_python_makes_and_copies(workplace: Path):
    recipe = load_recipe("grpo", "grpo.yaml")
    assert isinstance(recipe, GrpoRecipe)
    require_sound(recipe)
    sections = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    with pytest.raises(ValidationError, match=r"model\.quantize: is nf4") as caught:
        GrpoRecipe(**{**sections, "lora": None, "model": Model(path="a/b", quantize="nf4")})
    assert "input_value" not in str(caught.value)  # a recipe may contain what no log may
    with pytest.raises(ValidationError, match=r"optim\.minibatches: is 2, .*optim\.prompts_per_step \(3\)"):
        GrpoRecipe(**{**sections, "optim": {"prompts_per_step": 3, "minibatches": 2}})
    copied = recipe.model_copy(update={"trackers": ("wandb", "wandb")})  # pydantic does not validate copies
    with pytest.raises(RecipeError, match=r"trackers\.1: "):
        require_sound(copied)
    with pytest.raises(RecipeError, match=r"data\.train: is \"gone\.jsonl\""):
        require_sound(recipe.model_copy(update={"data": Data(train="gone.jsonl")}))


EACH_BY_THE_COMMAND_LINE = """
import contextlib, io, json, sys
from pathlib import Path
from tiercel.cli.main import main

answers = []
for words, text in json.load(sys.stdin):
    Path("wrong.yaml").write_text(text or "", encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    answers.append((code, said.getvalue()))
print(json.dumps({"answers": answers, "torch": "torch" in sys.modules}))
"""


def test_the_command_line_answers_without_torch(workplace: Path):
    """One process for all of them; `make faults` starts one for each and takes its time."""
    wrongs = [wrong for wrong in WRONG if not any(override.startswith("-") for override in wrong.overrides)]
    asked = [([wrong.kind, recipe_file(wrong), *wrong.overrides], wrong.text) for wrong in wrongs]
    finished = subprocess.run(
        [sys.executable, "-c", EACH_BY_THE_COMMAND_LINE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert not found["torch"]
    for wrong, (code, said) in zip(wrongs, found["answers"], strict=True):
        assert code == EXIT_USER, (identifier(wrong), said)
        assert wrong.key in said and wrong.says in said, (identifier(wrong), said)
