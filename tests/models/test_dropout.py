"""The dropout of a model's own config is off, wherever its code keeps the probability."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from tiercel.models.layers.dropout import own_dropout, switch_off_dropout

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HALVES = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}


def test_nothing_is_dropped_in_training_mode():
    torch.manual_seed(0)  # else both passes may leave out both layers
    opt = OPTForCausalLM(OPTConfig(**SMALL, **HALVES, ffn_dim=32, word_embed_proj_dim=16))  # plain numbers
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, embd_pdrop=0.5))  # modules
    ids = torch.arange(8)[None]
    for model in (opt.train(), gpt2.train()):
        assert not torch.equal(model(ids).logits, model(ids).logits)
        switch_off_dropout(model)
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert opt.config.dropout == 0.5


def test_what_a_config_asks_for_is_named():
    (line,) = own_dropout(OPTConfig(**SMALL, **HALVES))
    assert all(f"{name} 0.5" in line for name in HALVES)
    assert own_dropout(OPTConfig(dropout=0.0, attention_dropout=0.0)) == ()
