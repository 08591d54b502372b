"""The `local` engine: the trained model itself samples. Each prompt has one prefill; its group shares keys and values.

Shape suffixes: docs/shapes.md. B are the prompts of a batch, R the rows that are being decoded (B x group size at
first).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiercel.config.schema import Rollout
from tiercel.models.attention import shared_prefix_obstacle
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.rollout.captured import CapturedDecoder
from tiercel.rollout.decoding import Decoder, RepeatedDecoder, SharedDecoder
from tiercel.rollout.drawing import filtered, race
from tiercel.rollout.prepacking import PrepackedLinears
from tiercel.rollout.sampler import SamplingParams
from tiercel.types import Completion, EncodedPrompt, Group

PREPACKED_BYTES = Rollout().prepacked_bytes  # where there is no recipe
TOKENS_IN_FLIGHT = 2**18  # tokens of prompts and completions, over all rows, whose keys and values fit at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequences:
    """Holds the tokens decoded so far. Its rows are all rows of the batch, also those that have ended."""

    token_ids_RL: Tensor  # -1 after the last token
    logprobs_RL: Tensor
    lengths_R: Tensor
    ended_R: Tensor


class LocalSampler:
    """Samples with transformers' own forward pass, in batches of prompts. `whole_policy`: a context in which this rank
    has all weights. `weights_stay`: it always has them, so that captured graphs and copies stay valid. `beat` is called
    for each token."""

    shares_weights = True

    def __init__(
        self,
        policy: Policy,
        vision: VisionStore,
        *,
        weights_stay: bool = True,
        prepacked_bytes: int = PREPACKED_BYTES,
        whole_policy: Callable[[], AbstractContextManager[None]] = nullcontext,
        beat: Callable[[], None] = lambda: None,
    ):
        self.policy = policy
        self.family = policy.family
        self.decoder = build_decoder(policy, vision, may_capture=weights_stay)
        self.linears = PrepackedLinears(policy, prepacked_bytes if weights_stay else None)
        self.awake = whole_policy
        self.beat = beat
        self.version = 0

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is closed: this engine has no resources of its own."""

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        self.policy.model.eval()
        groups: list[Group] = []
        with self.linears.of_present_weights():
            for batch in _batches(prompts, params):
                with self.policy.autocast(keeps_casts=self.decoder.keeps_casts):
                    groups += self._sample_batch([prompts[i] for i in batch], params, [seeds[i] for i in batch])
        return tuple(groups)

    def _sample_batch(self, prompts: list[EncodedPrompt], params: SamplingParams, seeds: list[int]) -> list[Group]:
        size = params.group_size
        logits_BV = self._prefill(prompts, params)
        seeds_R = torch.tensor([seed + i for seed in seeds for i in range(size)], device=self.policy.device)
        with self.linears.in_place():
            sequences = self._decode(logits_BV.repeat_interleave(size, 0), seeds_R, params)
        completions = self._completions(sequences, seeds_R.tolist())
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

    def _decode(self, logits_RV: Tensor, seeds_R: Tensor, params: SamplingParams) -> _Sequences:
        """Draw tokens until every row has ended or has `max_new_tokens`."""
        device, rows = logits_RV.device, len(seeds_R)
        sequences = _Sequences(
            token_ids_RL=torch.full((rows, params.max_new_tokens), -1, device=device),
            logprobs_RL=torch.zeros(rows, params.max_new_tokens, device=device),
            lengths_R=torch.zeros(rows, dtype=torch.int64, device=device),
            ended_R=torch.zeros(rows, dtype=torch.bool, device=device),
        )
        end_ids = torch.tensor(self.family.checkpoint.end_token_ids, device=device)
        live = torch.arange(rows, device=device)  # rows in the decoder's batch, as places in `sequences`
        for position in range(params.max_new_tokens):
            drawn_R, logprobs_R = self._draw(logits_RV, seeds_R[live], position, end_ids, params)
            is_open_R = ~sequences.ended_R[live]  # rows that have ended may stay in the batch; their draws are ignored
            writing = live[is_open_R]
            sequences.token_ids_RL[writing, position] = drawn_R[is_open_R]
            sequences.logprobs_RL[writing, position] = logprobs_R[is_open_R]
            sequences.lengths_R[writing] = position + 1
            ends_R = torch.isin(drawn_R[is_open_R], end_ids)
            if params.stop:
                ends_R |= self._completes_a_stop(sequences.token_ids_RL[writing, : position + 1], params.stop)
            sequences.ended_R[writing] = ends_R
            going_on = (~sequences.ended_R[live]).nonzero()[:, 0]
            if position + 1 == params.max_new_tokens or len(going_on) == 0:
                break
            if len(live) - len(going_on) > self.decoder.patience * len(live):
                self.decoder.keep(going_on)
                live, drawn_R = live[going_on], drawn_R[going_on]
            logits_RV = self.decoder.step(drawn_R)
            self.beat()
        return sequences

    def _draw(
        self, logits_RV: Tensor, seeds_R: Tensor, position: int, end_ids: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draw a token in each row. Returns tokens (R,) and their logprobs (R,) under log-softmax(logits / temperature)
        without vision placeholders."""
        logits_RV = logits_RV.float()
        if params.temperature != 1:
            logits_RV = logits_RV / params.temperature
        logits_RV[:, [i for i in self.family.placeholder_ids if i < logits_RV.shape[1]]] = -torch.inf
        ends_lse_R = None
        if position < params.min_new_tokens:
            ends_lse_R = logits_RV[:, end_ids].logsumexp(-1)
            logits_RV[:, end_ids] = -torch.inf
        highest_R1 = logits_RV.amax(-1, keepdim=True)
        weights_RV = (logits_RV - highest_R1).exp_()
        lse_R = highest_R1[:, 0] + weights_RV.sum(-1).log()
        if ends_lse_R is not None:
            lse_R = torch.logaddexp(lse_R, ends_lse_R)
        if params.greedy:
            drawn_R = logits_RV.argmax(-1)
        else:
            if params.top_k or params.top_p < 1:
                weights_RV = weights_RV.masked_fill(filtered(logits_RV, params.top_k, params.top_p).isneginf(), 0.0)
            drawn_R = race(weights_RV, seeds_R, torch.full_like(seeds_R, position))
        return drawn_R, logits_RV.gather(1, drawn_R[:, None])[:, 0] - lse_R

    def _completes_a_stop(self, token_ids_RL: Tensor, stop: tuple[str, ...]) -> Tensor:
        reach = max(len(text.encode()) for text in stop) + 4  # every token is a byte or more
        texts = self.family.tokenizer.batch_decode(token_ids_RL[:, -reach:].tolist())
        found = [any(text in tail for text in stop) for tail in texts]
        return torch.tensor(found, device=token_ids_RL.device)

    def _completions(self, sequences: _Sequences, seeds: list[int]) -> list[Completion]:
        token_ids_RL, logprobs_RL = sequences.token_ids_RL.cpu(), sequences.logprobs_RL.cpu()
        completions = []
        ends = set(self.family.checkpoint.end_token_ids)
        rows = zip(sequences.lengths_R.tolist(), sequences.ended_R.tolist(), seeds, strict=True)
        for row, (length, ended, seed) in enumerate(rows):
            ids_L = token_ids_RL[row, :length].clone()
            said = ids_L[:-1] if int(ids_L[-1]) in ends else ids_L
            completions.append(
                Completion(
                    token_ids_L=ids_L,
                    logprobs_L=logprobs_RL[row, :length].clone(),
                    text=self.family.tokenizer.decode(said.tolist()),
                    is_truncated=not ended,
                    seed=seed,
                )
            )
        return completions


def build_decoder(policy: Policy, vision: VisionStore, *, may_capture: bool = True) -> Decoder:
    """Choose the fastest decoder for the model and the device. A graph is captured only on a GPU with `may_capture`,
    which is false where hooks of FSDP2 wait for streams. It is not captured where autocast casts all weights, without
    an adapter, because these casts are kept from token to token."""
    if shared_prefix_obstacle(policy.family.language_model(policy.model).config):
        return RepeatedDecoder(policy, vision)
    if may_capture and policy.device.type == "cuda" and (policy.peft is not None or not policy.needs_autocast):
        return CapturedDecoder(policy, vision)
    return SharedDecoder(policy, vision)


def _batches(prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[list[int]]:
    """Divide the prompts, in order, into batches of at most TOKENS_IN_FLIGHT padded tokens. Returns their places."""
    batches: list[list[int]] = []
    widest = 0
    for i, prompt in enumerate(prompts):
        widest = max(widest, len(prompt.token_ids_P))
        rows = (len(batches[-1]) + 1 if batches else 1) * params.group_size
        if not batches or rows * (widest + params.max_new_tokens) > TOKENS_IN_FLIGHT:
            batches.append([])
            widest = len(prompt.token_ids_P)
        batches[-1].append(i)
    return batches
