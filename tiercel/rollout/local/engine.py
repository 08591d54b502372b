"""The `local` engine: the trained model itself samples. Each prompt has one prefill; its group shares keys and values.

Shape suffixes: docs/shapes.md. B are the prompts of a batch, R the rows that are being decoded (B x group size at
first).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiercel.config.schema import Rollout
from tiercel.devices import is_reproducible, moved
from tiercel.errors import EnvironmentProblem
from tiercel.models.families.base import Family
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.compiling import default_backend
from tiercel.rollout.dialogue import Dialogues
from tiercel.rollout.local.cuda_graphs import CapturedStep, FixedDecoder
from tiercel.rollout.local.decoding import Decoder, RepeatedDecoder, SharedDecoder
from tiercel.rollout.local.decoding_weights import NarrowLinears, PrepackedLinears
from tiercel.rollout.local.turns import TurnSettings, sample_turns
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.token_sampling import TokenDraw
from tiercel.rollout.trajectory import (
    begun_trajectories,
    completes_a_stop,
    ended_trajectories,
    stop_reach,
    written_text,
)
from tiercel.types import Completion, EncodedPrompt, Group

PREPACKED_BYTES = Rollout().prepacked_bytes  # used if there is no recipe
TOKENS_IN_FLIGHT = 2**18  # tokens of prompts and completions, over all rows, whose keys and values fit at the same time
KEPT_BYTES = 2**31  # of a GPU, that decoding may hold while the learner works
# Kinds of layers, by transformers' names, that keep keys and values alone.
KEYS_AND_VALUES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
LOOK_EVERY = 8  # tokens between the waits of an accelerator's host to learn which rows have ended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequences:
    """The tokens decoded so far. It has all rows of the batch, including those that have ended."""

    token_ids_RL: Tensor  # -1 after the last token
    logprobs_RL: Tensor
    ended_R: Tensor

    def add(self, live: Tensor, position: int, token_ids_R: Tensor, logprobs_R: Tensor) -> Tensor:
        """Add a token to those of the rows `live` that have not ended. Returns which of them have."""
        has_ended_R = self.ended_R[live]
        self.token_ids_RL[live, position] = token_ids_R.masked_fill(has_ended_R, -1)
        self.logprobs_RL[live, position] = logprobs_R
        return has_ended_R


def _empty(rows: int, max_new_tokens: int, device: torch.device) -> _Sequences:
    return _Sequences(
        token_ids_RL=torch.full((rows, max_new_tokens), -1, device=device),
        logprobs_RL=torch.zeros(rows, max_new_tokens, device=device),
        ended_R=torch.zeros(rows, dtype=torch.bool, device=device),
    )


class LocalSampler:
    """Sampler that uses transformers' own forward pass, in batches of prompts. `whole_policy` is a context in which
    this rank has all weights. `weights_stay` means that it always has them, so that captured graphs and copies stay
    valid. On a GPU, layers are compiled for captured steps with `may_compile`. `beat` is called for each token."""

    shares_weights = True

    def __init__(
        self,
        policy: Policy,
        vision: VisionStore,
        *,
        weights_stay: bool = True,
        may_compile: bool = True,
        prepacked_bytes: int = PREPACKED_BYTES,
        whole_policy: Callable[[], AbstractContextManager[None]] = nullcontext,
        beat: Callable[[], None] = lambda: None,
    ):
        self.policy = policy
        self.family = policy.family
        self.decoder = build_decoder(policy, vision, may_capture=weights_stay, may_compile=may_compile)
        self.weights = decoding_weights(policy, self.decoder, prepacked_bytes if weights_stay else None)
        self.look_every = 1 if policy.device.type == "cpu" else LOOK_EVERY
        self.is_deterministic = is_reproducible(policy.device)
        self.kept_bytes = 0 if policy.device.type == "cpu" else KEPT_BYTES
        self.awake = whole_policy
        self.beat = beat
        self.version = 0

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: this engine has no resources of its own."""

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        seeds: Sequence[int],
        dialogues: Dialogues | None = None,
    ) -> tuple[Group, ...]:
        self.policy.model.eval()
        groups: list[Group] = []
        longest = params.max_new_tokens
        if dialogues is not None:
            longest = max((dialogues.limits_of(prompt).max_tokens for prompt in prompts), default=0)
        with self.weights.of_present_weights():
            for batch in _batches(prompts, params.group_size, longest, isinstance(self.decoder, SharedDecoder)):
                with self.policy.autocast(keeps_casts=self.decoder.keeps_casts):
                    of_batch = [prompts[i] for i in batch], params, [seeds[i] for i in batch]
                    if dialogues is None:
                        groups += self._sample_batch(*of_batch)
                    else:
                        groups += self._sample_trajectories(*of_batch, dialogues)
        if self.decoder.held_bytes + self.weights.held_bytes > self.kept_bytes:
            self.decoder.release()
            self.weights.release()
        return tuple(groups)

    def _sample_batch(self, prompts: list[EncodedPrompt], params: SamplingParams, seeds: list[int]) -> list[Group]:
        size = params.group_size
        logits_BV = self._prefill(prompts, params)
        of_rows = [seed + i for seed in seeds for i in range(size)]
        with self.weights.in_place():
            sequences = self._decode(logits_BV.repeat_interleave(size, 0), of_rows, params)
        return self._groups(prompts, self._completions(sequences, of_rows))

    def _sample_trajectories(
        self, prompts: list[EncodedPrompt], params: SamplingParams, seeds: list[int], dialogues: Dialogues
    ) -> list[Group]:
        size = params.group_size
        builders = list(chain(*begun_trajectories(self.family, prompts, params, seeds, dialogues)))
        logits_BV = self.decoder.prefill(prompts, size, params.max_new_tokens, rows_return=True)
        settings = TurnSettings(
            family=self.family, params=params, is_deterministic=self.is_deterministic, beat=self.beat
        )
        with self.weights.in_place():
            sample_turns(settings, self.decoder, builders, logits_BV.repeat_interleave(size, 0))
        return self._groups(prompts, ended_trajectories(builders, self.beat))

    def _groups(self, prompts: list[EncodedPrompt], completions: list[Completion]) -> list[Group]:
        """Group the completions by prompt, in order."""
        size = len(completions) // len(prompts)
        return [
            Group(
                prompt=prompt,
                completions=tuple(completions[i * size : (i + 1) * size]),
                policy_version=self.version,
            )
            for i, prompt in enumerate(prompts)
        ]

    def _prefill(self, prompts: list[EncodedPrompt], params: SamplingParams) -> Tensor:
        """Run the prompts. Returns the logits (B, V) after each."""
        return self.decoder.prefill(prompts, params.group_size, params.max_new_tokens)

    def _decode(self, logits_RV: Tensor, seeds: Sequence[int], params: SamplingParams) -> _Sequences:
        """Draw tokens until every row has ended or has `max_new_tokens`. Rows that have ended stay in the batch until
        the next look; their draws are ignored."""
        device = logits_RV.device
        sequences = _empty(len(seeds), params.max_new_tokens, device)
        draw = TokenDraw(params, self.family, logits_RV.shape[1], device, self.decoder.backend)
        look_every = 1 if params.stop else self.look_every
        places = list(range(len(seeds)))  # of the rows in the decoder's batch, among all rows
        live, seeds_R = (moved(torch.tensor(numbers), device) for numbers in (places, seeds))
        for position in range(params.max_new_tokens):
            is_early_R = torch.ones_like(live, dtype=torch.bool) if position < params.min_new_tokens else None
            drawn_R, logprobs_R = draw(logits_RV, seeds_R, torch.full_like(seeds_R, position), is_early_R)
            has_ended_R = sequences.add(live, position, drawn_R, logprobs_R)
            ends_R = draw.ends(drawn_R)
            if params.stop:
                ends_R |= self._completes_a_stop(sequences.token_ids_RL[live, : position + 1], params.stop)
            sequences.ended_R[live] = has_ended_R | ends_R
            if position + 1 == params.max_new_tokens:
                break
            if (position + 1) % look_every == 0:
                kept = self._kept(sequences, places)
                if not kept:
                    break
                if len(kept) < len(places):
                    self.decoder.keep(kept)
                    places = [places[i] for i in kept]
                    live = moved(torch.tensor(places), device)
                    remaining = moved(torch.tensor(kept), device)
                    seeds_R, drawn_R = seeds_R[remaining], drawn_R[remaining]
            logits_RV = self.decoder.step(drawn_R)
            self.beat()
        return sequences

    def _kept(self, sequences: _Sequences, places: list[int]) -> list[int]:
        """Wait for the device, and return the rows of the batch to decode further: those that go on, and as many others
        as the decoder wants. Empty if all have ended."""
        ended = sequences.ended_R.tolist()
        going_on = [i for i, place in enumerate(places) if not ended[place]]
        if not going_on:
            return []
        others = [i for i, place in enumerate(places) if ended[place]]
        return sorted(going_on + others[: self.decoder.rows_for(len(going_on)) - len(going_on)])

    def _completes_a_stop(self, token_ids_RL: Tensor, stop: tuple[str, ...]) -> Tensor:
        tails = [[i for i in ids if i >= 0] for ids in token_ids_RL[:, -stop_reach(stop) :].tolist()]
        return moved(torch.tensor(completes_a_stop(self.family, tails, stop)), token_ids_RL.device)

    def _completions(self, sequences: _Sequences, seeds: Sequence[int]) -> list[Completion]:
        token_ids_RL, logprobs_RL = sequences.token_ids_RL.cpu(), sequences.logprobs_RL.cpu()
        lengths_R = (token_ids_RL >= 0).sum(1)
        completions = []
        rows = zip(lengths_R.tolist(), sequences.ended_R.tolist(), seeds, strict=True)
        for row, (length, ended, seed) in enumerate(rows):
            ids_L = token_ids_RL[row, :length].clone()
            completions.append(
                Completion(
                    token_ids_L=ids_L,
                    logprobs_L=logprobs_RL[row, :length].clone(),
                    text=written_text(self.family, ids_L.tolist()),
                    is_truncated=not ended,
                    seed=seed,
                )
            )
        return completions


