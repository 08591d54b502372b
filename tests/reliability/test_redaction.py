"""What counts as a secret, and that none is left in a text."""

import html
import json
import subprocess
import sys

import pytest

from tiercel.config import load_recipe
from tiercel.config_base import shown
from tiercel.errors import RecipeError
from tiercel.reliability.redaction import Redactor, redact, redact_values, secret_values
from tiercel.secret_names import harmless_words, is_secret_name

KEY = "sk-canary-0123456789"


@pytest.mark.parametrize(
    "name", ("OPENAI_API_KEY", "HF_TOKEN", "hub_token", "A_SECRET_NAME", "db_password", "api-key", "wandb.api_key")
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ("KEYBOARD", "KEY", "HOME", "keys", "monkey", "tokenizer", "TOKENIZERS_PARALLELISM"))
def test_names_of_nothing_secret(name):
    assert not is_secret_name(name)


def test_values_come_longest_first_with_the_first_name_of_each():
    environment = {"HUB_TOKEN": "hf_abcdef", "HF_TOKEN": "hf_abcdef", "MY_SECRET": "hf_abcdefghij", "PLAIN": "visible!"}
    assert list(secret_values(environment).items()) == [("hf_abcdefghij", "MY_SECRET"), ("hf_abcdef", "HF_TOKEN")]


def test_short_values_and_paths_that_are_there_are_no_secrets(tmp_path):
    environment = {"A_KEY": "7letter", "TOKENIZERS_PARALLELISM": "false", "TOKEN_FILE": str(tmp_path)}
    assert secret_values(environment) == {}
    assert secret_values({"A_SECRET": str(tmp_path / "absent")}) == {str(tmp_path / "absent"): "A_SECRET"}


def test_passwords_in_urls_are_secrets_whatever_the_variable_is_called():
    environment = {
        "DATABASE": "postgres://service:p%40ssword@host:5432/db?sslmode=require",
        "ENDPOINT": "https://host/v1?model=a&api-key=abcdefghi",
        "PROXY": "http://username@proxy:8080",
    }
    assert secret_values(environment) == {
        "p%40ssword": "DATABASE",
        "abcdefghi": "ENDPOINT",
        "p@ssword": "DATABASE",
    }


def test_a_secret_of_several_lines_is_found_line_by_line():
    redactor = Redactor({"SSH_KEY": "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA7\nshort\n"})
    assert redactor.redact("> MIIEpAIBAAKCAQEA7") == "> [redacted SSH_KEY]"
    assert redactor.redact("shortbread") == "shortbread"


def test_a_secret_goes_in_every_form_it_is_written_in():
    value = "p'a\\s<é> %/ss"
    redactor = Redactor({"A_PASSWORD": value})
    written = [value, json.dumps(value), json.dumps({"a": value}, ensure_ascii=False), repr([value]), f"x{value}x"]
    written += [repr(f'"quoted" {value}'), json.dumps(repr(value)), json.dumps({"a": repr(f'" {value}')})]
    written += [repr({"a": json.dumps({"b": value})}), json.dumps(repr(json.dumps(value)))]
    for text in (*written, "https://host/p%27a%5Cs%3C%C3%A9%3E%20%25%2Fss"):
        assert "[redacted A_PASSWORD]" in redactor.redact(text), text
    assert json.loads(redactor.redact(json.dumps(value))) == "[redacted A_PASSWORD]"


def test_a_longer_secret_is_not_cut_by_one_inside_it():
    redactor = Redactor({"SHORT_KEY": "abcdefgh", "LONG_KEY": "abcdefgh-ijkl"})
    assert redactor.redact("abcdefgh-ijkl, abcdefgh") == "[redacted LONG_KEY], [redacted SHORT_KEY]"


