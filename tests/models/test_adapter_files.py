"""Adapters that were made elsewhere: those that are loaded whole, and those that are refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.test_policy import close, logprobs, packed_case
from tests.packing.items import continuation
from tests.tiny_models import FAMILY_NAMES, move_adapter, tiny_policy, tiny_prompts, tiny_recipe
from tiercel.config.schema import Lora, Model, Rollout
from tiercel.errors import ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.layers.experts import gate_names
from tiercel.models.policy import Policy, load_for_inference
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.adapters import PREFIX
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import save_adapter, save_model
from tiercel.models.weights.targets import adapter_targets, expression_of
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackItem, pack
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import greedy_params
from tiercel.types import EncodedPrompt

CPU = torch.device("cpu")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QKVO = r"model\.language_model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj"
# Module names before transformers 4.52, by family. The others had today's names.
OLD_NAMES = {
    "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "internvl": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "gemma3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "llava_onevision": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
}


def old_name(name: str, family: str) -> str:
    for new, old in OLD_NAMES[family].items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def change_weights(directory: Path, change) -> None:
    """Rewrite the adapter's weights: `change` maps their dict to another."""
    save_file(change(load_file(directory / WEIGHTS)), directory / WEIGHTS, metadata={"format": "pt"})


def change_config(directory: Path, **keys) -> None:
    given = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(given | keys))


def made_old(directory: Path, family: str, targets) -> None:
    change_weights(
        directory,
        lambda weights: {PREFIX + old_name(name.removeprefix(PREFIX), family): each for name, each in weights.items()},
    )
    change_config(directory, target_modules=targets)


@pytest.mark.parametrize("targets", ("expression", "words"))
@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_adapter_with_names_of_old_is_itself(tiny_checkpoints, tmp_path, name, targets):
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets="all"), noise=0.1)
    adapted = [each for each, module in policy.model.named_modules() if hasattr(module, "lora_A")]
    save_adapter(policy, tmp_path)
    if targets == "expression":
        written = "|".join(re.escape(old_name(each, name)) for each in adapted)
    else:
        written = sorted({old_name(each, name) for each in adapted})
    made_old(tmp_path, name, written)
    packed = packed_case(policy)
    loaded = load_for_inference(tiny_recipe(tiny_checkpoints[name]), CPU, tmp_path)
    assert close(logprobs(loaded, packed), logprobs(policy, packed))
    going_on = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets="all", init=str(tmp_path)))
    assert close(logprobs(going_on, packed), logprobs(policy, packed))
    move_adapter(going_on, 0.1, seed=7)
    with going_on.as_reference():
        assert close(logprobs(going_on, packed), logprobs(policy, packed))


def test_ranks_by_names_of_old_are_kept(tiny_checkpoints, tmp_path):
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=QKVO), noise=0.1), tmp_path)
    twice = "model.layers.0.self_attn.q_proj"

    def doubled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: each
            if "layers.0.self_attn.q_proj" not in name
            else torch.cat([each, each], 0 if "lora_A" in name else 1)
            for name, each in weights.items()
        }

    change_weights(tmp_path, doubled)
    change_config(tmp_path, rank_pattern={twice: 8}, alpha_pattern={re.escape(twice): 32})
    made_old(tmp_path, "qwen2_5_vl", ["q_proj", "k_proj", "v_proj", "o_proj"])
    made_of_it = load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, tmp_path)
    scales = {
        name: (module.r["default"], module.scaling["default"])
        for name, module in made_of_it.model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert len(scales) == 8  # the tower has other names for its layers
    assert scales.pop("model.language_model.layers.0.self_attn.q_proj") == (8, 4.0)
    assert set(scales.values()) == {(4, 2.0)}


@pytest.fixture(scope="module")
def saved(tiny_checkpoints, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapter")
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=QKVO), noise=0.1), root)
    return root


