"""The reward `model` with a tiny random checkpoint in the real format, against transformers written out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.rewards.samples import group, sample
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError, TrainingError
from tiercel.reward_types import Sample, Turn
from tiercel.rewards.external import ByModel
from tiercel.rewards.runtime.model import ModelReward, batches
from tiercel.rewards.runtime.scorer import Scorer, make_sample
from tiercel.runs.directory import read_metrics
from tools.demo.tokenizer import make_tokenizer

TEXTS = ("7", "", "the seven is here, and so is the eight", "7 " * 30, "no", "<answer>[1, 2, 3, 4]</answer>")


def save_reward_model(directory: Path, kind: type = Qwen2ForSequenceClassification, **changes) -> Path:
    """Save weights with a wide spread, so that every token changes the score."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(("seven eight here",))
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_labels": 1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    model = kind(Qwen2Config(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def edit(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_reward_model(tmp_path / "checkpoint")


def entry(checkpoint: Path, **options) -> ByModel:
    return ByModel(model={"path": str(checkpoint), "dtype": "float32", "max_tokens": 256, **options})


def started(checkpoint: Path, **options) -> ModelReward:
    reward = ModelReward(entry(checkpoint, **options))
    reward.start()
    return reward


def values(checkpoint: Path, samples: list[Sample], **options) -> list[float | None]:
    return [each.value for each in started(checkpoint, **options).score(samples)]


def refused(checkpoint: Path, reason: str, **options) -> None:
    with pytest.raises(RecipeError, match=reason):
        started(checkpoint, **options)


def plain_score(checkpoint: Path, text: str, label: int = 0) -> float:
    """Of one conversation that is written out as the template renders it, without padding or mask."""
    model = Qwen2ForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)  # its class is the architecture's, not make_tokenizer's
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
        return float(hidden @ model.score.weight[label])


def rendered(completion: str) -> str:
    return f"<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n"


def test_the_score_is_that_of_a_plain_forward(checkpoint):
    found = values(checkpoint, [sample(text) for text in TEXTS])
    expected = [plain_score(checkpoint, rendered(text)) for text in TEXTS]
    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert max(expected) - min(expected) > 0.1  # most of this would be lost if all scored alike


def test_all_turns_are_read_and_pictures_left_out(checkpoint):
    turns = (
        Turn(role="system", content="Be brief."),
        Turn(role="user", content="<image>\nHello <image>there"),
        Turn(role="assistant", content=" Hello "),
        Turn(role="user", content=" Where?"),
    )
    text = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in (
            ("system", "Be brief."),
            ("user", "Hello there"),
            ("assistant", " Hello "),
            ("user", " Where?"),
            ("assistant", "here"),
        )
    )
    each = sample("here")
    asked = Sample(**{**{name: getattr(each, name) for name in Sample.__slots__}, "messages": turns})
    assert values(checkpoint, [asked]) == pytest.approx([plain_score(checkpoint, text)], abs=1e-5)


def test_a_sample_has_the_turns_that_the_policy_saw():
    prompt = group("x").prompt
    messages = prompt.row.messages
    seen = type(prompt)(
        **{**{name: getattr(prompt, name) for name in type(prompt).__slots__}, "messages": messages[:2]}
    )
    found = make_sample(seen, group("x").completions[0], "unit")
    assert found.messages == (Turn(role="system", content="Be brief."), Turn(role="user", content="<image>Hello"))


@pytest.mark.parametrize("pad", ("config's", "none", "the end token", "outside"))
def test_a_score_does_not_depend_on_what_it_is_batched_with(tmp_path, pad):
    changes = {"config's": {}, "none": {"pad_token_id": None}, "outside": {"pad_token_id": -1}}
    checkpoint = save_reward_model(tmp_path / "checkpoint")
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    edit(checkpoint / "config.json", **(changes | {"the end token": {"pad_token_id": end}})[pad])
    samples = [sample(text) for text in (*TEXTS, "8", "no")]
    together = values(checkpoint, samples)
    alone = [value for each in samples for value in values(checkpoint, [each], batch_tokens=256)]
    assert None not in together
    assert together == pytest.approx(alone, abs=1e-6, rel=1e-6)
    assert together == pytest.approx([plain_score(checkpoint, rendered(each.completion)) for each in samples], abs=1e-5)