def test_the_beginning_of_a_secret_is_not_left_where_a_text_was_cut():
    redactor = Redactor({"A_KEY": KEY * 5, "B_KEY": "sk-other-0123"})
    assert redactor.redact(f'"Bearer {KEY}sk-can..." given, ... and') == '"Bearer [redacted A_KEY]..." given, ... and'
    assert redactor.redact("sk-other-0...sk-canary-...") == "[redacted B_KEY]...[redacted A_KEY]..."
    assert redactor.redact("'http://me:longwo... http://host:80...") == "'http://redacted... http://host:80..."
    assert redactor.redact("sk-...") == "sk-..." and redactor.redact(f"{KEY} and...") == f"{KEY} and..."


def test_redacting_again_changes_nothing():
    redactor = Redactor({"db_password": "password"})
    once = redactor.redact("a password, http://me:password@host?token=password")
    assert once == "a [redacted db_password], http://redacted@host?token=redacted"
    assert redactor.redact(once) == once
    odd = Redactor({"A_SECRET": "redacted"})
    assert odd.redact(odd.redact("redacted http://a:b@c")) == odd.redact("redacted http://a:b@c")


def test_credentials_of_any_url_are_hidden_and_it_stays_a_url():
    redactor = Redactor({})
    assert redactor.redact("see http://me:p@ss:word@host:8000/v1.") == "see http://redacted@host:8000/v1."
    assert redactor.redact("['https://ghp_token@host', 'ssh://git@host']") == (
        "['https://redacted@host', 'ssh://redacted@host']"
    )
    assert redactor.redact("https://host/a?n=1&X-Amz-Signature=abc&sig=d%3D") == (
        "https://host/a?n=1&X-Amz-Signature=redacted&sig=redacted"
    )
    assert redactor.redact("http://host/a?api_key=abc&n=1&ACCESS_TOKEN=d#e") == (
        "http://host/a?api_key=redacted&n=1&ACCESS_TOKEN=redacted#e"
    )


@pytest.mark.parametrize(
    "text", ("mail me@host", "http://host/@me", "a = b @ c", "http://host:8000/?q=tokens", "key=value", "")
)
def test_what_is_no_credential_stays(text):
    assert Redactor({"A_KEY": KEY}).redact(text) == text


def test_texts_of_a_tree_are_redacted_and_numbers_stay(monkeypatch):
    tree = {"a": [KEY, 1, ("http://u:p@h", None)], "n": 12345678, "b": True}
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("B_KEY", "12345678")
    assert redact_values(tree) == {
        "a": ["[redacted A_KEY]", 1, ("http://redacted@h", None)],
        "n": 12345678,
        "b": True,
    }


def test_the_environment_of_the_moment_counts(monkeypatch):
    monkeypatch.delenv("NEW_KEY", raising=False)
    assert redact(KEY) == KEY
    monkeypatch.setenv("NEW_KEY", KEY)
    assert redact(KEY) == "[redacted NEW_KEY]" and redact_values([KEY]) == ["[redacted NEW_KEY]"]


def test_long_text_takes_no_long_time():
    redactor = Redactor({f"A{number}_KEY": f"{KEY}-{number}" for number in range(20)})
    for text in ("a" * 1_000_000, "." * 100_000, "://" * 300_000, "?a" * 500_000, html.escape("<" * 200_000)):
        assert redactor.redact(text) == text