@pytest.fixture
def adapter(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


LAYER = "model.language_model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda weights: {name: each for name, each in weights.items() if "layers.0" in name},
            (f"Missing in the file: {LAYER}k_proj.lora_A.weight, ", " and 5 more. Unknown to the model: none"),
        ),
        (
            lambda weights: weights | {f"{PREFIX}{LAYER}gate.lora_A.weight": torch.zeros(4, 64)},
            ("Missing in the file: none", f"Unknown to the model: {LAYER}gate.lora_A.weight. "),
        ),
        (
            lambda weights: {name.replace("language_model", "decoder"): each for name, each in weights.items()},
            (" and 13 more. Unknown to", "the model: model.decoder.layers.0.self_attn.k_proj.lora_A.weight"),
        ),
        (
            lambda weights: {name: each.repeat(1, 2) for name, each in weights.items()},
            ("the adapter does not fit the model: size mismatch for", "torch.Size([4, "),
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_everywhere(tiny_checkpoints, adapter, change, said):
    change_weights(adapter, change)
    path = tiny_checkpoints["qwen2_5_vl"]
    for load in (
        lambda: load_for_inference(tiny_recipe(path), CPU, adapter),
        lambda: tiny_policy(path, Lora(rank=4, alpha=8, targets=QKVO, init=str(adapter))),
    ):
        with pytest.raises(ModelError) as error:
            load()
        assert [words for words in said if words not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize("own", ["default", "policy"])
def test_weights_with_the_name_of_their_adapter_are_read(tiny_checkpoints, adapter, own):
    """state_dict() has it, and scripts save that instead of calling save_pretrained."""
    path = tiny_checkpoints["qwen2_5_vl"]
    plain = load_for_inference(tiny_recipe(path), CPU, adapter).model.state_dict()
    change_weights(
        adapter, lambda weights: {name.replace(".weight", f".{own}.weight"): each for name, each in weights.items()}
    )
    named = load_for_inference(tiny_recipe(path), CPU, adapter).model.state_dict()
    assert named.keys() == plain.keys() and all(named[name].equal(plain[name]) for name in plain)


def test_weights_of_several_adapters_are_refused(tiny_checkpoints, adapter):
    def doubled(weights):
        return weights | {name.replace(".weight", ".other.weight"): each.clone() for name, each in weights.items()}

    change_weights(adapter, doubled)
    with pytest.raises(ModelError, match=r"weights of several adapters: other; .*selected_adapters"):
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, adapter)


EMBEDDINGS = "model.language_model.embed_tokens.weight"


@pytest.mark.parametrize("of_the_model", (EMBEDDINGS, "model.visual.merger.mlp.0.weight", "non_lora_state_dict.bin"))
def test_weights_of_the_model_itself_beside_an_adapter_are_refused(tiny_checkpoints, adapter, of_the_model):
    """PEFT saves resized embeddings with the adapter, LLaVA and 2U1 save the projector in a file beside it."""
    path = tiny_checkpoints["qwen2_5_vl"]
    if of_the_model.endswith(".bin"):
        (adapter / of_the_model).write_bytes(b"")
    else:
        whole = load_for_inference(tiny_recipe(path), CPU, None).model.get_parameter(of_the_model).detach() + 1
        change_weights(adapter, lambda weights: weights | {PREFIX + of_the_model: whole})
    for load in (
        lambda: load_for_inference(tiny_recipe(path), CPU, adapter),
        lambda: tiny_policy(path, Lora(rank=4, alpha=8, targets=QKVO, init=str(adapter))),
    ):
        with pytest.raises(ModelError, match=rf"weights of the model itself .*: {re.escape(of_the_model)}"):
            load()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda each: each * float("nan"), " and 13 more hold NaN or infinity"),
        (lambda each: each.abs() / 0, " and 13 more hold NaN or infinity"),
        (lambda each: each[:0], " and 13 more have no numbers, as when DeepSpeed's ZeRO-3 saves an adapter"),
        (lambda each: torch.empty(0), " and 13 more have no numbers"),
        (torch.zeros_like, "all its matrices are 0, so it changes nothing and could not learn"),
        (lambda each: each.to(torch.int8), "is stored as int8, which means nothing without a scale"),
        (lambda each: each.to(torch.float8_e4m3fn), "is stored as float8_e4m3fn, which means nothing"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(tiny_checkpoints, adapter, change, said):
    change_weights(adapter, lambda weights: {name: change(each) for name, each in weights.items()})
    with pytest.raises(ModelError) as error:
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, adapter)
    assert said in str(error.value)


def test_whole_weights_that_are_not_finite_are_refused(tiny_checkpoints, adapter):
    name = "model.language_model.norm.weight"
    save_file({name: torch.full((64,), float("nan"))}, adapter / "trained_whole.safetensors")
    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity"):
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, adapter)


