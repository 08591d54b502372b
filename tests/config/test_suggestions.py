"""The nearest real key and the nearest word."""

import pytest

from tiercel.config.keys import ENTRY, allowed_words, every_key, keys_of
from tiercel.config.suggestions import nearest_key, nearest_word
from tiercel.config.synonyms import key_synonyms, section_synonyms, word_synonyms


def test_every_synonym_leads_to_a_real_key_or_says_why_not():
    for name, suggestion in key_synonyms().items():
        if suggestion.key is None:
            assert suggestion.hint, name
        else:
            assert suggestion.key in {key.path for key in every_key()}, name


def test_no_synonym_hides_a_real_key():
    # `beta` is also a key of DPO, and `adapter` one of a teacher and of a reward model, where they are not synonyms
    real = {key.leaf for key in keys_of("grpo").values() if key.parent not in ("algorithm.teacher", "rewards.N.model")}
    assert not real & key_synonyms().keys()


def test_section_synonyms_lead_to_sections():
    sections = {key.path for key in every_key() if key.section is not None}
    assert set(section_synonyms().values()) <= sections


def test_value_synonyms_lead_to_words_that_the_schema_admits():
    known = {key.path: key for key in every_key()}
    for key, words in word_synonyms().items():
        allowed = allowed_words(known[key].field.annotation)
        for word, target in words.items():
            assert word not in allowed, (key, word)
            if key != "lora.targets":  # free text in the schema
                assert target is None or target in allowed, (key, word)


def test_the_words_refused_as_not_in_this_version_are_not_in_the_schema():
    known = {key.path: key for key in every_key()}
    for key, words in word_synonyms().items():
        allowed = allowed_words(known[key].field.annotation)
        assert not {word for word, target in words.items() if target is None} & set(allowed), key


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("train.learning-rate", "optim.lr"),
        ("Learning_Rate", "optim.lr"),
        ("num_generation", "rollout.group_size"),
        ("optm.lr", "optim.lr"),
        ("optimizer.betas", "optim.betas"),
        ("sampling_params.n", "rollout.group_size"),
        ("worker.rollout.n", "rollout.group_size"),
        ("worker.actor.model.model_path", "model.path"),
        ("custom_reward_function.path", "rewards.0.call"),
        ("rewards.2.func", "rewards.2.call"),
        ("rewards.1.nmae", "rewards.1.name"),
        ("algorithm.kl_coef", "algorithm.kl.coef"),
        ("algorithm.kl.coeff", "algorithm.kl.coef"),
        ("kl.coef", "algorithm.kl.coef"),
        ("data.train_path", "data.train"),
        ("modl", "model"),
        ("something_else_entirely", None),
    ],
)
def test_nearest_key(path: str, key: str | None):
    assert nearest_key(path).key == key


def test_nearest_word():
    schedules = ("constant", "linear", "cosine")
    assert nearest_word("optim.schedule", "Cosine", schedules).key == "cosine"
    assert nearest_word("optim.schedule", "cosne", schedules).key == "cosine"
    assert nearest_word("optim.schedule", "xyz", schedules).key is None
    assert nearest_word(f"rewards.{ENTRY}.name", "acuracy", ("math", "iou")).key == "math"
    assert nearest_word("rollout.engine", "sglang", ("local",)).hint == "sglang is not in this version"
