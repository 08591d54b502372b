"""The command line of a vLLM server, from a recipe."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.engines import NOT_SERVED
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.models.families.loading import load_family
from tiercel.rollout.vllm import serving
from tiercel.rollout.vllm.serving import new_key, served, server_arguments, server_port, shell_line, watch

ONE = {"image": 1, "video": 0}
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    return grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path, data={"template": "own.jinja"}
    )


def test_the_flags_follow_from_the_recipe(recipe):
    family = load_family(recipe.model.model_copy(update={"max_pixels": 6272}))
    arguments = server_arguments(recipe, family, {"image": 2, "video": 0})
    assert "--enable-lora" in arguments
    arguments.remove("--enable-lora")
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert flags["--model"] == family.checkpoint.path and flags["--dtype"] == "float32"
    assert flags["--max-model-len"] == "206" and flags["--max-lora-rank"] == "8"
    assert flags["--logprobs-mode"] == "processed_logprobs" and flags["--generation-config"] == "vllm"
    assert flags["--limit-mm-per-prompt"] == '{"image": 2, "video": 0}'
    assert '"max_pixels": 6272' in flags["--mm-processor-kwargs"]
    assert flags["--chat-template"].endswith("/own.jinja")


def test_for_rows_with_videos_a_server_takes_frames_as_they_are_and_trusts_requests(recipe):
    arguments = server_arguments(recipe, load_family(recipe.model), {"image": 1, "video": 2})
    assert {"--trust-request-mm-kwargs", "--trust-request-chat-template"} <= set(arguments)
    settings = json.loads(arguments[arguments.index("--mm-processor-kwargs") + 1])
    assert settings["videos_kwargs"] == {"do_resize": False, "do_sample_frames": False}
    assert "--trust-request-mm-kwargs" not in server_arguments(recipe, load_family(recipe.model), ONE)


def test_vision_adapters_need_a_flag_and_full_fine_tuning_has_no_adapter(recipe):
    family = load_family(recipe.model)
    flag = "--enable-tower-connector-lora"
    for targets, is_given in (("language", False), ("vision", True), ("all", True), (".*qkv", True)):
        adapted = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"targets": targets})})
        assert (flag in server_arguments(adapted, family, ONE)) is is_given, targets
    whole = server_arguments(recipe.model_copy(update={"lora": None}), family, ONE)
    assert not [word for word in whole if "lora" in word]
    assert shell_line(whole, 8000).startswith("VLLM_SERVER_DEV_MODE=1 VLLM_API_KEY=... vllm serve")


@pytest.mark.parametrize(("name", "reason"), NOT_SERVED.items())
def test_a_family_that_vllm_cannot_sample_for_is_named(name, reason, tiny_checkpoints, tmp_path, capsys):
    local = grpo_recipe(tiny_checkpoints[name], write_rows(tmp_path), tmp_path / "run")
    with pytest.raises(EnvironmentProblem, match=f"does not support {name}, {reason}; set rollout.engine: local"):
        server_arguments(local, load_family(local.model), ONE)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(local))
    by_server = ["rollout.engine=vllm-server", "rollout.urls=['http://127.0.0.1:9']"]
    for command in ("check", "grpo"):
        assert main([command, str(tmp_path / "recipe.yaml"), *by_server]) == 2
        assert f"vllm-server does not support {name}, {reason}" in capsys.readouterr().err


def test_the_line_in_the_documents_has_the_same_flags(recipe):
    line = shell_line(server_arguments(recipe, load_family(recipe.model), ONE), 8000)
    words = shlex.split(line)
    assert words[2:4] == ["vllm", "serve"] and words[4] == recipe.model.path
    written = set(re.findall(r"(?<![\w-])--[a-z-]+", DOCS.read_text(encoding="utf-8").split("| flag |")[0]))
    ours = {word for word in words if word.startswith("--")} - {"--port", "--chat-template"}
    assert ours <= written


def test_further_options_are_flags_of_the_server(recipe):
    options = {"max_num_seqs": 4, "enforce_eager": True, "enable-prefix-caching": False, "speculative_config": {"n": 2}}
    vllm = recipe.rollout.vllm.model_copy(update={"options": options})
    served = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"vllm": vllm})})
    words = server_arguments(served, load_family(recipe.model), ONE)
    assert words[-6:] == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--speculative-config", '{"n": 2}'),
    ]


def test_the_port_is_the_one_given_or_the_recipes_own(recipe):
    assert server_port(recipe, 9000) == 9000 and server_port(recipe, None) == 8000
    rollout = recipe.rollout.model_copy(update={"urls": ("http://far:1", "http://127.0.0.1:8123/")})
    assert server_port(recipe.model_copy(update={"rollout": rollout}), None) == 8123


def test_a_server_that_ends_before_it_answers_says_so(monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: True)
    monkeypatch.setattr(serving.sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentProblem, match="ended with exit code 1 before it answered"), served([], 1, "key"):
        pass


def test_without_vllm_it_is_asked_for():
    if serving.find_spec("vllm") is None:
        with pytest.raises(EnvironmentProblem, match="pip install vllm"), served([], 1, "key"):
            pass


def test_a_server_that_ends_by_itself_ends_the_command():
    process = serving.subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    with pytest.raises(TrainingError, match="ended on its own with exit code 0"):
        watch(process, lambda: False)
    sleeping = serving.subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    watch(sleeping, lambda: True)
    serving.end_group(sleeping)
    assert sleeping.returncode == -signal.SIGTERM


def test_a_key_of_the_users_is_taken_and_one_that_is_none_refused(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "mine\n")
    assert new_key() == "mine"
    monkeypatch.delenv("VLLM_API_KEY")
    assert new_key() != new_key()
    monkeypatch.setenv("VLLM_API_KEY", "sk-\u00e9")
    with pytest.raises(EnvironmentProblem, match="VLLM_API_KEY has characters") as caught:
        new_key()
    assert "\u00e9" not in str(caught.value)
