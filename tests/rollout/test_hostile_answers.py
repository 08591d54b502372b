"""Answers of a broken vLLM server from the fifth rollout on: nothing is learnt from any, and each ends with a
message."""

from pathlib import Path

import pytest

from tests.rollout.hostile_answers import HostileAnswer, Tokens, hostile_answers
from tests.rollout.scripted_server import ScriptedServer, serving
from tests.rollout.test_local import PARAMS
from tests.rollout.test_vllm_server import POLICY, SEEDS, sampler_of, summary
from tests.tiny_models import tiny_prompts, tiny_recipe
from tiercel.errors import TiercelError
from tiercel.models.families.loading import load_family
from tiercel.rollout.vllm import http, server_states
from tiercel.rollout.vllm.routes import chat_messages

TOKENS = Tokens(vocabulary=77, placeholder=5, end=2)  # used only for their names; the fixture has the checkpoint's
GOOD_ROLLOUTS = 4


@pytest.fixture(scope="module")
def family(tiny_checkpoints):
    return load_family(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]).model)


@pytest.fixture(scope="module")
def prompts(family):
    return tiny_prompts(family)[:3]


@pytest.fixture
def server(family, prompts):
    def ids_of(messages):
        return next(p.token_ids_P.tolist() for p in prompts if chat_messages(p) == messages)

    with serving(ScriptedServer(ids_of, family.checkpoint.end_token_ids[0])) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr(server_states, "POLL_SECONDS", 0.005)


@pytest.fixture(scope="module")
def answers(family) -> dict[str, HostileAnswer]:
    vision, end = family.placeholder_ids[0], family.checkpoint.end_token_ids[0]
    return hostile_answers(Tokens(vocabulary=family.vocabulary_size, placeholder=vision, end=end))


def test_there_are_as_many_hostile_answers_as_were_promised():
    assert len(hostile_answers(TOKENS)) >= 54


@pytest.mark.parametrize("name", hostile_answers(TOKENS))
def test_a_hostile_answer_ends_with_a_message_and_is_never_accepted(name, answers, family, prompts, server, caplog):
    hostile = answers[name]
    sampler = sampler_of(family, server)
    sampler.load_policy(0, Path(POLICY))
    good = [summary(sampler.sample(prompts, PARAMS, SEEDS)) for _ in range(GOOD_ROLLOUTS)]
    assert good == good[:1] * GOOD_ROLLOUTS
    if hostile.of_models:
        server.tamper_models, server.faults = hostile.make, ["500"]
    else:
        server.tamper = hostile.make
    if hostile.ending == "patience":  # the good answers may need all of it
        sampler.states.patience_seconds = 0.2
    if "no complete answer" in hostile.says:  # the others answer, however late a busy machine lets them
        for client in sampler.pool.servers:
            client._seconds = 0.15
    asked = len(server.requests)
    with pytest.raises(TiercelError) as caught:
        sampler.sample(prompts[:1], PARAMS, SEEDS[:1])
    text = str(caught.value)
    assert server.url in text and hostile.says in text, text
    assert len(text) < 2000 and text.isprintable()
    tries = len(server.requests) - asked
    if hostile.ending == "at once":
        assert caught.value.exit_code == 2 and tries == 1
    elif hostile.ending == "patience":
        assert caught.value.exit_code == 3 and "rollout.patience" in text and "start the servers again" in text
    else:
        assert caught.value.exit_code == 3 and "given 3 invalid answers" in text and "server's log" in text
        assert tries == (1 if hostile.of_models else http.NONSENSE)
        assert any("is not used any more" in line for line in caplog.messages)
    sampler.close()


def test_a_server_that_talks_nonsense_is_left_out_and_the_others_go_on(answers, family, prompts, server):
    with serving(ScriptedServer(server.prompt_ids, server.end_id)) as broken:
        broken.tamper = answers["logprob true"].make
        sampler = sampler_of(family, server, broken, patience=5)
        sampler.load_policy(0, Path(POLICY))
        for _ in range(8):
            sampler.sample(prompts, PARAMS, SEEDS)
        assert 1 <= len(broken.requests) <= http.NONSENSE * len(prompts)
        heard = len(broken.requests)
        sampler.sample(prompts, PARAMS, SEEDS)
        assert len(broken.requests) == heard and list(sampler.faults()) == [broken.url]
        sampler.close()