def test_where_padding_is_the_end_token_too_it_scores_as_transformers_does(checkpoint):
    """Which then takes the token before the end."""
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    edit(checkpoint / "config.json", pad_token_id=end)
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    found = values(checkpoint, [sample(text) for text in TEXTS])
    model = Qwen2ForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [rendered(text).replace("<|im_end|>\n", "<|im_end|>") for text in TEXTS]
    with torch.no_grad():
        expected = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in texts]
    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_passes_hold_like_lengths_within_their_budget():
    lengths = {0: 9, 1: 2, 2: 5, 3: 2, 4: 30}
    assert batches(lengths, 12, is_padded=True) == [[1, 3], [2], [0], [4]]
    assert batches(lengths, 15, is_padded=True) == [[1, 3, 2], [0], [4]]
    assert batches(lengths, 100, is_padded=False) == [[1, 3], [2], [0], [4]]
    assert batches({}, 100, is_padded=True) == []


def test_too_long_is_unscorable_and_never_cut(checkpoint):
    length = len(AutoTokenizer.from_pretrained(checkpoint)(rendered("7 " * 30))["input_ids"])
    reward = started(checkpoint, max_tokens=length - 1)
    short, long = reward.score([sample("7"), sample("7 " * 30)])
    assert short.value is not None and long.value is None
    words = f"reward model at {checkpoint}, row row-1: {length} tokens, above model.max_tokens ({length - 1})"
    assert long.failure == words
    assert values(checkpoint, [sample("7 " * 30)], max_tokens=length) != [None]


def test_a_score_that_is_no_number_is_masked_and_says_so(checkpoint):
    reward = started(checkpoint)
    with torch.no_grad():
        reward._loaded.model.score.weight.fill_(torch.nan)
    (found,) = reward.score([sample("7")])
    assert found.value is None and found.failure.endswith("nan is no reward")


def test_bfloat16_scores_nearly_the_same(checkpoint):
    found = values(checkpoint, [sample(text) for text in TEXTS], dtype="bfloat16")
    exact = values(checkpoint, [sample(text) for text in TEXTS])
    spread = max(exact) - min(exact)
    assert found == pytest.approx(exact, abs=spread / 5)


def test_one_of_several_scores_is_named(tmp_path):
    checkpoint = save_reward_model(tmp_path / "two", num_labels=2)
    refused(checkpoint, r"returns 2 scores; .*model\.label, from 0 to 1")
    refused(checkpoint, r"model\.label:.*returns 2, counted from 0", label=2)
    for label in (0, 1):
        expected = plain_score(checkpoint, rendered("7"), label)
        assert values(checkpoint, [sample("7")], label=label) == pytest.approx([expected], abs=1e-5)


def test_a_model_that_is_no_classifier_is_refused(tiny_checkpoints):
    refused(tiny_checkpoints["qwen2_5_vl"], "is a qwen2_5_vl model, of which transformers has no sequence classifier")


def test_a_checkpoint_without_a_score_is_refused(tmp_path):
    checkpoint = save_reward_model(tmp_path / "causal", Qwen2ForCausalLM)
    for label in (None, 0):
        refused(checkpoint, r"is not a reward model: it has no weights for score\.weight, and random ones", label=label)
    edit(checkpoint / "config.json", id2label=None, label2id=None)  # transformers' default for these is two
    refused(checkpoint, "is not a reward model: it has no weights for score")


def test_weights_without_a_place_are_refused_but_for_the_language_models_head(checkpoint):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": torch.zeros(3, 32)}, file, metadata={"format": "pt"})
    assert values(checkpoint, [sample("7")]) == pytest.approx([plain_score(checkpoint, rendered("7"))], abs=1e-5)
    save_file({**weights, "score.bias": torch.ones(1)}, file, metadata={"format": "pt"})
    refused(checkpoint, r"Qwen2ForSequenceClassification does not have its score\.bias")


def test_a_missing_template_names_the_remedy(checkpoint, tmp_path):
    template = (checkpoint / "chat_template.jinja").read_text()
    before = values(checkpoint, [sample("7")])
    (checkpoint / "chat_template.jinja").unlink()
    refused(checkpoint, r"its tokenizer has no chat template,.*unknown; set model\.template to a file")
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    assert values(checkpoint, [sample("7")], template=str(file)) == before
    file.write_bytes(b"\x80\x02")
    refused(checkpoint, r"model\.template: .*mine\.jinja cannot be read", template=str(file))


