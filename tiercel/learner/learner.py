"""The policy pass: embeddings, decoder and head as one module that a strategy can wrap.

Everything that touches a weight happens inside `Learner.forward`. Shape suffixes: T packed tokens, N scored
tokens, K vision tokens, H hidden size, D position dimensions, R rows of the repeated form, L their length.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tiercel.learner.head import TokenHead, TokenScores
from tiercel.learner.layout import PackedTokens, PackItem
from tiercel.models.policy import Policy


class Learner(nn.Module):
    """Per-token logprobs of packed groups under the current policy."""

    def __init__(self, policy: Policy, form: str, gradient_checkpointing: bool):
        super().__init__()
        self.family = policy.family
        self.autocast = policy.autocast
        self.language_model = policy.family.language_model(policy.model)
        self.embedding = policy.model.get_input_embeddings()
        self.head = TokenHead(policy.model.get_output_embeddings(), policy.family.placeholder_ids)
        self.hidden_states = FORMS[form]
        if gradient_checkpointing:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, batch: PackedTokens, features_KH: Tensor | None, temperature: float) -> TokenScores:
        """`features_KH`: vision features of `batch.images`, in their order; None without images."""
        device = self.embedding.weight.device
        token_ids_T = batch.token_ids_T.to(device)
        with self.autocast():
            embeddings_TH = self.embedding(token_ids_T)
            if features_KH is not None:
                is_vision_T = self.family.is_placeholder(token_ids_T)
                embeddings_TH = embeddings_TH.masked_scatter(is_vision_T[:, None], features_KH.to(embeddings_TH.dtype))
            hidden_NH = self.hidden_states(self.language_model, batch, embeddings_TH)
            return self.head(hidden_NH, batch.targets_N.to(device), temperature)


def dense_states(language_model: nn.Module, batch: PackedTokens, embeddings_TH: Tensor) -> Tensor:
    """Hidden states (N, H) that predict the scored tokens: prompts once, under a (T, T) mask."""
    device = embeddings_TH.device
    hidden_TH = language_model(
        inputs_embeds=embeddings_TH[None],
        position_ids=_position_ids(batch.positions_DT[:, None].to(device)),
        attention_mask=batch.layout.dense_mask(device),
        use_cache=False,
    ).last_hidden_state[0]
    return hidden_TH[batch.scoring_N.to(device)]


def repeated_states(language_model: nn.Module, batch: PackedTokens, embeddings_TH: Tensor) -> Tensor:
    """The same (N, H) by the plain computation: one causal row per completion, its prompt repeated."""
    device = embeddings_TH.device
    rows = [
        torch.cat([torch.arange(*group.prompt), torch.arange(*completion)])
        for group in batch.layout.groups
        for completion in group.completions
    ]
    places_RL = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=rows[0][0].item())
    hidden_RLH = language_model(
        inputs_embeds=embeddings_TH[places_RL.to(device)],
        position_ids=_position_ids(batch.positions_DT[:, places_RL].to(device)),
        attention_mask=None,
        use_cache=False,
    ).last_hidden_state
    row_N, column_N = _repeated_places(batch, rows)
    return hidden_RLH[row_N.to(device), column_N.to(device)]


def _repeated_places(batch: PackedTokens, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Row and column, in the repeated rows, of each scoring place."""
    columns = torch.zeros_like(batch.scoring_N)
    for number, row in enumerate(rows):
        mine = batch.continuation_of_N == number
        columns[mine] = torch.searchsorted(row, batch.scoring_N[mine])
    return batch.continuation_of_N, columns


def _position_ids(positions: Tensor) -> Tensor:
    """Positions (D, rows, length) as transformers takes them: three dimensions whole, a single one bare."""
    return positions if positions.shape[0] == 3 else positions[0]


FORMS: dict[str, Callable[[nn.Module, PackedTokens, Tensor], Tensor]] = {
    "auto": dense_states,
    "dense": dense_states,
    "repeated": repeated_states,
}


def packed_length(item: PackItem, form: str) -> int:
    """Tokens that an item costs in a form."""
    return item.repeated_length if form == "repeated" else item.shared_length
