"""Steps whose layers are compiled: traced as on a GPU, but run on a CPU operation by operation (`aot_eager`)."""

from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from tests.rollout.recorded_step import RecordedStep
from tests.rollout.test_captured import PARAMS, SEEDS, sampler_of, tokens
from tests.tiny_models import random_ids, tiny_policy, tiny_prompts
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.compiling import LAYER_GRAPHS
from tiercel.packing.compiling import compiled_layers as compiled_layers_of_learner
from tiercel.rollout.local import compiled_layers
from tiercel.rollout.local.compiled_layers import ComputeOnce
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.decoding_weights import NarrowLinears
from tiercel.rollout.local.engine import LocalSampler


@pytest.fixture(autouse=True)
def counted_graphs():
    """Graphs are counted from 0."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "dtype", "layers", "graphs"),
    [
        ("qwen2_5_vl", "bfloat16", 2, 1),
        ("gemma3", "float32", 3, 2),  # with a window and without
        ("qwen3_5", "float32", 1, 1),  # the others have a state
        ("qwen3_5_moe", "float32", 0, 0),
    ],
)
def test_logits_are_those_of_layers_that_are_not_compiled(tiny_checkpoints, name, dtype, layers, graphs):
    """Batches of two sizes, and rows that leave, need no other graphs."""
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1, dtype=dtype)
    prompts, vision, linears = tiny_prompts(policy.family), VisionStore(policy, 0), NarrowLinears(policy)
    compiled, plain = (FixedDecoder(policy, vision, None, backend) for backend in ("aot_eager", None))
    assert len(compiled.compiled.windows) == layers
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), linears.of_present_weights(), policy.autocast(keeps_casts=False), linears.in_place():
        for group_size in (3, 2):
            rows = len(prompts) * group_size
            for decoder in (compiled, plain):
                decoder.prefill(prompts, group_size, 8)
            for kept in (range(rows), range(rows), range(0, rows, 2)):
                for decoder in (compiled, plain):
                    decoder.keep(list(kept))
                ids_R = random_ids(policy.family, len(kept), generator)
                assert torch.equal(compiled.step(ids_R), plain.step(ids_R))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(
    ("name", "of_parts", "of_steps"),
    [
        ("qwen2_5_vl", LAYER_GRAPHS, 1),
        ("qwen3_vl", LAYER_GRAPHS, 2),  # the first layer's input is a view
        ("gemma3", LAYER_GRAPHS + 1, 2),  # with a window and without
    ],
)
def test_the_sampler_shares_layers_that_the_learner_compiles(tiny_checkpoints, name, of_parts, of_steps):
    """As on a GPU. Prompts of any number and length run through the same parts of layers; a step has the graphs that it
    has if the learner does not compile; the learner's parts are still there afterwards."""
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    layers, prompts = policy.family.language_model(policy.model).layers, tiny_prompts(policy.family)
    vision = VisionStore(policy, 0)
    compiled, plain = (FixedDecoder(policy, vision, None, backend) for backend in ("aot_eager", None))
    ids_R = random_ids(policy.family, 2 * len(prompts), torch.Generator().manual_seed(0))
    with torch.no_grad(), policy.autocast():
        right = plain.prefill(prompts, 2, 8), plain.step(ids_R)
        compiled_layers_of_learner(policy.family.language_model(policy.model), "aot_eager")
        parts = [part for layer in layers for part in layer.children()]
        regions = [vars(part).get("forward") for part in parts]
        found = compiled.prefill(prompts, 2, 8), compiled.step(ids_R)
        assert counters["stats"]["unique_graphs"] == of_parts + of_steps
        compiled.prefill(prompts[::-1][:2], 2, 8)
        assert counters["stats"]["unique_graphs"] == of_parts + of_steps
    torch.testing.assert_close(found, right)
    assert [vars(part).get("forward") for part in parts] == regions


def test_repeated_operations_are_computed_once():
    """x @ a twice is one product, also through a cast of x; x + 1 and x + 2 are two sums, and two draws stay two."""

    def step(x, a):
        same = (x.bfloat16() @ a) * (x.bfloat16() @ a)
        return same, x + 1, x + 2, torch.rand_like(x), torch.rand_like(x)

    traced = make_fx(step)(torch.ones(2, 3), torch.ones(3, 4).bfloat16())
    ComputeOnce()(traced.graph)
    names = Counter(node.target.name() for node in traced.graph.nodes if node.op == "call_function")
    assert names["aten::mm"] == 1 and names["aten::_to_copy"] == 1
    assert names["aten::add.Tensor"] == 2 and names["aten::rand_like"] == 2


def test_the_pass_is_given_to_inductor_and_is_the_same_for_all(tiny_checkpoints, monkeypatch):
    """Dynamo compiles again for options that are not equal."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options["options"]))
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    for backend in ("inductor", "inductor", "aot_eager"):
        FixedDecoder(policy, VisionStore(policy, 0), None, backend)
    assert given[0] == given[1] and isinstance(given[0]["joint_custom_pre_pass"], ComputeOnce) and given[2] is None


def test_layers_that_cannot_be_compiled_are_decoded_without(tiny_checkpoints):
    def refuses(graph, inputs):
        raise RuntimeError("no C compiler")

    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.3)
    sampler = sampler_of(policy)
    sampler.decoder = FixedDecoder(policy, VisionStore(policy, 0), RecordedStep, refuses)
    plain = LocalSampler(policy, VisionStore(policy, 0))
    with pytest.warns(RuntimeWarning, match="uncompiled layers"):
        found = sampler.sample(tiny_prompts(policy.family), PARAMS, SEEDS)
    assert tokens(found) == tokens(plain.sample(tiny_prompts(policy.family), PARAMS, SEEDS))
    assert sampler.decoder.compiled is None and sampler.decoder.steps


def test_layers_that_need_too_many_graphs_are_decoded_without(tiny_checkpoints, monkeypatch):
    monkeypatch.setattr(compiled_layers, "GRAPH_LIMIT", 0)
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.3)
    sampler = sampler_of(policy)
    sampler.decoder = FixedDecoder(policy, VisionStore(policy, 0), RecordedStep, "eager")
    with pytest.warns(RuntimeWarning, match="uncompiled layers"):
        sampler.sample(tiny_prompts(policy.family), PARAMS, SEEDS)
    assert sampler.decoder.compiled is None and sampler.decoder.steps
