"""Adapters, full fine-tuning, and the reference of a run."""

import re
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tests.packing.items import continuation
from tests.tiny_models import FAMILY_NAMES, move_adapter, random_ids, tiny_policy, tiny_prompts, tiny_recipe
from tiercel.algorithms.kl import Kl
from tiercel.config.schema import Algorithm, GrpoRecipe, Lora, Model
from tiercel.distributed.ranks import ALONE
from tiercel.distributed.strategies.base import build_strategy
from tiercel.errors import ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.layers.experts import gate_names
from tiercel.models.policy import Policy, base_name, build_policy, load_for_inference, starting_weights
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import save_adapter, save_trained
from tiercel.models.weights.targets import adapter_targets
from tiercel.packing.batch import MicrobatchUnit
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackedTokens, PackItem, pack
from tiercel.rewards.text import Exact
from tiercel.training.trainer import Trainer

CPU = torch.device("cpu")
TARGETS = ("language", "vision", "projector", "all")
WITHOUT_LINEAR = {("gemma3", "projector")}  # its projector multiplies by a matrix of its own


def packed_case(policy: Policy) -> PackedTokens:
    generator = torch.Generator().manual_seed(0)
    items = [
        PackItem(
            prompt=prompt,
            continuations=tuple(
                continuation(prompt, random_ids(policy.family, length, generator).tolist()) for length in (3, 6)
            ),
        )
        for prompt in tiny_prompts(policy.family)
    ]
    return pack(items)


