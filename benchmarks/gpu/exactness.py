"""Part a: computations on a card, compared with slow computations of the same values, each with its largest error and
its limit.

Oracles are float64 on the CPU wherever that is possible, with tiny random checkpoints of all families.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from benchmarks.exact import compare, failures, make_case, summarise
from benchmarks.gpu.attention_check import attention_cells
from benchmarks.gpu.decoding import params_of
from benchmarks.gpu.learners import recipe_with
from benchmarks.gpu.running import DIFFERS, EQUAL, Cell, verdict
from benchmarks.gpu.setup import Setup
from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint, tiny_policy, tiny_prompts
from tiercel.config.schema import Optim
from tiercel.distributed.strategies.optimizer import build_optimizer
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.layout import pack
from tiercel.packing.logprobs import TokenHead
from tiercel.rollout.local.attention_kernels import kernel_for
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.local.static_cache import BatchSize, FixedMemory
from tiercel.training.policy_passes import new_learner

CPU = torch.device("cpu")
FLOAT32_LIMIT = 1e-5  # relative
LOGPROB_LIMIT = 1e-4  # nats
ATTENTION_LIMIT = 1e-2  # relative; an output in bfloat16 is rounded by up to 4e-3
HEAD_LIMIT = 2e-3  # nats, of a head whose products are in float32
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # those with patches of a picture's own size
SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "full"},
    {"gradient_checkpointing": "selective"},
    {"compile": True},
    {"compile": True, "gradient_checkpointing": "full"},
)


def exactness_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield all checks, or with toy shapes those of one family."""
    yield from attention_cells(is_toy)
    families = FAMILY_NAMES[1:2] if is_toy else FAMILY_NAMES
    for name in families:
        yield Cell(part="a", name=f"learner, {name}", run=partial(learner_check, name))
    for settings in SETTINGS:
        words = ", ".join(f"{key} {value}" for key, value in settings.items())
        for name in families[:1] if is_toy else ("qwen2_5_vl", "qwen3_vl"):
            yield Cell(part="a", name=f"learner, {name}, {words}", run=partial(settings_check, name, settings))
    for name in (name for name in families if name in TOWERS):
        yield Cell(part="a", name=f"vision tower, {name}", run=partial(tower_check, name))
    for name in families:
        yield Cell(part="a", name=f"captured decoding, {name}", run=partial(decoding_check, name))
    yield Cell(part="a", name="attention of a decoding step", run=decoding_attention_check)
    yield Cell(part="a", name="head", run=head_check)
    yield Cell(part="a", name="AdamW", run=optimizer_check)


def learner_check(name: str, setup: Setup) -> dict[str, Any]:
    """Check every form of the learner, in float32 and bfloat16, as `make bench-exact` does."""
    torch.backends.cudnn.allow_tf32 = False
    with TemporaryDirectory() as directory:
        seeds = range(1 if setup.is_toy else 5)
        found = [errors for seed in seeds for errors in compare(name, seed, setup.device, Path(directory))]
    rows = summarise(found)
    wrong = failures(rows)
    if setup.is_toy:  # one seed says nothing about bfloat16
        wrong = [line for line in wrong if "float32" in line]
    gradients = [row["float32_gradient_error"] for row in rows if row["float32_gradient_error"] is not None]
    return {
        **verdict(max(gradients), FLOAT32_LIMIT, "LoRA gradient in float32, relative"),
        "verdict": DIFFERS if wrong else EQUAL,
        "failures": wrong,
        "rows": rows,
    }


def settings_check(name: str, settings: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """Check the gradient in float32 with these keys of the recipe against a dense mask without them."""
    found, right = (_gradient(name, each, setup) for each in (settings, {"form": "dense"}))
    return verdict(_relative(found, right), FLOAT32_LIMIT, "LoRA gradient, relative")


def _gradient(name: str, settings: Mapping[str, Any], setup: Setup) -> Tensor:
    recipe = recipe_with(settings)
    with _tiny(name, setup) as policy:
        case = make_case(policy, 0)
        packed = pack(case.items)
        learner = new_learner(policy, recipe, policy.device)[0].train()
        scores = learner(packed, VisionStore(policy, 0).features(packed.images), 1.0)
        (scores.logprobs_N * case.weights_N.to(setup.device)).sum().backward()
        return torch.cat([each.grad.flatten().cpu() for each in policy.trained_parameters().values()])


def tower_check(name: str, setup: Setup) -> dict[str, Any]:
    """Check features of pictures of two shapes in float32 against transformers' own tower in float64 on the CPU."""
    torch.backends.cudnn.allow_tf32 = False
    with TemporaryDirectory() as directory:
        checkpoint = save_tiny_checkpoint(name, Path(directory) / name)
        policy = _on(tiny_policy(checkpoint), setup)
        plain = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float64, attn_implementation="eager"
        )
    prompt = tiny_prompts(policy.family)[2]
    inputs = huggingface_inputs(policy.family, prompt, prompt.token_ids_P)
    with torch.no_grad():
        found = torch.cat(policy.vision_features(prompt.images)).double().cpu()
        features = plain.model.get_image_features(inputs["pixel_values"].double(), inputs["image_grid_thw"])
    return verdict(_relative(found, torch.cat(list(features.pooler_output))), FLOAT32_LIMIT, "features, relative")


