"""Arguments of decoders to the routed attention that no form computes, and the kinds of their layers."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3TextConfig, Gemma4TextConfig, MistralConfig

from tiercel.errors import ModelError
from tiercel.models.layers.attention import Heads, attention_spans_of, heads_of, route_attention, shared_prefix_obstacle
from tiercel.models.layers.attention_span import FULL, AttentionSpan, runs

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}


def test_capped_scores_are_refused_and_not_left_out():
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, pad_token_id=0))
    route_attention(model.model)
    with pytest.raises(ModelError, match="the attention of gemma2 caps its scores"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_attention_spans_by_the_kind_of_layer():
    kinds = ["sliding_attention", "full_attention"]
    gemma3 = Gemma3TextConfig(**SMALL, num_hidden_layers=2, layer_types=kinds, sliding_window=7)
    assert attention_spans_of(gemma3) == {"full_attention": FULL, "sliding_attention": AttentionSpan(window=7)}
    gemma4 = Gemma4TextConfig(**SMALL, num_hidden_layers=2, layer_types=kinds, sliding_window=7)
    assert attention_spans_of(gemma4)["full_attention"] == AttentionSpan(whole_pictures=False)
    assert attention_spans_of(MistralConfig(sliding_window=9)) == {"full_attention": AttentionSpan(window=9)}
    assert shared_prefix_obstacle(gemma3) is shared_prefix_obstacle(gemma4) is None
    gemma3.layer_types = ["chunked_attention", "full_attention"]
    assert shared_prefix_obstacle(gemma3) == "its layers have chunked attention"


def test_heads_that_differ_by_layer():
    kinds = ["sliding_attention", "full_attention"]
    more = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "global_head_dim": 16, "attention_k_eq_v": True}
    gemma4 = Gemma4TextConfig(**SMALL, num_hidden_layers=2, layer_types=kinds, **more)
    assert heads_of(gemma4) == [Heads(keys=2, size=8), Heads(keys=1, size=16)]


def test_an_attention_span_that_reaches_further_than_the_sequence_is_causal():
    assert AttentionSpan(window=5).within(5, []).is_causal and not AttentionSpan(window=4).within(5, []).is_causal
    assert not AttentionSpan(window=5).within(5, [(1, 3)]).is_causal
    assert AttentionSpan(whole_pictures=False).within(5, [(1, 3)]).is_causal


def test_runs_by_hand():
    assert runs(torch.tensor([True, False, True, True, False])) == ((0, 1), (2, 4))
    assert runs(torch.tensor([False, True])) == ((1, 2),) and runs(torch.tensor([False])) == ()
