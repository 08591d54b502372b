"""Whole runs that learn from pairs and labels: killed and resumed, with the reference computed in advance,
evaluated."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from tests.training.test_loops import merged, run_offline, write_rows
from tiercel.cli.main import main
from tiercel.config import load_recipe
from tiercel.distributed.strategies.sharded import _mesh
from tiercel.errors import DataError, NonFiniteError
from tiercel.models.layers.value_head import ValueHead
from tiercel.runs.directory import read_metrics
from tiercel.runs.recording import gathered_groups
from tiercel.training.offline import loop as offline
from tiercel.training.offline.objectives import reference_sums
from tiercel.web.report import describe, write_report
from tiercel.web.report.reading import read_groups, read_run

KINDS = {
    "dpo": {"dpo": {"loss": "sigmoid", "beta": 0.5}},
    "mpo": {"dpo": {"loss": "mpo", "beta": 0.5}},
    "kto": {"kto": {"beta": 0.5}},
    "apo_zero_unpaired": {"kto": {"beta": 0.5, "loss": "apo_zero_unpaired"}},
    "sft": {"sft": {"neftune_alpha": 5, "label_smoothing": 0.1}},
    "reward": {"ranking": {"margin": 0.5, "margin_column": "rating", "centre_coef": 0.01}},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows with none, one or two pictures; the rejected side of one has another picture."""
    file = write_rows(tmp_path_factory.mktemp("rows"))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {"rejected": "no, not that", "label": number % 2 == 0, "rating": number % 3}
    pictured = [record for record in records if record["images"]]
    pictured[0]["rejected_images"] = pictured[1]["images"][:1] * len(pictured[0]["images"])
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def write(rows, tiny_checkpoints, tmp_path):
    """A recipe of a kind, with changes, as `load_recipe` gives it."""

    def recipe(name: str, output: str, **changes):
        tree = {
            "model": {"path": str(tiny_checkpoints["qwen2_5_vl"]), "dtype": "float32"},
            "lora": {"rank": 4, "alpha": 8},
            "data": {
                "train": str(rows),
                "eval": str(rows),
                "workers": 0,
                "max_prompt_tokens": 200,
                "format": "tiercel",
            },
            "learner": {"max_tokens_per_microbatch": 450},
            "optim": {"lr": 1e-2, "prompts_per_step": 6},
            "train": {"steps": 4, "save_every": 2, "threads": 1},
            "output": str(tmp_path / output),
            **KINDS[name],
        }
        file = tmp_path / f"{output}.yaml"
        file.write_text(yaml.safe_dump(merged(tree, changes)))
        return load_recipe({"mpo": "dpo", "apo_zero_unpaired": "kto"}.get(name, name), file)

    return recipe


@pytest.mark.parametrize("value", (math.nan, -math.inf))
@pytest.mark.parametrize("name", ("dpo", "kto", "apo_zero_unpaired"))
def test_a_replay_has_the_reference_that_the_update_had(write, capsys, monkeypatch, name, value):
    """A number that only the reference's pass gave makes the same loss again, and only its row is named. An implicit
    reward of inf has a finite loss, which means nothing."""
    spoilt = []

    def sums(*inputs):
        found = reference_sums(*inputs)
        made = inputs[1]
        example = made[-1].examples[0]
        spoilt[:] = [example.row.id]
        found[example.prompt.index] = torch.full_like(found[example.prompt.index], value)
        return found

    monkeypatch.setattr("tiercel.training.offline.objectives.reference_sums", sums)
    recipe = write(name, "run", data={"eval": None})
    with pytest.raises(NonFiniteError) as caught:
        run_offline(recipe)
    assert caught.value.rows == [spoilt]
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["replay", recipe.output]) == 3
    said = capsys.readouterr()
    number = caught.value.what.removeprefix("the loss is ")
    assert f"row {spoilt[0]}: loss {number}," in said.out
    assert f"again not finite for rows {spoilt[0]};" in said.err


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def bytes_of(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(last(run).rglob("*.safetensors"))}


def without_times(run: Path) -> list[dict]:
    kept = read_metrics(run)
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))} for row in kept]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_was_ended_goes_on_to_the_same_bytes(write, monkeypatch, name):
    whole = run_offline(write(name, "whole"))
    honest, calls = offline.example_update, iter(range(100))

    def failing(trainer, objective, plan):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return honest(trainer, objective, plan)

    monkeypatch.setattr(offline, "example_update", failing)
    recipe = write(name, "ended")
    with pytest.raises(KeyboardInterrupt):
        run_offline(recipe)
    monkeypatch.setattr(offline, "example_update", honest)
    ended = run_offline(recipe)
    assert bytes_of(ended) == bytes_of(whole) and without_times(ended) == without_times(whole)
    states = [json.loads((last(run) / "state.json").read_text())["objective"] for run in (whole, ended)]
    assert states[0] == states[1] and bool(states[0]) == (name in ("dpo", "mpo"))


