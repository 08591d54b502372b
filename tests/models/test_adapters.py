"""Kinds of adapters, and the start from the rounding error of quantised weights."""

import math

import pytest
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight

from tests.models.test_families import huggingface_inputs, items_of
from tests.tiny_models import EXPERT_FAMILIES, tiny_policy, tiny_recipe
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.config.schema import KtoRecipe, Lora
from tiercel.errors import ModelError
from tiercel.inference_and_export.export import export
from tiercel.models.families.loading import load_family
from tiercel.models.policy import Policy, build_policy, load_for_inference
from tiercel.models.reference import restore_reference, save_reference
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import restore_adapter, save_adapter
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.runs.directory import read_metrics

CPU = torch.device("cpu")
FAMILIES = ("qwen2_5_vl", "qwen3_5", "gemma3")


def moved(policy: Policy) -> Policy:
    """The policy with noise on all that its adapter trains."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trained_parameters().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def logprobs(policy: Policy, form: str = "split") -> torch.Tensor:
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(5)))
    with torch.no_grad():
        return PackedPolicy(policy, form, False)(packed, VisionStore(policy, 0).features(packed.images), 1.0).logprobs_N


@pytest.mark.parametrize("kind", ("rslora", "dora"))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_row_equals_plain_passes(tiny_checkpoints, name, kind):
    policy = moved(tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, kind=kind)))
    family, plain = policy.family, []
    for item in items_of(family, torch.Generator().manual_seed(5)):
        for each in item.continuations:
            ids_T = torch.cat([item.prompt.token_ids_P, each.token_ids_L])
            with torch.no_grad():
                logits_TV = policy.model(**huggingface_inputs(family, item.prompt, ids_T)).logits[0]
            logits_TV[:, list(family.placeholder_ids)] = -torch.inf
            rows_LV = logits_TV[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
            plain.append(rows_LV.gather(1, each.token_ids_L[:, None])[:, 0])
    for form in ("split", "dense", "repeated"):
        torch.testing.assert_close(logprobs(policy, form), torch.cat(plain), rtol=0, atol=1e-4)
    packed = pack(items_of(family, torch.Generator().manual_seed(6)))
    gradients = []
    for form in ("split", "repeated"):
        features = VisionStore(policy, 0).features(packed.images)
        PackedPolicy(policy, form, False)(packed, features, 1.0).logprobs_N.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()]))
        policy.model.zero_grad()
    tolerance = (
        5e-5 if name == "qwen3_5" else 1e-5
    )  # the float32 of a delta net itself errs this much (benchmarks/trajectories.py)
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < tolerance


def test_what_the_kinds_compute(tiny_checkpoints):
    """W + alpha / sqrt(rank) B A; and rows of W + alpha / rank B A at trained lengths m, which are those of W first."""
    path = tiny_checkpoints["qwen2_5_vl"]
    x_TI = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for kind, scale in (("rslora", 8 / math.sqrt(4)), ("dora", 8 / 4)):
        policy = moved(tiny_policy(path, Lora(rank=4, alpha=8, kind=kind)))
        layer = policy.model.get_submodule("model.language_model.layers.0.mlp.up_proj")
        weight_OI = layer.base_layer.weight
        changed_OI = weight_OI + scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        if kind == "dora":
            lengths_O = layer.lora_magnitude_vector["default"].weight.detach()
            assert (lengths_O - weight_OI.norm(dim=1)).std() == pytest.approx(0.1, rel=0.5)  # what `moved` added
            changed_OI = changed_OI * (lengths_O / changed_OI.norm(dim=1))[:, None]
        torch.testing.assert_close(layer(x_TI), x_TI @ changed_OI.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ("rslora", "dora"))
def test_saving_restoring_and_going_on(tiny_checkpoints, tmp_path, kind):
    path, lora = tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, kind=kind)
    policy = moved(tiny_policy(path, lora))
    save_adapter(policy, tmp_path / "adapter")
    again = tiny_policy(path, lora)
    assert not torch.equal(logprobs(again), logprobs(policy))
    restore_adapter(again, tmp_path / "adapter")
    assert torch.equal(logprobs(again), logprobs(policy))
    assert torch.equal(logprobs(load_for_inference(tiny_recipe(path), CPU, tmp_path / "adapter")), logprobs(policy))
    begun = tiny_policy(path, lora.model_copy(update={"init": str(tmp_path / "adapter")}))
    assert torch.equal(logprobs(begun), logprobs(policy))
    with begun.as_reference():
        assert torch.equal(logprobs(begun), logprobs(policy))
    other = lora.model_copy(update={"init": str(tmp_path / "adapter"), "kind": "lora"})
    with pytest.raises(ModelError, match=f"has kind {kind}, but the recipe has lora; set lora.kind: {kind}"):
        tiny_policy(path, other)


@pytest.mark.parametrize("kind", ("rslora", "dora"))
def test_a_whole_run_samples_what_it_learns(tiny_checkpoints, tmp_path, kind):
    """By the local engine, whose prepacked weights must not leave out the lengths; with a KL to the start."""
    lora = {"rank": 4, "alpha": 8, "kind": kind}
    more = {"algorithm": {"kl": {"coef": 0.1}}, "data": {"eval": None}}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run", lora=lora, **more)
    run = run_grpo(recipe)
    rows = read_metrics(run)
    assert all(row["sampler/logprob_gap_mean"] < 1e-4 for row in rows)
    assert rows[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl/mean"] > 1e-3
    trained = load_for_inference(recipe, CPU, run / "checkpoints/step-000003/adapter")
    merged = export(recipe, run, tmp_path / "merged", merge=True)
    alone = load_for_inference(tiny_recipe(merged), CPU, None)
    torch.testing.assert_close(logprobs(alone), logprobs(trained), rtol=0, atol=1e-4)


def test_dora_of_experts_is_refused(tiny_checkpoints):
    for name in EXPERT_FAMILIES:
        with pytest.raises(ModelError, match=r"lora\.kind: is dora"):
            tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, kind="dora", targets=r".*experts\.down_proj"))


def loftq_recipe(path, kind: str, rank: int = 16):
    return tiny_recipe(path, quantize=kind, lora={"rank": rank, "alpha": 8, "start": "loftq"})


@pytest.mark.parametrize("kind", ("nf4", "int8"))
def test_loftq_starts_at_the_nearest_matrix_of_its_rank(tiny_checkpoints, kind):
    pytest.importorskip("bitsandbytes")
    path = tiny_checkpoints["qwen2_5_vl"]
    policy = build_policy(loftq_recipe(path, kind), CPU)
    exact = load_weights(load_family(tiny_recipe(path).model), torch.float32, CPU)
    adapted = [(name, layer) for name, layer in policy.model.named_modules() if isinstance(layer, LoraLayer)]
    assert adapted
    for name, layer in adapted:
        off_OI = exact.get_parameter(f"{name}.weight") - dequantize_module_weight(layer.get_base_layer()).float()
        if off_OI.abs().max() == 0:
            continue  # not quantised, because its rows are not whole blocks
        values = torch.linalg.svdvals(off_OI)
        best = values[16:].norm()  # Eckart and Young
        rest = (off_OI - layer.get_delta_weight("default").float()).norm()
        assert best * 0.999 <= rest < 1.02 * best
    plain = build_policy(loftq_recipe(path, kind).model_copy(update={"lora": Lora(rank=16, alpha=8)}), CPU)
    wanted = logprobs(tiny_policy(path, Lora(rank=16, alpha=8)))
    assert (logprobs(policy) - wanted).abs().mean() < (logprobs(plain) - wanted).abs().mean()


def test_the_reference_of_loftq_is_its_start_and_is_kept(tiny_checkpoints, tmp_path):
    pytest.importorskip("bitsandbytes")
    sections = loftq_recipe(tiny_checkpoints["qwen2_5_vl"], "nf4").model_dump(exclude={"sft"})
    recipe = KtoRecipe(**sections, kto={"beta": 0.5})  # a command that has a reference
    policy = build_policy(recipe, CPU)
    start = logprobs(policy)
    moved(policy)
    assert (logprobs(policy) - start).abs().mean() > 0.01
    with policy.as_reference():
        assert torch.equal(logprobs(policy), start)
    save_reference(policy, tmp_path)
    save_adapter(policy, tmp_path / "adapter")
    again = build_policy(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 9})}), CPU)
    restore_adapter(again, tmp_path / "adapter")
    restore_reference(again, tmp_path)
    assert torch.equal(logprobs(again), logprobs(policy))
    with again.as_reference():
        assert torch.equal(logprobs(again), start)


def test_a_run_that_started_by_loftq_is_merged_into_the_rounded_weights(tiny_checkpoints, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    path = tiny_checkpoints["qwen2_5_vl"]
    model = {"path": str(path), "dtype": "float32", "quantize": "nf4"}
    lora = {"rank": 8, "alpha": 8, "start": "loftq"}
    recipe = grpo_recipe(path, write_rows(tmp_path), tmp_path / "run", model=model, lora=lora, data={"eval": None})
    run = run_grpo(recipe)
    assert not (run / "checkpoints/step-000003/reference.safetensors").exists()  # without a penalty nothing compares
    trained = load_for_inference(recipe, CPU, run / "checkpoints/step-000003/adapter")
    merged = export(recipe, run, tmp_path / "merged", merge=True)
    assert "merged into the nf4 weights" in capsys.readouterr().out
    alone = load_for_inference(tiny_recipe(merged), CPU, None)
    torch.testing.assert_close(logprobs(alone), logprobs(trained), rtol=0, atol=1e-4)
    export(recipe, run, tmp_path / "adapter", merge=False)
    assert f"belongs to {path} in nf4" in capsys.readouterr().out
