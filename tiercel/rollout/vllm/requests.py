"""Functions that both vLLM engines use: the parameters of a request, and checks of an answer.

vLLM gives each token's logprob among the tokens that could be drawn. Before `min_new_tokens` the end tokens cannot be
drawn, so the number is not the policy's logprob, and NaN replaces it. Shape suffixes: docs/shapes.md.
"""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from tiercel.config.engines import NOT_SERVED, VISION_ADAPTERS
from tiercel.config.schema import GrpoRecipe
from tiercel.errors import EnvironmentProblem
from tiercel.http_json import brief
from tiercel.models.families.base import Family
from tiercel.models.families.image_transforms import picture_image
from tiercel.models.layers.delta_net import BRANCHING_MODELS
from tiercel.rollout.dialogue import TurnReply
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.rollout.trajectory import TrajectoryBuilder, completes_a_stop, stop_reach, written_text
from tiercel.types import Completion, EncodedImage, EncodedPrompt

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM has kernels for
BATCHED_TOKENS = 4096  # of one pass on a CPU
ROUNDING = 1e-4  # largest error of a logprob that should be 0: a float32 sum over 1e5 words
UNKNOWN = -9999.0  # what vLLM writes for a logprob that is unknown or minus infinity


class ImpossibleCompletion(ValueError):
    """Raised if an engine cannot have drawn a completion. The text names the field and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """A prompt, and how to complete it. Sample i of the group draws with seed + i."""

    prompt: EncodedPrompt
    params: SamplingParams
    seed: int

    @classmethod
    def of_turn(cls, builder: TrajectoryBuilder, params: SamplingParams, **more: Any) -> Self:
        """Return the request for the next turn of a trajectory. The seed is the sample's for the first turn, and a
        function of it and the turn's number for others."""
        turn, most = len(builder.turns), builder.budget
        least = builder.least(params.min_new_tokens)
        return cls(
            prompt=builder.so_far(),
            params=replace(params, group_size=1, min_new_tokens=least, max_new_tokens=most),
            seed=sampling_seed(builder.seed, turn) if turn else builder.seed,
            **more,
        )


