"""The `local` engine: the trained model itself samples. One prefill per prompt, its KV shared by the group.

Shape suffixes: B prompts of a batch, P their longest length, R rows being decoded (B x group size), V vocabulary,
H hidden size, D position dimensions, C tokens of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.rollout.drawing import filtered, gumbel_noise
from tiercel.rollout.sampler import SamplingParams
from tiercel.types import Completion, EncodedPrompt, Group

TOKENS_IN_FLIGHT = 2**18  # prompt and completion tokens, over all rows, whose KV is held at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequences:
    """What was decoded so far, in rows that never move; -1 fills what is not there yet."""

    token_ids_RC: Tensor
    logprobs_RC: Tensor
    lengths_R: Tensor
    ended_R: Tensor


class LocalSampler:
    """Samples with transformers' own forward pass, in batches of prompts."""

    def __init__(self, policy: Policy, vision: VisionStore):
        self.policy = policy
        self.vision = vision
        self.family = policy.family
        self.language_model = policy.family.language_model(policy.model)
        self.embedding = policy.model.get_input_embeddings()
        self.head = policy.model.get_output_embeddings()
        self.version = 0

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        self.version = version

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        self.policy.model.eval()
        groups: list[Group] = []
        for batch in _batches(prompts, params):
            with self.policy.autocast():
                groups += self._sample_batch([prompts[i] for i in batch], params, [seeds[i] for i in batch])
        return tuple(groups)

    def _sample_batch(self, prompts: list[EncodedPrompt], params: SamplingParams, seeds: list[int]) -> list[Group]:
        device = self.policy.device
        size = params.group_size
        logits_BV, cache = self._prefill(prompts)
        cache.batch_repeat_interleave(size)
        seeds_R = torch.tensor([seed + i for seed in seeds for i in range(size)], device=device)
        lengths_R = torch.tensor([len(p.token_ids_P) for p in prompts], device=device).repeat_interleave(size)
        starts = [int(p.positions_DP.max()) + 1 for p in prompts]
        starts_R = torch.tensor(starts, device=device).repeat_interleave(size)
        sequences = self._decode(logits_BV.repeat_interleave(size, 0), cache, lengths_R, starts_R, seeds_R, params)
        completions = self._completions(sequences, seeds_R.tolist())
        return [
            Group(
                prompt=prompt,
                completions=tuple(completions[i * size : (i + 1) * size]),
                policy_version=self.version,
            )
            for i, prompt in enumerate(prompts)
        ]

    def _prefill(self, prompts: list[EncodedPrompt]) -> tuple[Tensor, DynamicCache]:
        """Logits (B, V) after each prompt, and the KV of all, padded on the right."""
        device = self.policy.device
        ids_BP = nn.utils.rnn.pad_sequence([p.token_ids_P for p in prompts], batch_first=True).to(device)
        positions = [p.positions_DP.T for p in prompts]
        positions_DBP = nn.utils.rnn.pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device)
        lengths_B = torch.tensor([len(p.token_ids_P) for p in prompts], device=device)
        embeddings_BPH = self.embedding(ids_BP)
        features_KH = self.vision.features([image for p in prompts for image in p.images])
        if features_KH is not None:
            is_prompt_BP = torch.arange(ids_BP.shape[1], device=device) < lengths_B[:, None]
            is_vision_BP = self.family.is_placeholder(ids_BP) & is_prompt_BP
            embeddings_BPH = embeddings_BPH.masked_scatter(
                is_vision_BP[..., None], features_KH.to(embeddings_BPH.dtype)
            )
        cache = DynamicCache()
        hidden_BPH = self.language_model(
            inputs_embeds=embeddings_BPH,
            position_ids=positions_DBP if len(positions_DBP) == 3 else positions_DBP[0],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        last_BH = hidden_BPH[torch.arange(len(prompts), device=device), lengths_B - 1]
        return self.head(last_BH), cache

    def _decode(
        self,
        logits_RV: Tensor,
        cache: DynamicCache,
        lengths_R: Tensor,
        starts_R: Tensor,
        seeds_R: Tensor,
        params: SamplingParams,
    ) -> _Sequences:
        device = logits_RV.device
        rows, width = len(lengths_R), int(lengths_R.max())
        sequences = _Sequences(
            token_ids_RC=torch.full((rows, params.max_new_tokens), -1, device=device),
            logprobs_RC=torch.zeros(rows, params.max_new_tokens, device=device),
            lengths_R=torch.zeros(rows, dtype=torch.int64, device=device),
            ended_R=torch.zeros(rows, dtype=torch.bool, device=device),
        )
        end_ids = torch.tensor(self.family.checkpoint.end_token_ids, device=device)
        live = torch.arange(rows, device=device)  # rows still in the batch, as places in `sequences`
        sees_RP = torch.arange(width, device=device) < lengths_R[:, None]
        for position in range(params.max_new_tokens):
            drawn_R, logprobs_R = self._draw(logits_RV, seeds_R[live], position, end_ids, params)
            sequences.token_ids_RC[live, position] = drawn_R
            sequences.logprobs_RC[live, position] = logprobs_R
            sequences.lengths_R[live] = position + 1
            ended_R = torch.isin(drawn_R, end_ids)
            if params.stop:
                ended_R |= self._completes_a_stop(sequences.token_ids_RC[live, : position + 1], params.stop)
            sequences.ended_R[live] = ended_R
            if position + 1 == params.max_new_tokens or bool(ended_R.all()):
                break
            if bool(ended_R.any()):
                kept = (~ended_R).nonzero()[:, 0]
                cache.batch_select_indices(kept)
                live, sees_RP, drawn_R = live[kept], sees_RP[kept], drawn_R[kept]
            sees_RP = torch.cat([sees_RP, sees_RP.new_ones(len(live), 1)], dim=1)
            position_R1 = (starts_R[live] + position)[:, None]
            hidden_R1H = self.language_model(
                inputs_embeds=self.embedding(drawn_R[:, None]),
                position_ids=position_R1.expand(3, -1, -1) if self.family.position_dimensions == 3 else position_R1,
                attention_mask=sees_RP[:, None, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            logits_RV = self.head(hidden_R1H[:, 0])
        return sequences

    def _draw(
        self, logits_RV: Tensor, seeds_R: Tensor, position: int, end_ids: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their logprobs under log-softmax(logits / temperature) without vision placeholders."""
        logits_RV = logits_RV.float() / params.temperature
        logits_RV[:, [i for i in self.family.placeholder_ids if i < logits_RV.shape[1]]] = -torch.inf
        logprobs_RV = logits_RV.log_softmax(-1)
        if position < params.min_new_tokens:
            logits_RV[:, end_ids] = -torch.inf
        if not params.greedy:
            logits_RV = filtered(logits_RV, params.top_k, params.top_p)
            positions_R = torch.full_like(seeds_R, position)
            logits_RV = logits_RV + gumbel_noise(seeds_R, positions_R, logits_RV.shape[1])
        drawn_R = logits_RV.argmax(-1)
        return drawn_R, logprobs_RV.gather(1, drawn_R[:, None])[:, 0]

    def _completes_a_stop(self, token_ids_RC: Tensor, stop: tuple[str, ...]) -> Tensor:
        reach = max(len(text.encode()) for text in stop) + 4  # every token is a byte or more
        texts = self.family.tokenizer.batch_decode(token_ids_RC[:, -reach:].tolist())
        found = [any(text in tail for text in stop) for tail in texts]
        return torch.tensor(found, device=token_ids_RC.device)

    def _completions(self, sequences: _Sequences, seeds: list[int]) -> list[Completion]:
        token_ids_RC, logprobs_RC = sequences.token_ids_RC.cpu(), sequences.logprobs_RC.cpu()
        completions = []
        ends = set(self.family.checkpoint.end_token_ids)
        rows = zip(sequences.lengths_R.tolist(), sequences.ended_R.tolist(), seeds, strict=True)
        for row, (length, ended, seed) in enumerate(rows):
            ids_C = token_ids_RC[row, :length].clone()
            said = ids_C[:-1] if int(ids_C[-1]) in ends else ids_C
            completions.append(
                Completion(
                    token_ids_C=ids_C,
                    logprobs_C=logprobs_RC[row, :length].clone(),
                    text=self.family.tokenizer.decode(said.tolist()),
                    is_truncated=not ended,
                    seed=seed,
                )
            )
        return completions


def _batches(prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[list[int]]:
    """Prompts in order, cut where the padded KV of all rows would exceed TOKENS_IN_FLIGHT."""
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