@pytest.mark.parametrize(("name", "place"), (("kto", 1), ("dpo", 1), ("dpo", 0)))
def test_an_infinite_logprob_of_the_reference_names_its_row_in_an_evaluation(write, monkeypatch, name, place):
    """In KTO that of another row's answer, which its divergence is estimated on, counts too."""
    spoilt = []

    def sums(*inputs):
        found = reference_sums(*inputs)
        example = inputs[1][0].examples[0]
        spoilt[:] = [example.row.id]
        found[example.prompt.index][place] = -math.inf
        return found

    monkeypatch.setattr("tiercel.training.offline.objectives.reference_sums", sums)
    with pytest.raises(NonFiniteError, match="eval/loss is nan for rows") as caught:
        run_offline(write(name, "run"))
    assert caught.value.rows == [spoilt]


def test_pairs_are_told_apart_on_held_out_rows(write, capsys):
    run = run_offline(write("dpo", "run"))
    rows = read_metrics(run)
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/margin"] == 0 and rows[-1]["eval/accuracy"] > 0.8
    assert all({"pairs/accuracy", "pairs/margin", "tokens/prompt"} <= row.keys() for row in rows[1:])
    assert main(["eval", str(run)]) == 0
    before, after = capsys.readouterr().out.splitlines()[-2:]
    assert before.startswith("before: accuracy 0.500, margin 0.0000, loss 0.6931")
    assert after.startswith(f"after:  accuracy {rows[-1]['eval/accuracy']:.3f}, margin {rows[-1]['eval/margin']:.4f}")


@pytest.mark.parametrize("changes", ({}, {"lora": None, "freeze": [], "optim": {"lr": 1e-3}}))
def test_a_reference_computed_before_gives_the_same_run(write, changes, capsys):
    each, before = (
        run_offline(write("dpo", name, **changes, dpo={"precompute_reference": name == "before"}))
        for name in ("each", "before")
    )
    assert (before / "reference.safetensors").is_file() and not (each / "reference.safetensors").exists()
    for one, other in zip(read_metrics(each), read_metrics(before), strict=True):
        for key in ("loss", "pairs/margin", "eval/loss", "eval/margin"):
            assert one.get(key) == pytest.approx(other.get(key), abs=2e-5)
    capsys.readouterr()
    assert main(["eval", str(before)]) == 0
    after = capsys.readouterr().out.splitlines()[-1]
    assert float(after.split("margin ")[1].split(",")[0]) == pytest.approx(
        read_metrics(before)[-1]["eval/margin"], abs=1e-3
    )


def test_kto_moves_labels_apart(write, capsys):
    run = run_offline(write("kto", "run"))
    rows = read_metrics(run)
    assert rows[1]["loss"] == pytest.approx(0.5, abs=1e-6) and rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["labels/reward_desirable"] > rows[-1]["labels/reward_undesirable"]
    assert main(["eval", str(run)]) == 0
    assert f"loss {rows[-1]['eval/loss']:.4f}" in capsys.readouterr().out


def test_held_out_pairs_are_recorded_batch_by_batch(write, monkeypatch):
    parts = []

    def gathered(ranks, scored, values):
        parts.append(len(scored))
        return gathered_groups(ranks, scored, values)

    monkeypatch.setattr("tiercel.runs.directory.gathered_groups", gathered)
    monkeypatch.setattr("tiercel.training.offline.heldout_loss.ROWS_AT_ONCE", 5)
    run = run_offline(write("dpo", "run", train={"steps": 1}))
    assert parts == [5, 5, 2] * 2
    groups = read_groups(read_run(run), "evaluations", 1).groups
    assert [group.id for group in groups] == [f"row-{number}" for number in range(12)]


def test_held_out_pairs_are_kept_with_the_value_of_each_answer(write):
    run = run_offline(write("reward", "run"))
    rows = read_metrics(run)
    for row in (rows[0], rows[-1]):
        groups = read_groups(read_run(run), "evaluations", row["step"]).groups
        values = [[each.total for each in group.completions] for group in groups]
        assert len(groups) == row["eval/count"]
        assert sum(chosen - rejected for chosen, rejected in values) / len(values) == pytest.approx(row["eval/margin"])
        assert {group.completions[1].text for group in groups} == {"no, not that"}
    assert "The same pairs" in write_report(run).read_text()
    assert describe(run).startswith(f"Reward model, {rows[-1]['step']} steps: held-out accuracy 0.5")


def test_eval_of_a_run_takes_the_shift_that_its_loss_had(write, capsys):
    run = run_offline(write("mpo", "run"))
    assert main(["eval", str(run)]) == 0
    assert f"loss {read_metrics(run)[-1]['eval/loss']:.4f}" in capsys.readouterr().out.splitlines()[-1]


def test_held_out_rows_that_cannot_be_encoded_are_counted(write, rows, tmp_path):
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    records[1]["images"] = ["missing.png"]
    held = rows.with_name("held.jsonl")
    held.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match=r"1 of 12 rows"):
        run_offline(write("dpo", "strict", data={"eval": str(held)}))
    run = run_offline(write("dpo", "lenient", data={"eval": str(held), "max_bad_fraction": 0.1}))
    assert [row["eval/count"] for row in read_metrics(run) if "eval/count" in row] == [11, 11]


