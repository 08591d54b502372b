"""Ranks that differ are refused by name."""

from tests.training.test_loops import sft_recipe, write_rows
from tiercel.distributed.agreement import differences, facts, fingerprint, program


def test_equal_ranks_agree():
    assert differences([{"torch": "2.13.0", "recipe": "ab"}] * 3) == []


def test_a_difference_names_ranks_and_values():
    facts = [{"torch": "2.13.0", "peft": "0.19"}, {"torch": "2.12.1", "peft": "0.19"}, {"torch": "2.13.0"}]
    assert differences(facts) == [
        "peft: 0.19 on ranks 0, 1, none on rank 2",
        "torch: 2.13.0 on ranks 0, 2, 2.12.1 on rank 1",
    ]


def test_many_ranks_are_counted():
    lines = differences([{"x": "1"}] * 12 + [{"x": "2"}])
    assert lines == ["x: 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, 2 on rank 12"]


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
    assert before == facts(recipe) and {"recipe", "data.train", "model files"} <= set(before)
    assert {"python", "torch", "transformers", "tiercel's files"} <= set(program())
    other = facts(sft_recipe(tiny_checkpoints["ovis2"], rows, tmp_path / "run", optim={"lr": 1e-3}))
    assert {name for name in before if before[name] != other[name]} == {"recipe"}
    rows.write_text(rows.read_text() + "\n")
    assert {name for name in before if before[name] != facts(recipe)[name]} == {"data.train", "data.eval"}