@pytest.mark.parametrize(
    "given",
    (
        f"hf_token: {KEY}",
        f'wandb: {{api_key: "{KEY}{"x" * 90}"}}',
        f'rollout: {{urls: "http://me:{KEY}{"x" * 60}@host"}}',
        f'rollout: {{urls: ["http://me:{KEY}@host:port"], engine: vllm-server}}',
        f"db_password: [{KEY}]",
        f"wandb: {{login: {{key: {KEY}}}}}",
        "hf_token: 12345678901",
        f"rewards: {{judge_api_key: {KEY}}}",
        f"rewards: [{{call: m.py:f, env: OPENAI_API_KEY={KEY}}}]",
        f"rewards: [{{name: judge, judge: {{url: http://a, model: m, key: [{KEY}]}}}}]",
        f"rewards: [{{name: exact, api_key: {KEY}}}]",
        f"rewards: ['hf_token={KEY}']",
        f"data: {{train: t, max_prompt_tokens: {{a_secret: {KEY}}}}}",
        f"hub_password: *{KEY}",
        f"hub_password: !{KEY}",
        f"hub_password: !!int {KEY}",
    ),
)
def test_what_a_recipe_gives_for_a_secret_is_not_repeated_in_its_problems(tmp_path, given):
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: m}}\ndata: {{train: t}}\noutput: o\n{given}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe("grpo", tmp_path / "recipe.yaml", check_paths=False)
    told = str(error.value)
    assert KEY[:10] not in told and "12345678901" not in told
    assert "redacted" in told or "put the key into" in told or "line " in told


@pytest.mark.parametrize(
    "override",
    (f"hf token={KEY}", f"hf_token={KEY}: [", f"a.b_key={KEY}.c.d={{", f"hf_token: {KEY}", f"-hf_token {KEY}"),
)
def test_what_an_override_gives_for_a_secret_is_not_repeated(tmp_path, override):
    (tmp_path / "recipe.yaml").write_text("model: {path: m}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe("sft", tmp_path / "recipe.yaml", [override], check_paths=False)
    assert KEY not in str(error.value)


def test_a_secret_below_a_value_that_has_no_keys_is_not_repeated(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: m}}\nhub: {{api_key: {KEY}}}\n")
    with pytest.raises(RecipeError, match=r"hub\.api_key is the value \[redacted\], so it has no key more") as error:
        load_recipe("sft", tmp_path / "recipe.yaml", ["hub.api_key.more=1"], check_paths=False)
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    "key, given, told",
    (
        ("", "256", '"256"'),
        ("max_tokens", 256, "256"),
        ("max_tokens", "256", "[redacted]"),
        ("eos_token", None, "null"),
        ("hf_token", True, "true"),
        ("", "learner.max_tokens=256", '"learner.max_tokens=256"'),
        ("", "model.path: a long name", '"model.path: a long name"'),
        ("", f"a.b=c, api-key = '{KEY}', d", '"a.b=c, api-key = [redacted]"'),
        ("", [{"MY_SECRET": KEY, "b": 1}], '[{"MY_SECRET": "[redacted]", "b": 1}]'),
        ("", f"see http://me:{KEY}@host/a", '"see http://redacted@host/a"'),
        ("rewards.0.judge.key", KEY, "[redacted]"),
    ),
)
def test_a_value_is_shown_without_secrets(key, given, told):
    assert shown(given, 200, key=key) == told


def test_words_of_a_command_line_are_shown_without_secrets():
    words = ["--hf_token", KEY, "--lr", "1e-5", f"--api-key={KEY}", "a.yaml"]
    assert harmless_words(words) == ["--hf_token", "[redacted]", "--lr", "1e-5", "--api-key=[redacted]", "a.yaml"]


CRASH = """
import os, threading
from tiercel.reliability.redaction import redact_tracebacks
redact_tracebacks()
def fail():
    raise KeyError("https://me:word@host", os.environ["MY_SECRET"])
thread = threading.Thread(target=fail, name="aside")
thread.start()
thread.join()
try:
    fail()
except KeyError as error:
    raise RuntimeError(os.environ["MY_SECRET"]) from error
"""


def test_tracebacks_of_process_and_thread_have_no_secrets():
    environment = {"MY_SECRET": "canary'of two\nlines of it", "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", CRASH], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "canary" not in ended.stderr and "lines of it" not in ended.stderr and "word" not in ended.stderr
    assert "Exception in thread aside:\nTraceback" in ended.stderr
    assert ended.stderr.count("[redacted MY_SECRET]") == 3
    assert "direct cause" in ended.stderr and ended.stderr.endswith("RuntimeError: [redacted MY_SECRET]\n")
