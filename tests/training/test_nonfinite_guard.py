"""A number that is not finite stops the run before the update: the row is named, nothing is changed, and it can be
replayed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.faults.fault_plan import Fault, planning
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.errors import NonFiniteError, TrainingError
from tiercel.runs.directory import read_metrics
from tiercel.training.grpo.policy_update import update_on_minibatch
from tiercel.training.grpo.precomputed_values import precompute_values
from tiercel.training.nonfinite_batches import load_saved_update
from tiercel.training.nonfinite_guard import nonfinite_directories, require_finite_weights
from tiercel.training.replay import find_nonfinite_directory

FAMILY = "qwen2_5_vl"
ADAPTER = "adapter/adapter_model.safetensors"
LEARNT = {"loss", "grad_norm", "entropy/mean"}


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path)


def recipe_of(checkpoint: Path, rows: Path, **changes):
    data = {"eval": None, "workers": 0, "max_prompt_tokens": 60}
    alone = {"train": {"steps": 3, "save_every": 1, "threads": 1}, "data": data}
    # few groups in a microbatch, so that not all rows are at fault
    packing = {"learner": {"max_tokens_per_microbatch": 66, "skip_zero_advantage": False}}
    return grpo_recipe(checkpoint, rows, rows.parent / "run", **{**alone, **packing, **changes})


@pytest.mark.parametrize(("site", "kind"), (("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf")))
def test_loss_and_gradient_stop_the_run_with_the_row_and_nothing_changed(tiny_checkpoints, rows, site, kind):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site=site, kind=kind, step=1)]), pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe)
    run = Path(recipe.output)
    step = [json.loads(line)["id"] for line in (run / "rollouts/step-000002.jsonl").read_text().splitlines()]
    assert len(caught.value.rows[0]) < len(step) and caught.value.rows[0][0] in step
    assert caught.value.rows[0][0] in str(caught.value) and "no parameter was changed" in str(caught.value)
    assert [row["step"] for row in read_metrics(run)] == [1]
    before, after = (
        load_file(run / "checkpoints/step-000001" / ADAPTER),
        load_file(run / "nonfinite/step-000002" / ADAPTER),
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    run_grpo(recipe)  # the same command resumes, and the planned fault is over
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_engine(tiny_checkpoints, rows, monkeypatch):
    """Logprobs of -inf are far from the engine's as well."""

    def is_far(*given):
        raise TrainingError("the engine")

    monkeypatch.setattr("tiercel.training.grpo.policy_update.require_near", is_far)
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site="loss", kind="inf", step=0)]), pytest.raises(NonFiniteError, match="loss"):
        run_grpo(recipe)


def test_an_advantage_is_named_before_anything_is_learnt(tiny_checkpoints, rows):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site="advantage", kind="nan", step=1)]), pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe)
    assert "an advantage is not finite for rows row-" in str(caught.value)


def test_a_weight_that_is_not_finite_is_named(tiny_checkpoints, rows):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site="weights", kind="nan", step=1)]), pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe)
    assert "the trained weight" in str(caught.value) and "lora_A" in str(caught.value)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_an_update_is_left_out_where_the_recipe_allows_it_and_counted(tiny_checkpoints, rows, dtype):
    model = {"path": str(tiny_checkpoints[FAMILY]), "dtype": dtype}
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows, model=model, reliability={"max_skipped_updates": 1})
    with planning([Fault(site="loss", kind="nan", step=1)]):
        run = run_grpo(recipe)
    assert [row["update/left_out"] for row in read_metrics(run)] == [0, 1, 1]
    assert [row.keys() >= LEARNT for row in read_metrics(run)] == [True, False, True]
    assert LEARNT.isdisjoint(read_metrics(run)[1])
    first, second = (load_file(run / f"checkpoints/step-00000{n}" / ADAPTER) for n in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    third = load_file(run / "checkpoints/step-000003" / ADAPTER)
    assert any(not torch.equal(second[name], third[name]) for name in second)
    assert "an update was skipped (1 so far)" in (run / "log.txt").read_text()


def test_each_update_of_a_step_that_is_left_out_is_kept(tiny_checkpoints, rows, capsys):
    recipe = recipe_of(
        tiny_checkpoints[FAMILY],
        rows,
        optim={"minibatches": 2},
        learner={"max_tokens_per_microbatch": 2000, "skip_zero_advantage": False},
        reliability={"max_skipped_updates": 2},
        train={"steps": 1, "save_every": 1, "threads": 1},
    )
    with planning([Fault(site="loss", kind="nan", step=0), Fault(site="loss", kind="nan", step=0)]):
        run = run_grpo(recipe)
    first, second = run / "nonfinite/step-000001", run / "nonfinite/step-000001-2"
    rows_of = [json.loads((kept / "report.json").read_text())["rows"] for kept in (first, second)]
    assert rows_of[0] != rows_of[1]
    (run / "nonfinite/step-000001-by hand").mkdir()
    assert (
        nonfinite_directories(run, 1) == nonfinite_directories(run, None) == [first, second]
        and nonfinite_directories(run, 2) == []
    )
    assert find_nonfinite_directory(run, 1) == find_nonfinite_directory(run, None) == second


def test_only_as_many_are_left_out_as_the_recipe_allows(tiny_checkpoints, rows):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows, reliability={"max_skipped_updates": 1})
    faults = [Fault(site="loss", kind="nan", step=step) for step in (0, 1)]
    with planning(faults), pytest.raises(NonFiniteError):
        run_grpo(recipe)


