"""What `tiercel serve` prints once a server answers. The server itself is replaced by a stand-in."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli import serve
from tiercel.cli.arguments import build_parser
from tiercel.cli.main import parse
from tiercel.cli.recipes import served_recipe
from tiercel.config import recipe_to_yaml
from tiercel.rollout.vllm.http import KEY_VARIABLE


@pytest.fixture
def printed(tiny_checkpoints, tmp_path, monkeypatch, capsys):
    """Serves a recipe and answers what was printed, and the key that the server got."""
    keys = []

    @contextmanager
    def stand_in(arguments, port, key, **options):
        keys.append(key)
        yield SimpleNamespace(pid=1)

    monkeypatch.setattr(serve, "served", stand_in)
    monkeypatch.setattr(serve, "watch", lambda process, is_over: None)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))

    def run(*overrides: str) -> tuple[str, str]:
        arguments = parse(build_parser(), ["serve", str(tmp_path / "recipe.yaml"), *overrides, "--port", "8000"])
        serve.run(served_recipe(arguments), arguments)
        return capsys.readouterr().out, keys[-1]

    return run


def test_a_key_of_the_users_own_is_not_printed(printed, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "canary-1234")
    out, key = printed("data.system=canary-1234")
    assert key == "canary-1234" and key not in out
    assert "export" not in out and f"data.system=[redacted {KEY_VARIABLE}] rollout.engine=vllm-server" in out


@pytest.mark.parametrize("value", (None, ""))
def test_a_key_that_is_made_up_is_printed_once(printed, monkeypatch, value):
    if value is None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(KEY_VARIABLE, value)
    out, key = printed()
    assert out.count(key) == 1 and f"export {KEY_VARIABLE}={key}\n" in out
