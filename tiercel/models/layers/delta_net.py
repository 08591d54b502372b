"""Gated-delta-net layers (Yang et al. 2024, https://arxiv.org/abs/2412.06464), as in Qwen3.5. Such a layer has a state
instead of keys and values; each token changes it and reads it. The state after a prompt branches to the prompt's
completions, so the prompt is run once.

Only the part between the projections of a layer is replaced here. The rule itself is transformers', which uses the
kernels of flash-linear-attention if that package is installed. Shape suffixes: docs/shapes.md. Here A are the heads of
the values, and O the channels of the convolution: queries, keys and values side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

BRANCHING_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")  # `model_type` of decoders whose layers are routed here


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTokens:
    """What tokens contribute to a layer's state."""

    mixed_RTO: Tensor  # queries, keys and values before the convolution
    log_decay_RTA: Tensor  # fp32, at most 0: a token first multiplies the state by the exponential of this
    rate_RTA: Tensor  # 0 to 1: the share of the state's entry under the token's key that is replaced

    def rows(self, places_RL: Tensor, is_padding_RL: Tensor) -> "DeltaTokens":
        """Gather rows of tokens from a pack (R is 1 here). Padding leaves the state unchanged."""
        of_pack = (self.mixed_RTO[0], self.log_decay_RTA[0], self.rate_RTA[0])
        mixed, log_decay, rate = (each.index_select(0, places_RL.flatten()) for each in of_pack)
        shape = places_RL.shape
        rows = DeltaTokens(
            mixed_RTO=mixed.unflatten(0, shape),
            log_decay_RTA=log_decay.unflatten(0, shape),
            rate_RTA=rate.unflatten(0, shape),
        )
        return rows.without(is_padding_RL)

    def without(self, is_padding_RT: Tensor) -> "DeltaTokens":
        """Prevent the padding from changing the state."""
        return replace(
            self,
            log_decay_RTA=self.log_decay_RTA.masked_fill(is_padding_RT[..., None], 0.0),
            rate_RTA=self.rate_RTA.masked_fill(is_padding_RT[..., None], 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaState:
    """The state of a layer after some tokens, for each row."""

    recent: Tensor  # (R, taps - 1, O), the last inputs of the convolution
    memory_RAEE: Tensor  # fp32, indexed by key and value

    def of(self, rows: Tensor) -> "DeltaState":
        """Select rows; a row that is named several times is copied."""
        return DeltaState(recent=self.recent[rows], memory_RAEE=self.memory_RAEE[rows])

    @staticmethod
    def joined(states: Sequence["DeltaState"]) -> "DeltaState":
        """Put the rows of several states one after another."""
        return DeltaState(
            recent=torch.cat([state.recent for state in states]),
            memory_RAEE=torch.cat([state.memory_RAEE for state in states]),
        )


class DeltaScan:
    """The recurrence of one layer."""

    def __init__(self, module: Any):
        self.module = module
        self.taps = module.conv1d.weight.shape[-1]

    def __call__(
        self, tokens: DeltaTokens, lengths_R: Tensor, start: DeltaState | None = None
    ) -> tuple[Tensor, DeltaState]:
        """Run rows of tokens from `start`, or from an empty state, and return the output (R, T, A, E) of each token and
        the state after the first `lengths_R` tokens of each row."""
        mixed_RTO = tokens.mixed_RTO
        rows, _, channels = mixed_RTO.shape
        recent = mixed_RTO.new_zeros(rows, self.taps - 1, channels) if start is None else start.recent.to(mixed_RTO)
        inputs_RTO = torch.cat([recent, mixed_RTO], dim=1)
        query, key, value = self._convolved(inputs_RTO)
        output_RTAE, memory_RAEE = self._rule("torch_chunk_gated_delta_rule", mixed_RTO.device)(
            query,
            key,
            value,
            g=tokens.log_decay_RTA,
            beta=tokens.rate_RTA,
            initial_state=None if start is None else start.memory_RAEE,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        last = lengths_R[:, None] + torch.arange(self.taps - 1, device=lengths_R.device)
        end = inputs_RTO.gather(1, last[..., None].expand(-1, -1, channels))
        return output_RTAE, DeltaState(recent=end, memory_RAEE=memory_RAEE)

    def step(self, tokens: DeltaTokens, state: DeltaState) -> Tensor:
        """Run one token of every row, changing `state` in place, and return the output (R, 1, A, E)."""
        inputs_RTO = torch.cat([state.recent, tokens.mixed_RTO.to(state.recent)], dim=1)
        query, key, value = self._convolved(inputs_RTO.to(tokens.mixed_RTO))
        output_R1AE, memory_RAEE = self._rule("torch_recurrent_gated_delta_rule", inputs_RTO.device)(
            query,
            key,
            value,
            g=tokens.log_decay_RTA,
            beta=tokens.rate_RTA,
            initial_state=state.memory_RAEE,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        state.recent.copy_(inputs_RTO[:, 1:])
        state.memory_RAEE.copy_(memory_RAEE)
        return output_R1AE

    def _convolved(self, inputs_RTO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (R, T, A, E) of the tokens after the first taps - 1."""
        module = self.module
        mixed = conv1d(inputs_RTO.transpose(1, 2), module.conv1d.weight, module.conv1d.bias, groups=module.conv_dim)
        mixed_RTO = silu(mixed).transpose(1, 2)
        parts = mixed_RTO.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        sizes = (module.head_k_dim, module.head_k_dim, module.head_v_dim)
        query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        repeats = module.num_v_heads // module.num_k_heads
        return query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2), value

    def _rule(self, name: str, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
        rule = getattr(import_module(type(self.module).__module__), name)
        return unwrap(rule) if device.type == "cpu" else rule  # the kernels need a GPU, and wrap the plain rule


def rule_in_use(language_model: nn.Module, device: torch.device) -> str | None:
    """Return what computes the recurrence of a decoder's delta nets, or None if it has none."""
    config: Any = language_model.config
    if config.model_type not in BRANCHING_MODELS:
        return None
    if device.type == "cpu":
        return "transformers' own code"
    try:
        import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # as transformers does, which then uses its own code
        return f"transformers' own code; flash-linear-attention, whose kernels are faster, cannot be imported: {error}"
    return "flash-linear-attention"


def route_delta_nets(language_model: nn.Module) -> None:
    """Make the delta nets of a decoder use the form that is passed to its forward pass as `attention_form`."""
    config: Any = language_model.config
    if config.model_type not in BRANCHING_MODELS:
        return
    for module in language_model.modules():
        if hasattr(module, "A_log"):
            module.forward = partial(_routed, module, module.forward)


def _routed(
    module: Any, original: Callable[..., Tensor], hidden_states: Tensor, *, attention_form: Any = None, **options: Any
) -> Tensor:
    if attention_form is None:
        return original(hidden_states, **options)
    tokens = DeltaTokens(
        mixed_RTO=module.in_proj_qkv(hidden_states),
        log_decay_RTA=-module.A_log.float().exp() * softplus(module.in_proj_a(hidden_states).float() + module.dt_bias),
        rate_RTA=module.in_proj_b(hidden_states).sigmoid(),
    )
    output_RTAE = attention_form.form.recur(module.layer_idx, tokens, DeltaScan(module))
    gate = module.in_proj_z(hidden_states).reshape(-1, module.head_v_dim)
    normed = module.norm(output_RTAE.reshape(-1, module.head_v_dim), gate)
    return module.out_proj(normed.reshape(*hidden_states.shape[:2], -1))
