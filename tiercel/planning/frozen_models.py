"""Bytes of the models that a recipe has besides its policy, which are reward models and a teacher. Weights are counted,
and a pass is measured on fake tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tiercel.config.schema import BaseRecipe, Learner
from tiercel.errors import ModelError
from tiercel.models.layers.attention import route_attention
from tiercel.models.policy import WHOLE_FILE, Policy
from tiercel.models.weights.hub import CONFIG, resolve
from tiercel.models.weights.loading import DTYPES
from tiercel.models.weights.memory_errors import weight_bytes
from tiercel.packing.pass_options import chosen_form
from tiercel.planning.probe import (
    Composition,
    LiveBytes,
    ProbedLearner,
    fake_tensors,
    fill_with_fakes,
    packed_case,
    younger_garbage,
)
from tiercel.planning.sizes import bare_family, with_layers
from tiercel.rewards.external import RewardModel

PROBED_LAYERS = 2  # enough, because without gradients a layer's buffers are freed before the next layer


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBytes:
    """The bytes of a frozen model, or of all frozen models on one rank."""

    weights: int = 0  # of all models, because they stay in memory
    largest_pass: int = 0  # above the weights; of one model, because they compute one after the other
    elements: int = 0  # of all weights
    device: str = "auto"  # of one model, as in the recipe


def held_by_rank(sizes: Sequence[FrozenBytes], *, on_gpu: bool) -> FrozenBytes:
    """Add up the models in the memory that is planned. A GPU does not hold those with `device: cpu`."""
    held = [size for size in sizes if not (on_gpu and size.device == "cpu")]
    return FrozenBytes(
        weights=sum(size.weights for size in held),
        largest_pass=max((size.largest_pass for size in held), default=0),
        elements=sum(size.elements for size in held),
    )


def teacher_size(recipe: BaseRecipe) -> FrozenBytes | None:
    """Measure the recipe's teacher. Returns None if there is none, or if a server computes it."""
    teacher = recipe.taught_by
    if teacher is None or teacher.url is not None:
        return None
    path = resolve(teacher, f"{recipe.teacher_key}.path", CONFIG)
    return _policy_size(path, DTYPES[teacher.dtype], tokens_without_gradient(recipe), teacher.adapter)


def tokens_without_gradient(recipe: BaseRecipe) -> int:
    """Return the tokens of a microbatch of passes that keep no graph. These need no plan: `auto` means the default, or
    the smallest microbatch that holds the longest row."""
    asked = recipe.learner.max_tokens_per_microbatch
    default = Learner().max_tokens_per_microbatch
    if asked != "auto":
        return asked
    assert default != "auto"
    return max(default, recipe.smallest_microbatch(recipe.data.max_prompt_tokens))


def _policy_size(path: Path, dtype: torch.dtype, tokens: int, adapter: str | None, device: str = "auto") -> FrozenBytes:
    """Measure a frozen model that computes like the learner, in packs of at most `tokens` tokens."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    family = bare_family(path, config)
    with torch.device("meta"):
        made = partial(family.model_class.from_config, dtype=dtype, attn_implementation="sdpa")
        whole, few = made(config), made(with_layers(config, PROBED_LAYERS))
    elements = sum(parameter.numel() for parameter in whole.parameters())
    form = chosen_form("auto", torch.device("cpu"), family.sharing_obstacle(config.get_text_config()))
    packed = packed_case(_pack_of(tokens), tokens, family.position_dimensions)
    policy = Policy(
        family=family,
        model=few.eval(),
        peft=None,
        reference_adapter=None,
        compute_dtype=dtype,
        device=torch.device("cpu"),
    )

    def scoring() -> Callable[[], object]:
        route_attention(family.language_model(few))
        return partial(ProbedLearner(policy, form, False).scoring_states, packed, None, None)

    weights = elements * dtype.itemsize + (weight_bytes(Path(adapter)) if adapter is not None else 0)
    return FrozenBytes(device=device, weights=weights, elements=elements, largest_pass=_peak(few, scoring))


def _pack_of(tokens: int) -> Composition:
    """Assume that a quarter of a pack consists of answers, in groups of four."""
    answer = max(1, tokens // 64)
    return Composition(prompt_tokens=max(1, tokens // 4 - 4 * answer), completion_tokens=answer, group_size=4)


def _peak(few: nn.Module, prepare: Callable[[], Callable[[], object]]) -> int:
    """Measure the peak of a pass above the weights of a model on torch's meta device. `prepare` builds the pass once
    the model has fake tensors; what `prepare` itself allocates is not counted."""
    with younger_garbage(), fake_tensors(), LiveBytes() as live, torch.no_grad():
        fill_with_fakes(few)
        run = prepare()
        resident = live.start_again()
        run()
        return live.peak - resident


def reward_model_size(options: RewardModel) -> FrozenBytes:
    """Measure a reward model. Its pass has the most tokens that the recipe allows, in rows of the greatest length.
    Raises ModelError if a config.json is not that of a sequence classifier, and EnvironmentProblem if it cannot be
    fetched."""
    path = resolve(options, "rewards.model.path", CONFIG)
    if options.adapter is not None or (path / WHOLE_FILE).is_file():
        return _policy_size(path, DTYPES[options.dtype], options.batch_tokens, options.adapter, options.device)
    dtype = DTYPES[options.dtype]
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            whole = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
            few = AutoModelForSequenceClassification.from_config(with_layers(config, PROBED_LAYERS), dtype=dtype)
    except Exception as error:  # broken files raise many types of errors
        raise ModelError(f"{path}: not a config.json of a sequence classifier: {error}") from error
    weights = sum(parameter.nbytes for parameter in whole.parameters())
    tokens = min(options.max_tokens, options.batch_tokens)
    text = few.config.get_text_config()
    text.use_cache = False
    text.pad_token_id = 0

    def scoring() -> Callable[[], object]:
        rows = torch.zeros(options.batch_tokens // tokens, tokens, dtype=torch.int64)
        return partial(few.eval(), input_ids=rows, attention_mask=torch.ones_like(rows))

    elements = weights // dtype.itemsize
    return FrozenBytes(device=options.device, weights=weights, elements=elements, largest_pass=_peak(few, scoring))