def logprobs(policy: Policy, packed: PackedTokens) -> Tensor:
    """By a store of its own, so that nothing is shared between calls."""
    with torch.no_grad():
        features = VisionStore(policy, 0).features(packed.images)
        return PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal to rounding: for passes of models that were loaded apart."""
    return bool((found - expected).abs().max() < 1e-4)


def base_policy(checkpoint) -> Policy:
    """The checkpoint as it is."""
    return load_for_inference(tiny_recipe(checkpoint), CPU, None)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("targets", TARGETS)
def test_targets_are_every_linear_layer_of_the_part(tiny_checkpoints, name, targets):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    model = load_weights(family, torch.float32, CPU)
    if (name, targets) in WITHOUT_LINEAR:
        with pytest.raises(ModelError, match="projector has no linear layer in this model"):
            adapter_targets(family, model, Lora(targets=targets))
        return
    pattern = adapter_targets(family, model, Lora(targets=targets)).layers
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - gate_names(model)
    matched = {name for name in linear if re.fullmatch(pattern, name)}
    wanted = {name for name in linear - {"lm_head"} if targets in ("all", family.part_of(name + "."))}
    assert matched == wanted and wanted
    assert not any(re.fullmatch(pattern, name) for name, _ in model.named_modules() if name not in linear)


def test_an_embedding_that_an_expression_names_is_refused(tiny_checkpoints):
    """As Unsloth 1505 lists it among its target_modules; it got no adapter, without a word."""
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    model = load_weights(family, torch.float32, CPU)
    with pytest.raises(ModelError, match=r"matches .*embed_tokens, which cannot be adapted here; use an expression"):
        adapter_targets(family, model, Lora(targets=r"(.*\.)?(q_proj|embed_tokens)"))
    assert adapter_targets(family, model, Lora(targets=r".*\.q_proj")).layers


def test_an_embedding_that_an_expression_matches_by_chance_is_left_out(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen3_vl"])))
    model = load_weights(family, torch.float32, CPU)
    expression = r".*visual.*(patch_embed|_embed|qkv|proj).*"
    assert any(re.fullmatch(expression, name) for name, module in model.named_modules() if type(module) is nn.Embedding)
    layers = adapter_targets(family, model, Lora(targets=expression)).layers
    assert layers and not re.fullmatch(layers, "model.visual.pos_embed")


def test_parts_have_the_layers_one_expects(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    layers = {base_name(name).removesuffix(".weight") for name in policy.trained_parameters()}
    kinds = {re.sub(r"\.\d+\.", ".N.", name).removeprefix("model.language_model.layers.N.") for name in layers}
    attention = {f"self_attn.{part}_proj" for part in "qkvo"}
    assert kinds == attention | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert len(layers) == 2 * 7  # two decoder layers

    projector = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets="projector"))
    layers = {base_name(name).removesuffix(".weight") for name in projector.trained_parameters()}
    assert layers == {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"}


def test_targets_by_a_regular_expression(tiny_checkpoints):
    lora = Lora(rank=4, alpha=8, targets=r".*language_model.*\.(q_proj|v_proj)")
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora)
    layers = {base_name(name).removesuffix(".weight") for name in policy.trained_parameters()}
    assert layers == {
        f"model.language_model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in ("q", "v")
    }


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj", "whole names, such as model.language_model.layers.0.self_attn.q_proj; use '.*(q_proj)'"),
        ("q_proj, v_proj", "layers.0.self_attn.q_proj; use '.*(q_proj|v_proj)'"),
        (r"self_attn\.[qk]_proj", r"layers.0.self_attn.q_proj; use '.*(self_attn\.[qk]_proj)'"),
        (r".*\.no_such_layer", "end with down_proj, gate_proj, k_proj, "),
        (r".*input_layernorm", ", such as '.*(down_proj|gate_proj)'"),
    ],
)
def test_targets_that_match_no_linear_layer(tiny_checkpoints, targets, said):
    with pytest.raises(ModelError) as error:
        tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=targets))
    assert f"lora.targets: {targets!r} matches no linear layer" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_step_moves_the_adapter_and_nothing_else(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets="all"), noise=0.1)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    trained = policy.trained_parameters()
    assert list(trained) == sorted(trained) and all(".lora_" in name for name in trained)
    packed = packed_case(policy)
    features = VisionStore(policy, 0).features(packed.images, with_gradient=True)
    PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N.sum().backward()
    torch.optim.AdamW(trained.values(), lr=0.1).step()
    moved = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(trained)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_fresh_adapter_changes_nothing(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name])
    packed = packed_case(policy)
    assert close(logprobs(policy, packed), logprobs(base_policy(tiny_checkpoints[name]), packed))


def test_adapters_are_float32_on_a_bfloat16_model(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], dtype="bfloat16", noise=0.1)
    assert {parameter.dtype for parameter in policy.trained_parameters().values()} == {torch.float32}
    rest = {p.dtype for name, p in policy.model.named_parameters() if ".lora_" not in name}
    assert rest == {torch.bfloat16}
    packed = packed_case(policy)
    features = VisionStore(policy, 0).features(packed.images)
    inputs = []
    for module in policy.model.modules():
        if isinstance(module, LoraLayer):
            module.lora_A["default"].register_forward_hook(lambda _, given, made: inputs.append((given, made)))
    found = PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N
    found.sum().backward()
    assert found.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in policy.trained_parameters().values()} == {torch.float32}
    # nothing is converted to float32 on the way in or out, which would cost time and memory
    assert inputs and {given.dtype for (given,), _ in inputs} | {made.dtype for _, made in inputs} == {torch.bfloat16}


def test_the_seed_decides_the_adapter_and_disturbs_no_other_dice(tiny_checkpoints):
    def first_matrices(seed: int) -> Tensor:
        recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"], lora=Lora(rank=4, alpha=8))
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        named = build_policy(recipe, CPU).trained_parameters().items()
        return torch.cat([parameter.detach().flatten() for name, parameter in named if "lora_A" in name])

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = first_matrices(0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first_matrices(0), first)
    assert not torch.equal(first_matrices(1), first)


FULL = {
    ("vision", "projector"): {"language"},
    ("vision",): {"language", "projector"},
    ("language",): {"vision", "projector"},
    ("projector", "language"): {"vision"},
    (): {"vision", "projector", "language"},
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("freeze", FULL)
def test_full_fine_tuning_trains_the_parts_that_are_not_frozen(tiny_checkpoints, name, freeze):
    policy = tiny_policy(tiny_checkpoints[name], None, freeze=freeze)
    part_of = policy.family.part_of
    trained = policy.trained_parameters()
    assert policy.peft is None
    assert {part_of(name) for name in trained} == FULL[freeze]
    gates = {f"{name}.weight" for name in gate_names(policy.model)}
    frozen = {name for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert gates <= frozen and {part_of(name) for name in frozen - gates} == set(freeze)
    assert policy.vision_is_frozen == ({"vision", "projector"} <= set(freeze))
    assert (not policy.model.get_output_embeddings().weight.requires_grad) == ("language" in freeze)


def test_full_fine_tuning_keeps_float32_weights_and_computes_in_the_recipes_dtype(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], None, dtype="bfloat16")
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    packed = packed_case(policy)
    plain = logprobs(tiny_policy(tiny_checkpoints["qwen2_5_vl"], None), packed)
    found = logprobs(policy, packed)
    assert not torch.equal(found, plain)  # rounded to bfloat16 on the way
    torch.testing.assert_close(found, plain, rtol=0, atol=0.5)
    with policy.autocast():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("targets", ("language", "all"))
def test_the_reference_of_a_fresh_adapter_is_the_base(tiny_checkpoints, name, targets):
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets=targets), noise=0.1)
    packed = packed_case(policy)
    base = logprobs(base_policy(tiny_checkpoints[name]), packed)
    own = logprobs(policy, packed)
    assert float((own - base).abs().max()) > 0.01
    with policy.as_reference():
        assert close(logprobs(policy, packed), base)
    assert torch.equal(logprobs(policy, packed), own)
    assert all(parameter.requires_grad for parameter in policy.trained_parameters().values())


@pytest.mark.parametrize("targets", ("language", "all"))
def test_reference_logprobs_are_the_bases_after_the_sampler_has_filled_the_store(tiny_checkpoints, targets):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=targets), noise=0.1)
    packed = packed_case(policy)
    unit = MicrobatchUnit(batches=(SimpleNamespace(packed=packed, prompt_ids=()),))
    store = VisionStore(policy, 0)
    store.features(packed.images)
    learner = PackedPolicy(policy, "dense", False)
    strategy = build_strategy("single", tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), ALONE, policy, learner)
    trainer = Trainer(
        policy=policy,
        learner=learner,
        vision=store,
        ranks=ALONE,
        passes_are_private=True,
        temperature=1.0,
        max_tokens=1000,
        strategy=strategy,
        max_grad_norm=1.0,
        kl=None,
    )
    base = logprobs(base_policy(tiny_checkpoints["qwen2_5_vl"]), packed)
    ((found,),) = trainer.reference_logprobs([unit])
    assert close(found, base)


def names_trained(policy: Policy) -> set[str]:
    return set(policy.trained_parameters())


@pytest.mark.parametrize("targets", ("language", "all"))
def test_the_reference_of_lora_init_is_the_initial_adapter(tiny_checkpoints, tmp_path, targets):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    lora = Lora(rank=4, alpha=8, targets=targets)
    warm = tiny_policy(checkpoint, lora, noise=0.1)
    packed = packed_case(warm)
    initial = logprobs(warm, packed)
    save_adapter(warm, tmp_path)

    policy = tiny_policy(checkpoint, lora.model_copy(update={"init": str(tmp_path)}))
    trained = names_trained(policy)
    assert close(logprobs(policy, packed), initial)
    assert trained == names_trained(warm) and not any("reference" in name for name in trained)

    move_adapter(policy, 0.1, seed=9)
    moved = logprobs(policy, packed)
    assert float((moved - initial).abs().max()) > 0.01
    with policy.as_reference():
        assert close(logprobs(policy, packed), initial)
        assert not any("reference" in name for name in names_trained(policy))
    assert torch.equal(logprobs(policy, packed), moved)
    assert names_trained(policy) == trained

    features = VisionStore(policy, 0).features(packed.images, with_gradient=True)
    PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N.sum().backward()
    with_gradient = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == trained


def test_the_reference_is_left_though_its_pass_fails(tiny_checkpoints, tmp_path):
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1), tmp_path)
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, init=str(tmp_path)))
    move_adapter(policy, 0.1, seed=9)
    packed = packed_case(policy)
    own, trained = logprobs(policy, packed), names_trained(policy)
    with pytest.raises(RuntimeError), policy.as_reference():
        raise RuntimeError
    assert torch.equal(logprobs(policy, packed), own)
    assert names_trained(policy) == trained


WHOLE = {(): {"vision", "projector"}, ("projector",): {"vision"}, ("vision", "projector"): set()}


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("freeze", WHOLE)
def test_beside_an_adapter_what_is_not_frozen_is_trained_whole(tiny_checkpoints, name, freeze):
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8), freeze=freeze, dtype="bfloat16")
    part_of = policy.family.part_of
    assert {part_of(parameter) for parameter in policy.whole_parameters()} == WHOLE[freeze]
    adapted = set(policy.trained_parameters()) - set(policy.whole_parameters())
    assert {part_of(base_name(parameter)) for parameter in adapted} == {"language"}
    frozen_as_loaded = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8), dtype="bfloat16").model
    for (parameter, value), plain in zip(policy.model.named_parameters(), frozen_as_loaded.parameters(), strict=True):
        if parameter in policy.whole_parameters():
            assert value.dtype == torch.float32 and torch.equal(value.to(plain.dtype), plain)
        else:
            assert value.dtype == plain.dtype and torch.equal(value, plain)


def test_a_part_is_not_trained_whole_and_by_an_adapter(tiny_checkpoints):
    lora = Lora(rank=4, alpha=8, targets=r".*visual\.blocks\.0.*")
    with pytest.raises(ModelError, match="vision is to be trained whole, but lora"):
        tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora, freeze=("projector",))


def kl_recipe(checkpoint, *, lora: Lora | None, freeze: tuple[str, ...], reference: str = "device") -> GrpoRecipe:
    plain = tiny_recipe(checkpoint, lora=lora, freeze=freeze)
    model = plain.model.model_copy(update={"reference": reference})
    algorithm = Algorithm(kl=Kl(coef=0.1))
    sections = {name: section for name, section in plain if name != "sft"}
    return GrpoRecipe(**{**sections, "model": model}, rewards=(Exact(),), algorithm=algorithm)


@pytest.mark.parametrize("reference", ("device", "cpu"))
@pytest.mark.parametrize(("lora", "freeze"), [(None, ()), (None, ("vision",)), (Lora(rank=4, alpha=8), ())])
def test_the_reference_of_what_is_trained_whole_is_its_start(tiny_checkpoints, lora, freeze, reference):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    recipe = kl_recipe(checkpoint, lora=lora, freeze=freeze, reference=reference)
    policy = build_policy(recipe, CPU)
    start = starting_weights(policy, recipe)
    packed = packed_case(policy)
    base = logprobs(base_policy(checkpoint), packed)
    move_all(policy)
    own = logprobs(policy, packed)
    assert float((own - base).abs().max()) > 0.01
    strategy = build_strategy("single", recipe, ALONE, policy, PackedPolicy(policy, "dense", False), start)
    with strategy.as_reference():
        assert close(logprobs(policy, packed), base)
    assert torch.equal(logprobs(policy, packed), own)


def move_all(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.trained_parameters().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def test_the_reference_of_a_run_that_goes_on_is_still_the_start(tiny_checkpoints, tmp_path):
    recipe = kl_recipe(tiny_checkpoints["qwen2_5_vl"], lora=None, freeze=("vision", "projector"))
    first = build_policy(recipe, CPU)
    move_all(first)
    save_trained(first, tmp_path)
    resumed = build_policy(recipe, CPU, tmp_path / "model")
    packed = packed_case(first)
    assert torch.equal(logprobs(resumed, packed), logprobs(first, packed))
    start = starting_weights(resumed, recipe, tmp_path / "model")
    strategy = build_strategy("single", recipe, ALONE, resumed, PackedPolicy(resumed, "dense", False), start)
    with strategy.as_reference():
        assert close(logprobs(resumed, packed), logprobs(base_policy(tiny_checkpoints["qwen2_5_vl"]), packed))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 8}, "has rank 4, but the recipe has 8; set lora.rank: 4"),
        ({"alpha": 16.0}, "has alpha 8, but the recipe has 16"),
        ({"kind": "rslora"}, "has kind lora, but the recipe has rslora; set lora.kind: lora"),
        (
            {"targets": "all"},
            "names 26. Only in the adapter: none. Only in lora.targets: model.visual.blocks.0",
        ),
    ],
)
def test_an_initial_adapter_that_the_recipe_does_not_describe_is_refused(tiny_checkpoints, tmp_path, change, said):
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"]), tmp_path)
    lora = Lora(rank=4, alpha=8, init=str(tmp_path)).model_copy(update=change)
    with pytest.raises(ModelError) as error:
        tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora)
    assert said in str(error.value)


def test_an_initial_adapter_that_is_none_is_refused(tiny_checkpoints, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is not an adapter: adapter_config\.json or adapter_model"):
        tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, init=str(tmp_path)))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_is_refused(tiny_checkpoints, tmp_path, name):
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"]), tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=f"{name} (is not JSON|cannot be read)"):
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, tmp_path)


def test_inference_trains_nothing(tiny_checkpoints, tmp_path):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)
    save_adapter(policy, tmp_path)
    loaded = load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, tmp_path)
    assert loaded.trained_parameters() == {}
    packed = packed_case(policy)
    assert close(logprobs(loaded, packed), logprobs(policy, packed))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.visual.blocks.0.attn.qkv.lora_A.default.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.visual.blocks.0.attn.qkv.base_layer.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
    ],
)
def test_base_names(name, expected):
    assert base_name(name) == expected