def build_decoder(
    policy: Policy, vision: VisionStore, *, may_capture: bool = True, may_compile: bool = True
) -> Decoder:
    """Choose the fastest decoder for the model and the device. Steps are captured, and compiled before with
    `may_compile`, only on a GPU with `may_capture`. It is false if weights are gathered for a rollout: they lie
    elsewhere each time, and hooks of FSDP2 wait for streams. Raises EnvironmentProblem as `require_decodable` does."""
    require_decodable(policy.family, policy.family.language_model(policy.model).config)
    if policy.family.sharing_obstacle(policy.family.language_model(policy.model).config):
        return RepeatedDecoder(policy, vision)
    if policy.device.type == "cpu":
        return SharedDecoder(policy, vision)
    if may_capture and policy.device.type == "cuda":
        return FixedDecoder(policy, vision, CapturedStep, default_backend(policy.device) if may_compile else None)
    return FixedDecoder(policy, vision, None)


def require_decodable(family: Family, config: Any) -> None:
    """Raise EnvironmentProblem if the cache of transformers would be used for layers that have more than keys and
    values, such as convolutions. `config` is the decoder's."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - KEYS_AND_VALUES)
    if others and family.sharing_obstacle(config):
        raise EnvironmentProblem(
            f"the local engine cannot sample from {family.checkpoint.path}: its layers have "
            f"{' and '.join(kind.replace('_', ' ') for kind in others)}, and the engine keeps only keys and values of "
            "tokens; set rollout.engine: vllm, or use another model"
        )


def decoding_weights(policy: Policy, decoder: Decoder, prepacked_bytes: int | None) -> NarrowLinears | PrepackedLinears:
    """Choose the copies of weights that decoding uses. `prepacked_bytes` is None if weights do not stay."""
    if isinstance(decoder, FixedDecoder) and decoder.capture is not None:
        return NarrowLinears(policy)
    return PrepackedLinears(policy, prepacked_bytes)


def _batches(
    prompts: Sequence[EncodedPrompt], group_size: int, new_tokens: int, shares_pictures: bool = False
) -> list[list[int]]:
    """Divide the prompts, in order, into batches of at most TOKENS_IN_FLIGHT padded tokens, and return their places.
    `new_tokens` is the most that a completion has. All batches but the last have a round number of prompts, so that few
    numbers of rows occur; with `shares_pictures`, neighbours that show the same picture stay together, if they fit."""
    batches: list[list[int]] = []
    start = 0
    while start < len(prompts):
        count = _fitting([len(prompt.token_ids_P) for prompt in prompts[start:]], group_size, new_tokens)
        if start + count < len(prompts):
            count -= count % 2 ** max(0, count.bit_length() - 3)
        if start + count < len(prompts) and shares_pictures:
            first = [[image.sha256 for image in prompt.images[:1]] for prompt in prompts[start : start + count + 1]]
            count = next((n for n in range(count, 0, -1) if not first[n] or first[n] != first[n - 1]), count)
        batches.append(list(range(start, start + count)))
        start += count
    return batches


def _fitting(lengths: Sequence[int], group_size: int, new_tokens: int) -> int:
    """Return how many of the first prompts fit into a batch, at least 1."""
    widest = 0
    for count, length in enumerate(lengths):
        widest = max(widest, length)
        if count and (count + 1) * group_size * (widest + new_tokens) > TOKENS_IN_FLIGHT:
            return count
    return len(lengths)
