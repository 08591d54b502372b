"""Ranks that differ are refused, with the difference named."""

from dataclasses import replace

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.distributed.agreement import RankFacts, differences, facts, program, recipe_facts
from tiercel.distributed.versions import fingerprint


def on_one_node(*values: dict[str, str]) -> list[RankFacts]:
    return [RankFacts(node="node 0, a", values=each) for each in values]


def test_equal_ranks_agree():
    assert differences(on_one_node({"torch": "2.13.0", "recipe": "ab"}) * 3) == []


def test_a_difference_names_ranks_and_values():
    facts = [{"torch": "2.13.0", "peft": "0.19"}, {"torch": "2.12.1", "peft": "0.19"}, {"torch": "2.13.0"}]
    assert differences(on_one_node(*facts)) == [
        "peft: 0.19 on ranks 0, 1, none on rank 2",
        "torch: 2.13.0 on ranks 0, 2, 2.12.1 on rank 1",
    ]


def test_many_ranks_are_counted():
    lines = differences(on_one_node(*[{"x": "1"}] * 12, {"x": "2"}))
    assert lines == ["x: 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, 2 on rank 12"]


def test_machines_are_named_with_their_values(tmp_path, monkeypatch):
    recipe = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", optim={"lr": 1e-3})
    other = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", optim={"lr": 2e-3})
    nodes = [replace(recipe_facts(each), node=f"node {n}, host") for n, each in enumerate((recipe, recipe, other))]
    assert differences(nodes) == [
        "optim.lr: 0.001 on ranks 0, 1 (node 0, host; node 1, host), 0.002 on rank 2 (node 2, host)"
    ]


def test_secrets_differ_without_being_shown(tmp_path, monkeypatch):
    def of_a_rank(secret: str) -> RankFacts:
        monkeypatch.setenv("HUB_TOKEN", secret)
        return recipe_facts(
            sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", data={"system": f"say {secret}"})
        )

    alike = [of_a_rank("canary-1-of-two"), of_a_rank("canary-1-of-two")]
    assert differences(alike) == []
    assert differences([alike[0], of_a_rank("canary-2-of-two")]) == [
        'data.system: "say [redacted HUB_TOKEN]" on rank 0, "say [redacted HUB_TOKEN]" on rank 1'
    ]


def test_a_file_that_differs_in_a_byte_has_another_fingerprint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(5 * 2**20))
    before = fingerprint([file])
    file.write_bytes(bytes(5 * 2**20 - 1) + b"\1")
    assert fingerprint([file]) != before
    file.write_bytes(bytes(5 * 2**20 + 1))
    assert fingerprint([file]) != before


def test_facts_follow_the_recipe_and_the_data(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    recipe = sft_recipe(tiny_checkpoints["ovis2"], rows, tmp_path / "run")
    before = facts(recipe)
    assert before == facts(recipe) and {"data.train", "model files"} <= set(before)
    assert {"python", "torch", "transformers", "tiercel's files"} <= set(program())
    rows.write_text(rows.read_text() + "\n")
    assert {name for name in before if before[name] != facts(recipe)[name]} == {"data.train", "data.eval"}


def test_facts_follow_the_teacher_the_reward_models_and_the_adapters(tiny_checkpoints, tmp_path):
    files = {
        "lora.init": "start/adapter_config.json",
        "data.template": "policy.jinja",
        "algorithm.teacher.path": "teacher/config.json",
        "algorithm.teacher.adapter": "teacher's/adapter_model.safetensors",
        "algorithm.teacher.template": "teacher.jinja",
        "rewards.1.model.path": "scorer/config.json",
        "rewards.1.model.adapter": "scorer's/trained_whole.safetensors",
        "rewards.1.model.template": "scorer.jinja",
    }
    for name in files.values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")

    def model(name: str) -> dict[str, str]:
        return {
            "path": str(tmp_path / name),
            "adapter": str(tmp_path / f"{name}'s"),
            "template": str(tmp_path / f"{name}.jinja"),
        }

    recipe = grpo_recipe(
        tiny_checkpoints["ovis2"],
        write_rows(tmp_path),
        tmp_path / "run",
        lora={"init": str(tmp_path / "start")},
        data={"template": str(tmp_path / "policy.jinja")},
        rewards=[{"name": "exact"}, {"name": "model", "model": model("scorer")}],
        algorithm={"teacher": model("teacher")},
    )
    for key, name in files.items():
        before = facts(recipe)
        (tmp_path / name).write_text("2")
        after = facts(recipe)
        assert {each for each in before if before[each] != after[each]} == {key}


def test_weights_of_a_teacher_on_a_server_may_differ(tiny_checkpoints, tmp_path):
    (tmp_path / "teacher").mkdir()
    teacher = {"path": str(tmp_path / "teacher"), "url": "http://127.0.0.1:1", "top_k": 8}
    recipe = grpo_recipe(
        tiny_checkpoints["ovis2"], write_rows(tmp_path), tmp_path / "run", algorithm={"teacher": teacher}
    )
    found = []
    for name in ("none", "model.safetensors", "config.json"):
        (tmp_path / "teacher" / name).write_text("1")
        found.append(facts(recipe)["algorithm.teacher.path"])
    assert found[0] == found[1] != found[2]