def decoding_check(name: str, setup: Setup) -> dict[str, Any]:
    """Check tokens and logprobs of the decoder that a card uses, which captures its step, against the eager one."""
    with _tiny(name, setup) as policy:
        prompts = tiny_prompts(policy.family)
        samplers = (LocalSampler(policy, VisionStore(policy, 0), weights_stay=stays) for stays in (True, False))
        found, right = (sampler.sample(prompts, params_of(4, 24), [1, 2, 3]) for sampler in samplers)
    pairs = [
        pair
        for mine, other in zip(found, right, strict=True)
        for pair in zip(mine.completions, other.completions, strict=True)
    ]
    are_same = all(torch.equal(mine.token_ids_L, other.token_ids_L) for mine, other in pairs)
    error = max(float((a.logprobs_L - b.logprobs_L).abs().max()) for a, b in pairs) if are_same else float("inf")
    return verdict(error, LOGPROB_LIMIT, "logprobs in nats; infinite where a token differs")


def decoding_attention_check(setup: Setup) -> dict[str, Any]:
    """Check the kernel that a card uses for a new token of every row, over ragged prompts from which some rows have
    left, against the same numbers in float32 on the CPU."""
    found, right = (_decoding_attention(*place) for place in ((setup.device, setup.dtype), (CPU, torch.float32)))
    errors = [_relative(mine.cpu(), other) for mine, other in zip(found, right, strict=True)]
    return verdict(max(errors), ATTENTION_LIMIT, "outputs and log-sum-exps, relative")


def _decoding_attention(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return outputs and log-sum-exps over the rows' own tokens and over their prompts, without a window and with one.
    The numbers can be represented in bfloat16."""
    heads, queries, size, scale = 4, 7, 128, 0.1
    room = BatchSize(prompts=3, prompt_tokens=1200, group_size=8, new_tokens=64)
    memory = FixedMemory(room, device)
    memory.begin((1200, 7, 640), room.group_size)
    rows = [*range(8), 9, *range(16, 23)]
    memory.keep(rows)
    memory.places.used_R.fill_(50)
    generator = torch.Generator().manual_seed(0)
    query = _normal((len(rows), heads, queries, size), generator).to(device, dtype)
    kernel = kernel_for(query)
    prompt, own = kernel.memory(query, room.prompts, room.prompt_tokens), kernel.memory(query, len(rows), 64)
    for held in (prompt, own):
        held.copy_(_normal(held.shape, generator))
    whole = memory.places.of(len(rows))
    return tuple(
        each
        for places in (whole, whole.within(80))  # the window ends in the prompts
        for each in (
            *kernel.over_own(query, own, own, places, scale),
            *kernel.over_prompts(query, prompt, prompt, places, scale),
        )
    )


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def head_check(setup: Setup) -> dict[str, Any]:
    """Check logprobs of a head in the card's dtype against float64 with the same weights and states, with logits up to
    30."""
    tokens, hidden, vocabulary = (64, 128, 1000) if setup.is_toy else (256, 3584, 152_064)
    generator = torch.Generator().manual_seed(0)
    weight = (8 * torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(setup.dtype)
    states_NH = torch.randn(tokens, hidden, generator=generator).to(setup.dtype)
    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    head = nn.Linear(hidden, vocabulary, bias=False, device=setup.device, dtype=setup.dtype).requires_grad_(False)
    head.weight.copy_(weight)
    found_N = TokenHead(head, ())(states_NH.to(setup.device), targets_N.to(setup.device), 1.0).logprobs_N.cpu()
    logits_NV = states_NH.double() @ weight.double().T
    right_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    return verdict(float((found_N - right_N).abs().max()), HEAD_LIMIT, "logprobs, nats")


def optimizer_check(setup: Setup) -> dict[str, Any]:
    """Check weights after five updates of the optimiser that a run builds against AdamW one tensor after the other."""
    with _tiny("qwen2_5_vl", setup) as policy, _tiny("qwen2_5_vl", setup) as other:
        optim = Optim(lr=1e-2, weight_decay=0.1)
        found = _updated(policy, build_optimizer(policy, optim))
        groups = build_optimizer(other, optim).param_groups
        plain = torch.optim.AdamW(
            [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            foreach=False,
        )
        right = _updated(other, plain)
    return verdict(_relative(found, right), FLOAT32_LIMIT, "weights, relative")


def _updated(policy: Policy, optimizer: torch.optim.Optimizer) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parameters = policy.trained_parameters().values()
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimizer.step()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in parameters])


@contextmanager
def _tiny(name: str, setup: Setup) -> Iterator[Policy]:
    """Yield a tiny policy in float32 on the device, whose adapter is not zero, while its checkpoint is on disk."""
    torch.backends.cudnn.allow_tf32 = False
    with TemporaryDirectory() as directory:
        yield _on(tiny_policy(save_tiny_checkpoint(name, Path(directory) / name), noise=0.1), setup)


def _on(policy: Policy, setup: Setup) -> Policy:
    return replace(policy, model=policy.model.to(setup.device), device=setup.device)


def _relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())
