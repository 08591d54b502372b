"""The client of vLLM servers: what it requests, what it accepts as an answer, and every way in which a server fails."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rollout.scripted_server import ScriptedServer, serving
from tests.rollout.test_local import PARAMS
from tests.tiny_models import tiny_prompts, tiny_recipe
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.distributed.ranks import Ranks
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.log import printed
from tiercel.models.families.loading import load_family
from tiercel.rollout.vllm import http, server_states
from tiercel.rollout.vllm.http import ServerRequirements, VllmServer
from tiercel.rollout.vllm.routes import chat_messages
from tiercel.rollout.vllm.server import ServerPool, ServerSampler

SEEDS = [100, 200, 300]
POLICY = "policy-run-0-aaaaaaaa"
NEEDS = ServerRequirements(model_names=("models/base",), row_tokens=100)


@pytest.fixture(scope="module")
def family(tiny_checkpoints):
    return load_family(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]).model)


@pytest.fixture(scope="module")
def prompts(family):
    return tiny_prompts(family)[:3]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def scripted(family, prompts, stack):
    """Starts a server each time it is called."""

    def ids_of(messages):
        return next(p.token_ids_P.tolist() for p in prompts if chat_messages(p) == messages)

    def start(**settings) -> ScriptedServer:
        server = ScriptedServer(ids_of, family.checkpoint.end_token_ids[0])
        for name, value in settings.items():
            setattr(server, name, value)
        return stack.enter_context(serving(server))

    return start


def sampler_of(family, *servers: ScriptedServer, patience: float = 20.0, timeout: float = 20.0, needs=NEEDS):
    clients = tuple(VllmServer(server.url, None, timeout) for server in servers)
    pool = ServerPool(servers=clients, needs=needs, patience_seconds=patience)
    return ServerSampler(family, pool)


def summary(groups) -> list[list[tuple[list[int], int, str]]]:
    return [[(c.token_ids_L.tolist(), c.seed, c.text) for c in group.completions] for group in groups]


def test_a_prompt_is_one_request_with_its_pictures_and_all_that_sampling_depends_on(family, prompts, scripted):
    server = scripted()
    sampler = sampler_of(family, server)
    sampler.load_policy(0, Path("policies") / POLICY)
    groups = sampler.sample(prompts, PARAMS, SEEDS)
    assert len(server.requests) == len(prompts)
    assert server.adapters == {POLICY: str((Path("policies") / POLICY).absolute())}
    for group, seed in zip(groups, SEEDS, strict=True):
        assert [completion.seed for completion in group.completions] == [seed, seed + 1, seed + 2, seed + 3]
        assert group.completions[0].token_ids_L.tolist() == [5 + seed % 7, family.checkpoint.end_token_ids[0]]
        assert not group.completions[0].is_truncated and group.policy_version == 0
        assert torch.equal(group.completions[0].logprobs_L, torch.tensor([-0.5, -0.5]))
    body = next(body for body in server.requests if body["seed"] == 100)
    assert (body["n"], body["temperature"], body["top_k"], body["repetition_penalty"]) == (4, 1.0, 0, 1.0)
    assert body["bad_words"] == ["<|image_pad|>", "<|video_pad|>"]
    pictures = [p for b in server.requests for m in b["messages"] for p in m["content"] if p["type"] == "image_url"]
    assert len(pictures) == sum(len(prompt.images) for prompt in prompts)


@pytest.mark.parametrize("versions", [1, 2, 3, 5])
def test_servers_keep_the_versions_that_completions_are_still_drawn_from(family, scripted, versions):
    server = scripted()
    client = VllmServer(server.url, None, 20.0)
    pool = ServerPool(servers=(client,), needs=NEEDS, patience_seconds=20.0, versions=versions)
    sampler = ServerSampler(family, pool)
    names = [f"policy-run-{version}-aaaaaaaa" for version in range(7)]
    for version, name in enumerate(names):
        sampler.load_policy(version, Path("policies") / name)
        assert list(server.adapters) == names[: version + 1][-versions:]


class FirstRank(Ranks):
    """Keeps what the other ranks get from the first one."""

    def run_on_first(self, action):
        TOLD.append(action())
        return TOLD[-1]


class OtherRank(Ranks):
    def run_on_first(self, action):
        return TOLD.pop(0)


TOLD: list = []


def test_a_server_that_did_not_get_the_policy_gets_no_requests_of_any_rank(family, prompts, scripted):
    servers = scripted(), scripted(load_refusal=(500, "busy"))
    TOLD.clear()
    samplers = []
    for number, kind in enumerate((FirstRank, OtherRank)):
        samplers.append(sampler_of(family, *servers))
        samplers[-1].ranks = kind(rank=number, world_size=2)
        samplers[-1].load_policy(0, Path(POLICY))
    assert [set(each.faults()) for each in samplers] == [{servers[1].url}] * 2
    samplers[1].sample(prompts, PARAMS, SEEDS)
    assert len(servers[0].requests) == len(prompts) and servers[1].requests == []


def test_before_min_new_tokens_the_engine_cannot_say_the_policys_logprob(family, prompts, scripted):
    sampler = sampler_of(family, scripted())
    sampler.load_policy(0, Path(POLICY))
    (group,) = sampler.sample(prompts[:1], replace(PARAMS, min_new_tokens=1), [1])
    logprobs = group.completions[0].logprobs_L
    assert logprobs[0].isnan() and logprobs[1] == -0.5


def test_a_stop_string_ends_a_completion_before_min_new_tokens_too(family, prompts, scripted):
    """vLLM looks for it only after them, and answers with what it wrote behind it."""
    sampler = sampler_of(family, scripted())
    sampler.load_policy(0, Path(POLICY))
    first = 5 + SEEDS[0] % 7
    params = replace(PARAMS, min_new_tokens=2, stop=(family.tokenizer.decode([first]),))
    (group,) = sampler.sample(prompts[:1], params, SEEDS[:1])
    completion = group.completions[0]
    assert completion.token_ids_L.tolist() == [first] and len(completion.logprobs_L) == 1
    assert not completion.is_truncated


def test_patience_begins_when_the_last_server_is_left(family, prompts, scripted):
    """Not with the last answer: a tool may have taken longer than that."""
    states = sampler_of(family, scripted(), scripted()).states
    states._last_sign = 0.0
    first, second = states.every
    states.leave(first, http.ServerFault("gone"))
    assert states._last_sign == 0.0
    states.leave(second, http.ServerFault("gone"))
    assert time.monotonic() - states._last_sign < 5


@pytest.mark.parametrize("fault", ("500", "drops", "hangs", "fewer", "nonsense", "other policy", "aborts", "restarted"))
def test_a_fault_is_tried_again_and_nothing_is_lost_or_counted_twice(fault, family, prompts, scripted, monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr(server_states, "POLL_SECONDS", 0.005)
    whole = sampler_of(family, good := scripted())
    whole.load_policy(0, Path(POLICY))
    expected = summary(whole.sample(prompts, PARAMS, SEEDS))
    server = scripted(faults=[fault], hang_seconds=0.5)
    said: list[str] = []
    sampler = sampler_of(family, server)
    sampler.load_policy(0, Path(POLICY))
    with printed(said.append):
        assert summary(sampler.sample(prompts, PARAMS, SEEDS)) == expected
    assert len(server.requests) > len(good.requests)
    assert set(server.adapters) == {POLICY} and server.loads.count(POLICY) >= 2  # it gets the policy before requests
    assert any("its prompts are tried again" in text for text in said) and any("is back" in text for text in said)


def test_a_server_that_is_gone_for_good_ends_the_run_by_name(family, prompts, scripted):
    server = scripted(faults=["500"] * 1000)
    sampler = sampler_of(family, server, patience=0.5)
    sampler.load_policy(0, Path(POLICY))
    with pytest.raises(TrainingError, match=r"no answer within rollout.patience \(0.5 s\)") as caught:
        sampler.sample(prompts, PARAMS, SEEDS)
    assert server.url in str(caught.value) and "500 EngineCore encountered an issue" in str(caught.value)
    assert "the same command" in str(caught.value) and caught.value.exit_code == 3


def test_servers_that_fail_every_completion_end_the_question_to_all_of_them(family, prompts, scripted, monkeypatch):
    """They answer all else, so they are good again after each pause."""
    monkeypatch.setattr(http, "BACKOFF_SECONDS", (0.01, 0.02))
    sampler = sampler_of(family, scripted(faults=["500"] * 1000), patience=0.5)
    sampler.load_policy(0, Path(POLICY))
    with pytest.raises(TrainingError, match=r"no answer within rollout.patience \(0.5 s\)"):
        sampler.sample_everywhere(prompts[:1], PARAMS, SEEDS[:1])


def test_losing_one_of_two_servers_does_not_end_the_run(family, prompts, scripted):
    good = scripted()
    said: list[str] = []
    with serving(ScriptedServer(lambda messages: [], 0)) as lost:
        sampler = sampler_of(family, good, lost, patience=5)
        sampler.load_policy(0, Path(POLICY))
    with printed(said.append):
        groups = sampler.sample(prompts * 4, PARAMS, SEEDS * 4)
    assert len(groups) == 12 and len(good.requests) >= 12
    assert any(lost.url in text and "failed (/v1/chat/completions: ConnectError" in text for text in said)


def test_a_prompt_that_no_server_answers_ends_the_run_though_the_servers_come_back(family, prompts, scripted):
    servers = [scripted(faults=["hangs"] * 1000), scripted(faults=["hangs"] * 1000)]
    sampler = sampler_of(family, *servers, patience=1.5, timeout=0.3)
    sampler.load_policy(0, Path(POLICY))
    with pytest.raises(TrainingError, match="no answer within"):
        sampler.sample(prompts[:1], PARAMS, [1])
    sampler.close()


def test_a_server_that_is_lost_is_not_asked_to_load_and_costs_no_step_its_patience(family, prompts, scripted):
    good = scripted()
    with serving(ScriptedServer(lambda messages: [], 0)) as lost:
        sampler = sampler_of(family, good, lost)
        sampler.load_policy(0, Path(POLICY))
    sampler.sample(prompts * 2, PARAMS, SEEDS * 2)
    assert lost.url in sampler.faults()
    started = time.monotonic()
    sampler.load_policy(1, Path("policy-run-1-bbbbbbbb"))
    assert time.monotonic() - started < 10 and set(good.adapters) == {"policy-run-1-bbbbbbbb"}


def test_the_gate_hears_every_server(family, prompts, scripted):
    servers = [scripted(), scripted(), scripted()]
    sampler = sampler_of(family, *servers)
    sampler.load_policy(0, Path(POLICY))
    groups = sampler.sample_everywhere(prompts[:2], PARAMS, SEEDS[:2])
    assert len(groups) == 6 and [len(server.requests) for server in servers] == [2, 2, 2]


def test_a_server_that_was_started_again_otherwise_is_refused(family, prompts, scripted):
    server = scripted()
    sampler = sampler_of(family, server)
    sampler.load_policy(0, Path(POLICY))
    sampler.require_usable(prompts[0])
    server.faults, server.gives_raw_logprobs = ["500"], True
    with pytest.raises(EnvironmentProblem, match="--logprobs-mode processed_logprobs"):
        sampler.sample(prompts[:1], PARAMS, [1])


def test_two_runs_share_a_server_and_each_leaves_the_others_policy_alone(family, prompts, scripted):
    server = scripted()
    samplers = {name: sampler_of(family, server) for name in ("policy-one-0-aaaaaaaa", "policy-two-0-bbbbbbbb")}
    for name, sampler in samplers.items():
        sampler.load_policy(0, Path(name))
    assert set(server.adapters) == set(samplers)
    for name, sampler in samplers.items():
        sampler.sample(prompts[:1], PARAMS, [1])
        assert server.requests[-1]["model"] == name
    first, second = samplers.values()
    first.close()
    assert set(server.adapters) == {"policy-two-0-bbbbbbbb"}
    second.sample(prompts[:1], PARAMS, [1])


def test_each_version_replaces_the_one_before(family, prompts, scripted):
    server = scripted()
    sampler = sampler_of(family, server)
    for version, name in enumerate((POLICY, "policy-run-1-bbbbbbbb")):
        sampler.load_policy(version, Path(name))
        (group,) = sampler.sample(prompts[:1], PARAMS, [1])
        assert set(server.adapters) == {name} and group.policy_version == version
    sampler.close()
    assert not server.adapters


@pytest.mark.parametrize(
    ("settings", "said"),
    (
        ({"load_refusal": (404, "Not Found")}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"load_refusal": (400, "LoRA rank 64 is greater than max_lora_rank 16.")}, "a greater --max-lora-rank"),
        ({"load_refusal": (500, "LoRA rank 64 is greater than max_lora_rank 16.")}, "a greater --max-lora-rank"),
        ({"load_refusal": (404, "Loading lora x failed: No adapter found for p")}, "must share the file system"),
        ({"key": "secret"}, "set VLLM_API_KEY to the server's --api-key"),
    ),
)
def test_a_server_that_cannot_take_the_policy_is_told_the_missing_flag(settings, said, family, scripted):
    server = scripted(**settings)
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        sampler_of(family, server).load_policy(0, Path(POLICY))
    assert server.url in str(caught.value)


def test_a_server_with_another_model_or_too_short_a_context_is_refused(family, scripted):
    server = scripted(max_model_len=100)
    for names, tokens, said in (
        (("models/base",), 500, "start it with --max-model-len 500"),
        (("models/other",), 50, r"serves 'models/base', but the recipe.s model\.path is models/other"),
    ):
        sampler = sampler_of(family, server, needs=ServerRequirements(model_names=names, row_tokens=tokens))
        with pytest.raises(EnvironmentProblem, match=said):
            sampler.require_fit()
    # A hub's model is in a directory that is named after its commit.
    sampler_of(
        family, server, needs=ServerRequirements(model_names=("hub/Name", "cache/base"), row_tokens=100)
    ).require_fit()


def test_raw_logprobs_are_refused(family, prompts, scripted):
    for raw in (False, True):
        sampler = sampler_of(family, scripted(gives_raw_logprobs=raw))
        sampler.load_policy(0, Path(POLICY))
        if raw:
            with pytest.raises(EnvironmentProblem, match="--logprobs-mode processed_logprobs"):
                sampler.require_usable(prompts[0])
        else:
            sampler.require_usable(prompts[0])


def test_another_prompt_is_refused_with_what_differs(family, prompts, scripted):
    pictured = next(prompt for prompt in prompts if prompt.images)
    ids = pictured.token_ids_P.tolist()
    image = ids.index(family.placeholder_ids[0])
    for wrong, said in (
        (ids[:image] + ids[image + 1 :], "vLLM has .* image tokens, the trainer .*; its picture limits differ"),
        ([ids[0] + 1, *ids[1:]], "from token 0 on: .* its chat template or tokenizer differs"),
    ):
        server = scripted(prompt_ids=lambda messages, wrong=wrong: wrong)
        sampler = sampler_of(family, server)
        sampler.load_policy(0, Path(POLICY))
        with pytest.raises(EnvironmentProblem, match=said):
            sampler.sample([pictured], PARAMS, [1])


def test_a_server_is_named_without_its_credentials():
    assert VllmServer("http://me:word@host:8000/v1/", None, 1.0).url == "http://redacted@host:8000"


def test_check_asks_every_server_and_names_the_one_that_does_not_answer(
    tiny_checkpoints, family, scripted, tmp_path, capsys
):
    good = scripted(model_root=str(tiny_checkpoints["qwen2_5_vl"]))
    with serving(ScriptedServer(lambda messages: [], 0)) as lost:
        pass
    for urls, code in ((f"[{good.url}]", 0), (f"[{good.url}, {lost.url}]", 2)):
        recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run")
        (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
        words = [str(tmp_path / "recipe.yaml"), "rollout.engine=vllm-server", f"rollout.urls={urls}"]
        assert main(["check", *words]) == code
        said = capsys.readouterr()
        assert f"server {good.url}: answers" in said.out
        assert (f"{lost.url} failed" in said.err) == (code == 2)