def test_a_replay_names_row_and_layer_of_weights_gone_wild(tiny_checkpoints, rows, capsys):
    recipe = recipe_of(
        tiny_checkpoints[FAMILY], rows, optim={"lr": 1e30}, train={"steps": 3, "save_every": 3, "threads": 1}
    )
    with pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe)
    assert f"tiercel replay {recipe.output}" in str(caught.value)
    assert main(["replay", recipe.output]) == 3
    said = capsys.readouterr()
    assert "the first output that is not finite comes from" in said.out
    assert "again not finite" in said.err


def test_a_checkpoint_whose_outputs_are_nan_ends_the_run_in_its_first_step(tiny_checkpoints, rows, tmp_path):
    """All rewards are equal, and groups without an advantage are left out, but not those that were sampled from NaN."""
    (rows.parent / "mine.py").write_text("def variety(sample):\n    return 0.5\n")
    checkpoint = tmp_path / "nan"
    shutil.copytree(tiny_checkpoints[FAMILY], checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name][0] = 3e38  # each is a number, but their sum is not
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    learner = {"max_tokens_per_microbatch": 66, "skip_zero_advantage": True}
    with pytest.raises(NonFiniteError, match="the loss is nan for rows row-"):
        run_grpo(recipe_of(checkpoint, rows, learner=learner))