def sampling_fields(family: Family, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams. All are given, because vLLM would take missing ones from the
    checkpoint's generation_config.json."""
    return {
        "n": params.group_size,
        "seed": seed,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": 1.0 if params.greedy else params.top_p,
        "top_k": 0 if params.greedy else params.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": list(family.checkpoint.end_token_ids),
        "bad_words": family.tokenizer.convert_ids_to_tokens(list(family.placeholder_ids)),
        "skip_special_tokens": False,
    }


def engine_options(recipe: GrpoRecipe, family: Family, visuals: Mapping[str, int], adapters: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that follow from the recipe, in the ranks' processes and on a server.
    `visuals` is how many images and videos a prompt has at most, `adapters` how many the engine holds at a time."""
    options: dict[str, Any] = {
        "model": family.checkpoint.path,
        "dtype": recipe.model.dtype,
        "max_model_len": recipe.data.max_prompt_tokens + recipe.rollout.longest,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "limit_mm_per_prompt": dict(visuals),
    }
    if recipe.lora is not None:
        options |= {"enable_lora": True, "max_loras": adapters, "max_lora_rank": lora_rank_limit(recipe.lora.rank)}
    if settings := processor_settings(family, has_videos=visuals["video"] > 0):
        options["mm_processor_kwargs"] = settings
    return options


def scheduling(recipe: GrpoRecipe, family: Family) -> dict[str, Any]:
    """Return engine arguments for a machine without a GPU: prompts are not cut into chunks. With chunks, vLLM would
    have to reset the random generator of a request with a seed. On a CPU it cannot ("CPU Generator does not use
    offset"), and the engine would end. Without chunks vLLM cannot keep the states of delta nets in its prefix cache."""
    if torch.cuda.is_available():
        return {}
    row_tokens = recipe.data.max_prompt_tokens + recipe.rollout.longest
    arguments = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(BATCHED_TOKENS, row_tokens)}
    if family.checkpoint.config.get_text_config().model_type in BRANCHING_MODELS:
        arguments["enable_prefix_caching"] = False
    return arguments


def lora_rank_limit(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM that is not below the recipe's rank."""
    return next((limit for limit in LORA_RANKS if limit >= rank), rank)


def require_served(family: Family, engine: str) -> None:
    """Raise EnvironmentProblem if vLLM does not compute this family as the trainer does."""
    if family.name in NOT_SERVED:
        raise EnvironmentProblem(
            f"rollout.engine: {engine} does not support {family.name}, {NOT_SERVED[family.name]}; set "
            "rollout.engine: local"
        )


def require_vision_adapters(family: Family, engine: str) -> None:
    """Raise EnvironmentProblem if vLLM leaves out adapters on vision layers of this family, or refuses them."""
    if family.name not in VISION_ADAPTERS:
        raise EnvironmentProblem(
            f"rollout.engine: {engine} does not apply an adapter on vision layers of {family.name}; it does for "
            f"{', '.join(VISION_ADAPTERS)}; set lora.targets: language, or rollout.engine: local"
        )


def make_completion(
    family: Family,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    seed: int,
    params: SamplingParams,
) -> Completion:
    """Make a Completion from an engine's answer. The text is decoded here, so that it is the same from every engine.
    A completion ends with the token that completes a stop string, which vLLM does not look for among the first
    `min_new_tokens`. Raises ImpossibleCompletion."""
    if not token_ids or len(token_ids) > params.max_new_tokens:
        raise ImpossibleCompletion(f"token_ids: got {len(token_ids)}; expected 1 to {params.max_new_tokens}")
    if len(logprobs) != len(token_ids):
        raise ImpossibleCompletion(f"logprobs: got {len(logprobs)} for {len(token_ids)} token_ids")
    ids_L = torch.tensor(list(token_ids), dtype=torch.int64)
    logprobs_L = torch.tensor(list(logprobs), dtype=torch.float32)
    _require_possible(family, ids_L, logprobs_L)
    if (length := _early_stop(family, token_ids, params)) is not None:
        token_ids, ids_L, logprobs_L, finish_reason = token_ids[:length], ids_L[:length], logprobs_L[:length], "stop"
    logprobs_L[: params.min_new_tokens] = math.nan
    has_end = token_ids[-1] in family.checkpoint.end_token_ids
    if finish_reason == "stop" and not has_end and not params.stop:
        raise ImpossibleCompletion(
            f"finish_reason: got 'stop', but token_ids ends with {token_ids[-1]}, which is not an end token"
        )
    return Completion(
        token_ids_L=ids_L,
        logprobs_L=logprobs_L,
        text=written_text(family, token_ids),
        is_truncated=not has_end and finish_reason != "stop",
        seed=seed,
    )


def _early_stop(family: Family, token_ids: Sequence[int], params: SamplingParams) -> int | None:
    """Return how many tokens there are up to a stop string that ends within the first `min_new_tokens`, or None."""
    lengths = range(1, min(params.min_new_tokens, len(token_ids) - 1) + 1)
    if not params.stop or not lengths:
        return None
    ends = [token_ids[max(0, length - stop_reach(params.stop)) : length] for length in lengths]
    return next(compress(lengths, completes_a_stop(family, ends, params.stop)), None)


def _require_possible(family: Family, ids_L: Tensor, logprobs_L: Tensor) -> None:
    """Raise ImpossibleCompletion for the first token that cannot have been drawn."""
    ends = torch.tensor(family.checkpoint.end_token_ids)
    faults = (
        ("token_ids", ids_L, (ids_L < 0) | (ids_L >= family.vocabulary_size), "ids are below the vocabulary's size, "
         f"{family.vocabulary_size}"),
        ("token_ids", ids_L, family.is_placeholder(ids_L), "it stands for a picture and is never sampled"),
        ("token_ids", ids_L, torch.isin(ids_L, ends) & (torch.arange(len(ids_L)) + 1 < len(ids_L)),
         "it is an end token, but others came after it"),
        ("logprobs", logprobs_L, ~((logprobs_L > UNKNOWN) & (logprobs_L <= ROUNDING)),
         "the logprob of a sampled token is a finite number of at most 0"),
    )  # fmt: skip
    for field, values_L, is_wrong_L, reason in faults:
        if bool(is_wrong_L.any()):
            place = int(is_wrong_L.nonzero()[0])
            raise ImpossibleCompletion(f"{field}[{place}]: got {brief(values_L[place].item())}; {reason}")


def require_same_prompt(family: Family, prompt: EncodedPrompt, token_ids: Sequence[int], source: str) -> None:
    """Raise EnvironmentProblem, with the likely cause, if an engine has other prompt ids than the trainer."""
    here = prompt.token_ids_P.tolist()
    if list(token_ids) == here:
        return
    vision = set(family.placeholder_ids)
    images = [sum(token in vision for token in ids) for ids in (here, token_ids)]
    start = f"{source}: row {prompt.row.id}: the engine's prompt is not the trainer's"
    if images[0] != images[1]:
        settings = processor_settings(family, has_videos=any(image.plan.fps is not None for image in prompt.images))
        raise EnvironmentProblem(
            f"{start}: vLLM has {images[1]} image tokens, the trainer {images[0]}; its picture limits differ: start "
            f"vLLM with --mm-processor-kwargs '{json.dumps(settings)}'"
        )
    place = next((i for i, (a, b) in enumerate(zip(here, token_ids, strict=False)) if a != b), len(here))
    texts = [family.tokenizer.decode(list(ids[max(0, place - 4) : place + 8])) for ids in (here, token_ids)]
    raise EnvironmentProblem(
        f"{start} from token {place} on: vLLM has {texts[1]!r}, the trainer {texts[0]!r}; its chat template or "
        "tokenizer differs: start vLLM with the same checkpoint, and pass the trainer's own template with "
        "--chat-template"
    )


def processor_settings(family: Family, *, has_videos: bool) -> dict[str, Any]:
    """Return vLLM's --mm-processor-kwargs: the family's pixel limits, and that videos are taken as they are."""
    limits = {"min_pixels": family.min_pixels, "max_pixels": family.max_pixels}
    settings: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    return settings | ({"videos_kwargs": {"do_resize": False, "do_sample_frames": False}} if has_videos else {})


def visual_data(family: Family, images: Sequence[EncodedImage]) -> dict[str, list[Any]]:
    """Return vLLM's `multi_modal_data`: images, and videos as their frames (frames, y, x, 3) with their times."""
    data: dict[str, list[Any]] = {}
    for image in images:
        if image.plan.fps is None:
            data.setdefault("image", []).append(picture_image(image.views[0]))
        else:
            count, fps = len(image.views), family.told_fps(image.plan)
            times = {"fps": fps, "total_num_frames": count, "frames_indices": list(range(count))}
            data.setdefault("video", []).append((torch.stack(image.views).numpy(), times | {"do_sample_frames": False}))
    return data


def add_sampled(builder: TrajectoryBuilder, turn: Completion) -> "Future[TurnReply] | None":
    """Add what vLLM sampled. Returns the future reply, or None if the trajectory has ended."""
    return builder.add_turn(turn.token_ids_L.tolist(), turn.logprobs_L.tolist(), is_truncated=turn.is_truncated)
