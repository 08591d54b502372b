"""Rewards of the peers' frameworks."""

import re

import pytest

from tests.convert.helpers import GRPO, REC, TRL, drafted, told, values_of
from tiercel.convert.rewards import registered

PLUGIN = """
import torch_that_is_not_there
class CountORM(ORM):
    def __call__(self, completions, **kwargs): ...
def score(completions, **columns): ...
orms['external_count'] = CountORM
orms["again"] = score
"""


@pytest.mark.parametrize(
    ("flags", "rewards"),
    [
        ("cosine --soft_max_length 900 --cosine_max_len 2000", [{"name": "cosine", "max_tokens": 2000}]),
        ("soft_overlong --soft_cache_length 100", [{"name": "soft_overlong", "max_tokens": 512, "buffer": 100}]),
        ("repetition --repetition_n_grams 4", [{"name": "repetition", "ngram": 4}]),
        ("accuracy --reward_model org/one /data/two --reward_weights 1 0.5",
         [{"name": "math", "weight": 1.0}, {"name": "model", "model": {"path": "org/one"}, "weight": 0.5},
          {"name": "model", "model": {"path": "/data/two"}}]),
        ("mine", [{"call": "mine.py:mine"}]),
    ],
)  # fmt: skip
def test_rewards_by_name(flags, rewards):
    assert values_of(GRPO.replace("format", flags))["rewards"] == rewards


def test_trls_reward_model_takes_the_first_weight():
    flags = "--reward_model_name_or_path org/rm --reward_funcs accuracy_reward think_format_reward"
    rewards = values_of(f"{TRL} {flags} --reward_weights 0.2 1.0 0.5")["rewards"]
    weights = {reward["name"]: reward["weight"] for reward in rewards}
    assert weights == {"model": 0.2, "math": 1.0, "format": 0.5}


def matches(line: str, completion: str) -> bool:
    entry = next(reward for reward in values_of(line)["rewards"] if reward.get("name") == "format")
    return re.fullmatch(entry["pattern"], completion, re.DOTALL) is not None


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>", True),
        ("<think>a</think><answer>3</answer> and more", False),
        ("well: <think>a</think><answer>3</answer>", False),
        ("<answer>3</answer>", False),
    ],
)
def test_the_form_that_ms_swift_asks_for(completion, is_right):
    assert matches(GRPO, completion) == is_right


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("<think>a</think>b", True),
        ("<think>a<think>b</think>c", False),
        ("x<think>a</think>", False),
        ("<think>a", False),
    ],
)
def test_the_form_that_trl_asks_for(completion, is_right):
    line = "trl grpo --model_name_or_path m --dataset_name r --reward_funcs think_format_reward"
    assert matches(line, completion) == is_right


@pytest.mark.parametrize(
    ("model", "task", "completion", "is_right"),
    [
        ("Qwen2-VL", True, '<think>a</think><answer>{"box": [1, 2, 3, 4]}</answer>', True),
        ("Qwen2-VL", True, "<think>a</think><answer>[1, 2, 3, 4]</answer>", False),
        ("InternVL2", True, "<think>a</think><answer>[1, 2, 3, 4]</answer>", True),
        ("InternVL2", True, "<think>a</think><answer>none</answer>", False),
        ("Qwen2-VL", False, "<think>a</think><answer>none</answer>", True),
    ],
)
def test_the_form_that_vlm_r1_asks_for(model, task, completion, is_right):
    flags = "--task_type rec --is_reward_customized_from_vlm_module True" if task else "--task_type gui"
    assert matches(f"{REC} {flags}".replace("Qwen2-VL", model), completion) == is_right


@pytest.mark.parametrize(
    ("flags", "accuracy"),
    [
        ("--task_type rec --is_reward_customized_from_vlm_module True", {"name": "vlm_r1_rec"}),
        ("--reward_method mcq", {"name": "choice"}),
        ("--reward_method all_match", {"call": "mine.py:accuracy"}),
        ("", {"call": "mine.py:accuracy"}),
    ],
)
def test_accuracy_of_vlm_r1(flags, accuracy):
    draft = drafted(f"{REC} {flags}")
    assert draft.values["rewards"][0] == accuracy
    assert "call" not in accuracy or "accuracy judged by" in told(draft)


def test_a_reward_of_a_plugin_is_looked_up_without_running_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    assert registered(tmp_path / "plugin.py") == {
        "CountORM": "CountORM", "score": "score", "external_count": "CountORM", "again": "score",
    }  # fmt: skip
    line = f"{GRPO.replace('format', 'external_count again other')} --external_plugins plugin.py"
    draft = drafted(line)
    assert draft.values["rewards"] == [
        {"call": "plugin.py:CountORM"}, {"call": "plugin.py:score"}, {"call": "plugin.py:other"},
    ]  # fmt: skip
    names = "CountORM, score, external_count, again"
    assert f"plugin.py has no such name; it has {names}; write rewards.N.call" in told(draft)
    assert f"rewards.2.call: plugin.py has no function other; its functions are: {names}" in draft.left
    absent = drafted(line.replace("plugin.py", "more.py"))
    assert "more.py is not on this machine; write rewards.N.call" in told(absent)
    assert not [left for left in absent.left if left.startswith("rewards")]  # the check of paths reports it
    (tmp_path / "plugin.py").write_text("not python at all (")
    assert registered(tmp_path / "plugin.py") == {}
    assert registered(tmp_path / "nowhere.py") == {}


def test_rewards_of_trl_by_name_each_time_anew():
    line = f"{TRL} --reward_funcs reasoning_accuracy_reward get_soft_overlong_punishment"
    math, length = {"name": "math"}, {"name": "soft_overlong", "max_tokens": 1280, "buffer": 256}
    weighted = values_of(f"{line} --reward_weights 2 3")["rewards"]
    assert weighted == [{**math, "weight": 2}, {**length, "weight": 3}]
    assert values_of(line)["rewards"] == [math, length]


def test_rewards_that_are_missing_are_told():
    assert "name the rewards" in told(drafted("swift rlhf --rlhf_type grpo --model m --dataset r"))