def test_a_pickled_adapter_names_the_way_out(tiny_checkpoints, adapter):
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has adapter_model\.bin, a pickle, which is never opened here"):
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, adapter)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"bias": "lora_only"}, "an adapter with bias 'lora_only' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "an adapter with modules_to_save ['lm_head']"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "an adapter with layer_replication"),
        ({"trainable_token_indices": [3]}, "an adapter with trainable_token_indices [3]"),
        ({"of_the_future": 1}, "an adapter with of_the_future 1 "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the model's own weights"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head, which cannot be adapted here"),
        ({"target_modules": ["embed_tokens"]}, "adapts model.language_model.embed_tokens, which cannot be adapted"),
        ({"target_modules": ["wq"]}, "the adapter does not fit the model: "),
        ({"r": 0}, "r is 0, but must be a number above 0, and a rank a whole one"),
        ({"r": "4"}, "r is '4', but must be a number above 0"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": 0}, "lora_alpha is 0, but must be a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern['q_proj'] is 2.5"),
        ({"alpha_pattern": [8]}, "alpha_pattern is [8], but must be an object"),
    ],
)
def test_adapters_of_another_kind_are_refused(tiny_checkpoints, adapter, keys, said):
    change_config(adapter, **keys)
    with pytest.raises(ModelError) as error:
        load_for_inference(tiny_recipe(tiny_checkpoints["qwen2_5_vl"]), CPU, adapter)
    assert said in str(error.value)


def test_dropout_of_an_adapter_is_that_of_the_recipe(tiny_checkpoints, adapter):
    change_config(adapter, lora_dropout=0.05)
    for dropout in (0.0, 0.5):
        lora = Lora(rank=4, alpha=8, targets=QKVO, init=str(adapter), dropout=dropout)
        policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora)
        found = {module.p for name, module in policy.model.named_modules() if isinstance(module, nn.Dropout)}
        assert found == ({dropout} if dropout else set())
        shutil.rmtree(adapter / "again", ignore_errors=True)
        save_adapter(policy, adapter / "again")
        assert json.loads((adapter / "again" / CONFIG).read_text())["lora_dropout"] == dropout


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_linear_layer_takes_part_or_is_refused(tiny_checkpoints, tmp_path, name):
    """A layer that an adapter may change has a gradient, counts in the logprobs of a sample, and is merged; all others
    are refused. Each layer has its turn in sampling, since one that is left out would be hidden by the others."""
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    model = load_weights(family, torch.float32, CPU)
    linear = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [each for each in linear if re.fullmatch(adapter_targets(family, model, Lora(targets="all")).layers, each)]
    left = set(linear) - set(chosen)
    assert left == {"lm_head"} | {each for each in linear if each in gate_names(model)}
    for each in left:
        with pytest.raises(ModelError, match=f"matches {re.escape(each)}, which cannot be adapted here"):
            adapter_targets(family, model, Lora(targets=re.escape(each)))
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets="all"))
    prompts = tiny_prompts(policy.family)[1:2]
    base = scored(policy, prompts)
    for each in chosen:
        up = dict(policy.model.named_parameters())[f"{each}.lora_B.default.weight"]
        up.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
        sampled, learned = scored(policy, prompts)
        assert not torch.equal(sampled, base[0]), each
        torch.testing.assert_close(sampled, learned, rtol=0, atol=2e-4)
        up.data.zero_()
    move_adapter(policy, 0.05)
    packed = packed_case(policy)
    store = VisionStore(policy, 0)
    with store.update([packed.images]):
        features = store.features(packed.images, with_gradient=True)
        PackedPolicy(policy, "dense", False)(packed, features, 1.0).logprobs_N.sum().backward()
    still = [each for each, it in policy.trained_parameters().items() if it.grad is None or not it.grad.any()]
    assert still == []
    expected = logprobs(policy, packed)
    assert policy.peft is not None
    save_model(family, policy.peft.merge_and_unload(), tmp_path)
    merged = load_for_inference(tiny_recipe(tmp_path), CPU, None)
    assert close(logprobs(merged, packed), expected)


def scored(policy: Policy, prompts: list[EncodedPrompt]) -> tuple[Tensor, Tensor]:
    """Logprobs of greedy completions: the sampler's and the learner's."""
    params = greedy_params(Rollout(max_new_tokens=3))
    groups = LocalSampler(policy, VisionStore(policy, 0)).sample(prompts, params, [1])
    found = [group.completions[0] for group in groups]
    items = [
        PackItem(prompt=prompt, continuations=(continuation(prompt, each.token_ids_L.tolist()),))
        for prompt, each in zip(prompts, found, strict=True)
    ]
    return torch.cat([each.logprobs_L for each in found]), logprobs(policy, pack(items))


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (("a.0.q", "a.1.q"), ("a.0.k",), r"a\.\d+\.q"),
        (("a.0.q", "a.2.q"), ("a.1.q",), r"a\.(0|2)\.q"),
        (("a.0.q", "b"), ("a.1.q",), r"a\.(0)\.q|b"),
    ],
)
def test_expressions_of_names(names, others, expected):
    found = expression_of(names, others)
    assert found == expected
    assert all(re.fullmatch(found, each) for each in names) and not any(re.fullmatch(found, each) for each in others)
