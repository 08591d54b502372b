"""The descriptions of engines and strategies fit the recipe's keys."""

from tiercel.config.engines import ENGINE_KINDS
from tiercel.config.keys import allowed_words, keys_of
from tiercel.config.strategies import STRATEGY_KINDS


def words(key: str) -> tuple[str, ...]:
    return allowed_words(keys_of("grpo")[key].field.annotation)


def test_every_word_of_the_schema_has_its_kind():
    assert tuple(ENGINE_KINDS) == words("rollout.engine")
    assert ("auto", *STRATEGY_KINDS) == words("train.strategy")


def test_own_and_required_keys_are_keys_of_the_section():
    for engine in ENGINE_KINDS.values():
        assert {f"rollout.{key}" for key in (*engine.own_keys, *engine.required_keys)} <= keys_of("grpo").keys()
        assert set(engine.required_keys) <= set(engine.own_keys)
    for strategy in STRATEGY_KINDS.values():
        assert {f"train.{key}" for key in strategy.own_keys} <= keys_of("grpo").keys()


def test_an_engine_samples_from_the_trained_weights_or_beside_them_or_on_servers():
    for engine in ENGINE_KINDS.values():
        assert [engine.shares_weights, engine.is_beside, engine.is_served].count(True) == 1, engine.name


def test_who_has_parts_of_what_is_trained():
    divided = {
        name: [kind.divides_trained(has_adapters=each) for each in (True, False)]
        for name, kind in STRATEGY_KINDS.items()
    }
    assert divided == {
        "single": [False, False],
        "ddp": [False, False],
        "fsdp2": [False, True],
        "deepspeed": [True, True],
    }
