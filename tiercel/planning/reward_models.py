"""Bytes of a recipe's reward models: weights are counted, and a pass is measured on fake tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tiercel.config.reward_rules import reward_models
from tiercel.config.schema import BaseRecipe
from tiercel.errors import ModelError
from tiercel.models.loading import DTYPES
from tiercel.planning.probe import LiveBytes, fake_tensors, fill_with_fakes, younger_garbage
from tiercel.planning.sizes import local_or_fetched, with_layers
from tiercel.rewards.started import RewardModel

PROBED_LAYERS = 2  # enough: without gradients a layer's buffers are freed before the next layer


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSize:
    """The bytes of one reward model."""

    device: str  # as the recipe has it
    weights: int
    largest_pass: int  # above the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelBytes:
    """The bytes of the reward models on one rank."""

    weights: int = 0  # of all: they stay in memory
    largest_pass: int = 0  # of one: they score one after the other


def held_by_rank(sizes: Sequence[RewardModelSize], *, on_gpu: bool) -> RewardModelBytes:
    """Sum the reward models in the memory that is planned: a GPU does not hold those with `device: cpu`."""
    held = [size for size in sizes if not (on_gpu and size.device == "cpu")]
    return RewardModelBytes(
        weights=sum(size.weights for size in held), largest_pass=max((size.largest_pass for size in held), default=0)
    )


def reward_model_sizes(recipe: BaseRecipe) -> tuple[RewardModelSize, ...]:
    """Measure the recipe's reward models. Raises ModelError where a config.json is not one of a sequence classifier,
    EnvironmentProblem where it cannot be fetched."""
    return tuple(map(_size, reward_models(recipe)))


def _size(options: RewardModel) -> RewardModelSize:
    """Measure a reward model. Its pass has the most tokens that the recipe admits, in rows of the largest length."""
    path = local_or_fetched(options, "rewards.model.path")
    dtype = DTYPES[options.dtype]
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            whole = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
            few = AutoModelForSequenceClassification.from_config(with_layers(config, PROBED_LAYERS), dtype=dtype)
    except Exception as error:  # broken files raise many types
        raise ModelError(f"{path}: not a config.json of a sequence classifier: {error}") from error
    weights = sum(parameter.nbytes for parameter in whole.parameters())
    tokens = min(options.max_tokens, options.batch_tokens)
    text = few.config.get_text_config()
    text.use_cache = False
    text.pad_token_id = 0
    with younger_garbage(), fake_tensors(), LiveBytes() as live, torch.no_grad():
        fill_with_fakes(few)
        rows = torch.zeros(options.batch_tokens // tokens, tokens, dtype=torch.int64)
        resident = live.start_again()
        few.eval()(input_ids=rows, attention_mask=torch.ones_like(rows))
        largest_pass = live.peak - resident
    return RewardModelSize(device=options.device, weights=weights, largest_pass=largest_pass)