def test_check_finds_a_column_of_margins_that_rows_do_not_have(write, tmp_path, capsys):
    write("reward", "run", ranking={"margin_column": "score"})
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "ranking.margin_column names it" in capsys.readouterr().out


def test_the_value_head_of_a_sharded_model_is_not_rounded(write, monkeypatch):
    honest, seen = ValueHead.forward, set()

    def forward(head, hidden_NH):
        seen.add((type(head.weight), head.weight.dtype))
        return honest(head, hidden_NH)

    monkeypatch.setattr(ValueHead, "forward", forward)
    changes = {"model": {"dtype": "bfloat16"}, "lora": None, "freeze": ["vision", "projector"], "data": {"eval": None}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for steps in (1, 2):  # the second run is resumed
            recipe = write("reward", "run", **changes, train={"strategy": "fsdp2", "steps": steps})
            run = run_offline(recipe)
    finally:
        dist.destroy_process_group()
        _mesh.cache_clear()
    assert seen == {(nn.Parameter, torch.float32)}
    assert [row["step"] for row in read_metrics(run)] == [1, 2] and read_metrics(run)[-1]["grad_norm"] > 0


@pytest.mark.parametrize("changes", ({}, {"lora": None, "freeze": [], "optim": {"lr": 1e-3}}))
def test_values_rank_held_out_pairs_before_and_after_an_export(write, tmp_path, capsys, changes):
    run = run_offline(write("reward", "run", train={"steps": 12, "save_every": 6}, **changes))
    rows = read_metrics(run)
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/margin"] == 0 and rows[-1]["eval/accuracy"] > 0.8
    assert rows[-1]["pairs/reward_chosen"] > rows[-1]["pairs/reward_rejected"] and "entropy/mean" not in rows[-1]
    assert main(["eval", str(run)]) == 0
    before, after = capsys.readouterr().out.splitlines()[-2:]
    assert before.startswith("before: accuracy 0.500, margin 0.0000")
    assert after.startswith(f"after:  accuracy {rows[-1]['eval/accuracy']:.3f}, margin {rows[-1]['eval/margin']:.4f}")
    assert main(["export", str(run), "--merge", "--output", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run.yaml"), f"model.path={tmp_path / 'merged'}"]) == 0
    merged_says = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
    assert merged_says.split(", loss")[0] == after.partition(": ")[2].strip().split(", loss")[0]
    assert main(["predict", str(run), "hello"]) == 2
    assert "is a reward model" in capsys.readouterr().err


def test_a_row_without_its_margin_is_rejected_by_name(write, capsys):
    with pytest.raises(DataError, match=r"must be a number, because ranking\.margin_column names it"):
        run_offline(write("reward", "run", ranking={"margin_column": "score"}))


@pytest.mark.parametrize("name", ("dpo", "kto", "reward"))
def test_check_preview_and_plan_take_the_recipe(write, tmp_path, capsys, name):
    recipe = write(name, "unused")
    file = str(tmp_path / "unused.yaml")
    word = {"reward": "reward-model"}.get(name, name.upper())
    assert main(["check", file]) == 0 and f"a valid {word} recipe" in capsys.readouterr().out
    assert main(["data", "preview", file, "--output", str(tmp_path / "rows.html")]) == 0
    page = (tmp_path / "rows.html").read_text()
    assert ("the rejected answer" in page) == (name != "kto") and recipe.kind == name
    assert main(["plan", file, "learner.compile=false"]) == 0


@pytest.mark.quantized
@pytest.mark.parametrize("name", KINDS)
def test_every_verb_learns_on_4_bits_and_goes_on_from_its_checkpoint(write, name, capsys):
    pytest.importorskip("bitsandbytes")
    changes = {"lora": {"rank": 8, "start": "loftq"}, "optim": {"name": "adamw_8bit"}}
    recipe = write(name, "run", **changes, model={"quantize": "nf4"})
    run = run_offline(recipe)
    assert len(read_metrics(run)) == 5 and read_metrics(run)[-1]["grad_norm"] > 0
    again = run_offline(write(name, "short", **changes, model={"quantize": "nf4"}, train={"steps": 2}))
    assert bytes_of(run_offline(write(name, "short", **changes, model={"quantize": "nf4"}))) == bytes_of(run)
    assert last(again).name == "step-000004"
    assert (last(run) / "reference.safetensors").is_file() == recipe.has_reference
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    said = re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)
    of_run = [row["eval/loss"] for row in read_metrics(run) if "eval/loss" in row]
    assert said == [f"{of_run[0]:.4f}", f"{of_run[-1]:.4f}"]  # against what the run starts from, with its adapter
    assert main(["export", str(run), "--merge"]) == 0
    assert "merged into the nf4 weights" in capsys.readouterr().out


def test_a_reference_computed_before_is_kept_where_the_run_may_go_on(write):
    whole = {"lora": None, "freeze": [], "dpo": {"precompute_reference": True}}
    run_offline(write("dpo", "run", **whole, train={"steps": 1}))
    run = run_offline(write("dpo", "run", **whole, train={"steps": 2}, data={"workers": 1}))
    assert [row["step"] for row in read_metrics(run)][-1] == 2