def test_what_the_template_refuses_is_unscorable(checkpoint):
    (checkpoint / "chat_template.jinja").write_text(
        "{% if 'bad' in messages[-1]['content'] %}{{ raise_exception('not this') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    good, bad, empty = started(checkpoint).score([sample("good"), sample("bad"), sample("")])
    assert good.value is not None
    assert empty.value is None and "the chat template writes nothing" in empty.failure
    assert bad.value is None and "the chat template refuses it: not this" in bad.failure


def test_text_that_cannot_be_read_is_unscorable(checkpoint):
    good, bad = started(checkpoint).score([sample("good"), sample("\ud83d")])
    assert good.value is not None and bad.value is None and bad.failure is not None


def test_code_of_the_checkpoints_own_is_refused(checkpoint):
    edit(checkpoint / "config.json", auto_map={"AutoModelForSequenceClassification": "code.Model"})
    refused(checkpoint, r"run code from the checkpoint \(auto_map\), which tiercel never")


def test_a_tokenizers_own_code_is_neither_run_nor_asked_about(checkpoint, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("it asks"))
    own = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    edit(checkpoint / "tokenizer_config.json", auto_map=own, tokenizer_class="Unknown")
    (checkpoint / "code.py").write_text("raise SystemExit('code from the checkpoint was run')")
    try:
        started(checkpoint)
    except RecipeError as error:
        assert "tokenizer" in str(error)


def test_weights_that_are_no_safetensors_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"\x80\x02" * 50)
    refused(checkpoint, "its weights cannot be read")
    weights.rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "its weights cannot be read")


def test_an_index_may_name_only_safetensors_beside_it(checkpoint):
    index = {"metadata": {}, "weight_map": {"score.weight": "../model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(checkpoint, r"index\.json names .*; weights are read only from \.safetensors files in the same")


def test_an_adapter_is_refused(checkpoint):
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere/model"}))
    refused(checkpoint, "is an adapter; set path to the checkpoint that it is for")


def test_other_wrong_checkpoints_are_named(checkpoint, tmp_path):
    refused(tmp_path, r"model\.path: .* has no config\.json")
    refused(checkpoint, r"model\.max_tokens:.*reads at most 512 tokens; use", max_tokens=513)
    edit(checkpoint / "config.json", model_type="no_such_model")
    refused(checkpoint, "config or tokenizer cannot be read")


def test_out_of_memory_names_the_key_that_bounds_it(checkpoint, monkeypatch):
    reward = started(checkpoint)

    def full(**inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reward._loaded.model, "forward", full)
    with pytest.raises(TrainingError, match=r"lower its model\.batch_tokens \(now 2 conversations of"):
        reward.score([sample("7"), sample("8")])


def test_the_scorer_loads_it_once_and_lets_go_of_it(checkpoint):
    scorer = Scorer([entry(checkpoint)], Reliability(), "unit")
    with scorer:
        (first,) = scorer.score_samples([sample("7")], [None])
        assert first["model"].value == pytest.approx(plain_score(checkpoint, rendered("7")), abs=1e-5)
        model = scorer._rewards[0][1]._loaded.model
        assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
        assert scorer.score_samples([], []) == ()
    assert scorer._rewards[0][1]._loaded is None
    with (
        pytest.raises(RecipeError, match=r"rewards\.0\.name: .* has no config\.json"),
        Scorer([entry(checkpoint.parent)], Reliability(), "unit"),
    ):
        pass


def test_two_steps_of_a_policy_that_learns_from_it(tiny_checkpoints, checkpoint, tmp_path):
    section = {"path": str(checkpoint), "dtype": "float32", "max_tokens": 256}
    rewards = [{"name": "model", "model": section}, {"name": "length", "max_tokens": 3, "weight": 0.1}]
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        rewards=rewards,
        train={"steps": 2},
        data={"workers": 0, "eval": None, "system": "Be brief."},
    )
    metrics = read_metrics(run_grpo(recipe))
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["reward/failed_fraction"] == 0 for row in metrics)
    template = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is the seven?<|im_end|>\n"
    lines = [line for file in (tmp_path / "run/rollouts").iterdir() for line in file.read_text().splitlines()]
    completions = [each for line in lines for each in json.loads(line)["completions"]]
    assert len(completions) == 2 * 4 * 3
    for each in completions:
        text = f"{template}<|im_start|>assistant\n{each['text']}<|im_end|>\n"
        assert each["rewards"]["model"] == pytest.approx(plain_score(checkpoint, text), abs=1e-5)