def test_a_replay_says_so_where_everything_is_finite(tiny_checkpoints, rows, capsys):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site="loss", kind="nan", step=2)]), pytest.raises(NonFiniteError):
        run_grpo(recipe)
    assert main(["replay", recipe.output, "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "are finite here" in said
    rows_at_fault = json.loads((Path(recipe.output) / "nonfinite/step-000003/report.json").read_text())["rows"][0]
    assert rows_at_fault and all(f"row {row}: loss " in said for row in rows_at_fault)
    assert main(["replay", recipe.output, "--step", "2"]) == 2


KL = {"kl": {"coef": 0.1, "estimator": "k3"}}
SEVERAL = {"optim": {"rollout_epochs": 2}}
PLANTED = {  # what is spoilt, where the learner reads it, and a recipe that does so
    "old_logprobs_N": (math.nan, SEVERAL),
    "old_logprobs_N of -inf": (-math.inf, SEVERAL),
    "reference_logprobs_N": (math.nan, {"algorithm": KL}),
    "reference_logprobs_N of inf": (math.inf, {"algorithm": KL}),
    "is_chosen_N": (math.nan, {"algorithm": {"top_entropy": 0.5}}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_replay_runs_the_microbatch_that_failed(tiny_checkpoints, rows, capsys, monkeypatch, planted):
    """A number that is in no row and no weight is kept, gives the same loss again, and its row alone is named."""
    name, (number, changes) = planted.partition(" ")[0], PLANTED[planted]
    learner = {"learner": {"max_tokens_per_microbatch": 2000, "skip_zero_advantage": False}}
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows, **{**learner, **changes})
    spoilt: list[str] = []

    def known(trainer, units, recipe):
        found = precompute_values(trainer, units, recipe)
        batch, own = units[0].batches[0], found[0][0]
        values_N = getattr(own, name).float().clone()
        place = len(values_N) // 2
        values_N[place] = number
        spoilt.append(batch.names_C[int(batch.packed.continuation_of_N[place])].row)
        assert len(batch.prompt_ids) > 1
        return [[replace(own, **{name: values_N}), *found[0][1:]], *found[1:]]

    monkeypatch.setattr("tiercel.training.grpo.minibatch_updates.precompute_values", known)
    with pytest.raises(NonFiniteError) as caught:
        run_grpo(recipe)
    monkeypatch.undo()
    assert caught.value.rows == [spoilt]
    (rows.parent / "rows.jsonl").write_text("")  # the tensors are enough
    said = replayed(recipe, capsys)
    number = caught.value.what.removeprefix("the loss is ")
    together = next(line for line in said.out.splitlines() if "together" in line)
    assert f"together: loss {number}," in together
    assert f"row {spoilt[0]}: loss {number}," in said.out
    assert f"again not finite for rows {spoilt[0]};" in said.err
    finite = [line for line in said.out.splitlines() if line.startswith("row ") and f"row {spoilt[0]}:" not in line]
    assert finite and not any("nan" in line or "inf" in line for line in finite)


def replayed(recipe, capsys):
    capsys.readouterr()
    assert main(["replay", recipe.output]) == 3
    return capsys.readouterr()


def test_a_kept_microbatch_is_what_was_computed(tiny_checkpoints, rows, monkeypatch):
    """Everything that a pass takes is read back equal. Cut into rows, it has the same tokens."""
    recipe = recipe_of(
        tiny_checkpoints[FAMILY], rows, learner={"max_tokens_per_microbatch": 2000, "skip_zero_advantage": False}
    )
    units = []

    def update(trainer, minibatch, known, recipe):
        units.extend(minibatch.units)
        return update_on_minibatch(trainer, minibatch, known, recipe)

    monkeypatch.setattr("tiercel.training.grpo.minibatch_updates.update_on_minibatch", update)
    with planning([Fault(site="loss", kind="nan", step=0)]), pytest.raises(NonFiniteError):
        run_grpo(recipe)
    (kept,) = load_saved_update(Path(recipe.output) / "nonfinite/step-000001", torch.device("cpu"))
    (unit,), (batch,) = units, kept.unit.batches
    wanted = unit.batches[0]
    for name in ("token_ids_T", "positions_DT", "scoring_N", "targets_N", "continuation_of_N"):
        assert torch.equal(getattr(batch.packed, name), getattr(wanted.packed, name))
    assert batch.packed.tree == wanted.packed.tree and batch.names_C == wanted.names_C
    assert (
        torch.equal(batch.sampler_logprobs_N, wanted.sampler_logprobs_N) and not batch.sampler_logprobs_N.isnan().any()
    )
    (file,) = (Path(recipe.output) / "nonfinite/step-000001").glob("*.safetensors")
    with safe_open(file, "pt") as opened:  # older versions wrote other names of the class
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    (header,) = metadata
    assert '"MicrobatchUnit"' in metadata[header]
    for name in ("PolicyUnit", "Microbatches"):
        save_file(tensors, file, {header: metadata[header].replace('"MicrobatchUnit"', f'"{name}"')})
        (older,) = load_saved_update(file.parent, torch.device("cpu"))
        assert older.unit.batches[0].packed.tree == wanted.packed.tree
    assert [each.sha256 for each in batch.packed.images] == [each.sha256 for each in wanted.packed.images]
    assert all(
        torch.equal(a.views[0], b.views[0]) for a, b in zip(batch.packed.images, wanted.packed.images, strict=True)
    )
    parts = [part.unit.batches[0] for _, part in kept.of_rows()]
    assert torch.equal(torch.cat([part.packed.targets_N for part in parts]), wanted.packed.targets_N)
    assert sequences([part.packed for part in parts]) == sequences([wanted.packed])
    assert torch.equal(torch.cat([part.advantages_C for part in parts]), wanted.advantages_C)
    assert [part.prompt_ids[0] for part in parts] == list(wanted.prompt_ids)


def sequences(packs):
    """The tokens and the pictures of each continuation, from the start of its prompt."""
    found = []
    for packed in packs:
        for end in packed.ends_C:
            pictures = zip(packed.images, packed.image_nodes, strict=True)
            shown = [image.sha256 for image, node in pictures if node in packed.tree.path(end)]
            found.append((packed.token_ids_T[packed.tree.places(end)].tolist(), shown))
    return found


def test_a_run_kept_by_an_older_version_is_told(tiny_checkpoints, rows, capsys):
    recipe = recipe_of(tiny_checkpoints[FAMILY], rows)
    with planning([Fault(site="loss", kind="nan", step=0)]), pytest.raises(NonFiniteError):
        run_grpo(recipe)
    (Path(recipe.output) / "nonfinite/step-000001/microbatches-000.safetensors").unlink()
    assert main(["replay", recipe.output]) == 2
    assert "has no microbatches to compute again" in capsys.readouterr().err


def test_sft_leaves_an_update_out_and_records_no_loss_of_it(tiny_checkpoints, rows):
    settings = {"data": {"eval": None, "workers": 0}, "reliability": {"max_skipped_updates": 1}}
    recipe = sft_recipe(tiny_checkpoints[FAMILY], rows, rows.parent / "run", **settings)
    with planning([Fault(site="loss", kind="nan", step=1)]):
        metrics = read_metrics(run_offline(recipe))
    assert [row["update/left_out"] for row in metrics] == [0, 1, 1]
    assert [sorted(LEARNT & row.keys()) for row in metrics] == [sorted(LEARNT), [], sorted(LEARNT)]


def test_sft_stops_and_replays_alike(tiny_checkpoints, rows, capsys):
    recipe = sft_recipe(
        tiny_checkpoints[FAMILY], rows, rows.parent / "run", data={"eval": None, "workers": 0}, train={"save_every": 1}
    )
    with planning([Fault(site="loss", kind="inf", step=1)]), pytest.raises(NonFiniteError) as caught:
        run_offline(recipe)
    assert "the loss is inf" in str(caught.value) or "the loss is nan" in str(caught.value)
    assert main(["replay", recipe.output]) == 0
    assert "all 6 are finite here" in capsys.readouterr().out


def test_weights_that_are_not_finite_are_not_saved():
    good = {"a": torch.ones(3), "b": torch.zeros(2)}
    require_finite_weights(good, 7)
    with pytest.raises(TrainingError) as caught:
        require_finite_weights({**good, "b": torch.tensor([1.0, math.inf])}, 7)
    assert "the trained weight b is not finite after step 7, so no checkpoint was written" in str(caught.value)
