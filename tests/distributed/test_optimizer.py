"""Learning rates of parts, and the kinds of moments."""

import re
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import tiny_policy
from tiercel.config.schema import Lora, Optim, PartRates
from tiercel.distributed.strategies.muon import MuonAndAdamW
from tiercel.distributed.strategies.optimizer import (
    build_optimizer,
    clip_gradients,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from tiercel.errors import EnvironmentProblem, ModelError


def test_each_part_moves_by_its_share_of_the_scheduled_rate(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8), freeze=("projector",))
    optim = Optim(lr=1e-2, part_lr=PartRates(vision=1e-3))
    optimizer = build_optimizer(policy, optim)
    set_learning_rate(optimizer, 5e-3)  # the schedule is halfway down
    before = {name: parameter.detach().clone() for name, parameter in policy.trained_parameters().items()}
    for parameter in policy.trained_parameters().values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # AdamW's first step is the rate itself, because m / sqrt(v) is 1
    moved = {name: before[name] - parameter for name, parameter in policy.trained_parameters().items()}
    assert {policy.family.part_of(name) for name in policy.whole_parameters()} == {"vision"}
    for name, change in moved.items():
        rate = 5e-4 if name in policy.whole_parameters() else 5e-3
        torch.testing.assert_close(change, torch.full_like(change, rate), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("most", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_gradients_are_scaled_down_to_a_norm_and_with_0_not_at_all(most, expected):
    weight = torch.nn.Linear(2, 1, bias=False)
    weight.weight.grad = torch.tensor([[3.0, 4.0]])
    clip_gradients(dict(weight.named_parameters()), 5.0, most)
    torch.testing.assert_close(weight.weight.grad, torch.tensor([expected]), rtol=1e-5, atol=0)


def test_a_rate_of_a_part_that_the_targets_leave_out_is_refused(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8, targets=r".*layers\.0.*q_proj"))
    with pytest.raises(ModelError, match=r"optim\.part_lr\.projector: "):
        build_optimizer(policy, Optim(part_lr=PartRates(projector=1e-3)))


def test_one_kernel_updates_the_weights_on_a_gpu_and_the_cpu_keeps_its_bytes(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], Lora(rank=4, alpha=8))
    on_gpu = build_optimizer(replace(policy, device=torch.device("cuda")), Optim())
    assert (on_gpu.defaults["fused"], on_gpu.defaults["foreach"]) == (True, False)
    on_cpu = build_optimizer(policy, Optim())
    assert (on_cpu.defaults["fused"], on_cpu.defaults["foreach"]) == (False, True)
    gradients = {name: torch.randn_like(weight) for name, weight in policy.trained_parameters().items()}
    before = {name: weight.detach().clone() for name, weight in policy.trained_parameters().items()}
    updated = []
    for optimizer in (on_gpu, on_cpu):  # the fused kernel has a CPU version
        with torch.no_grad():
            for name, weight in policy.trained_parameters().items():
                weight.copy_(before[name])
        for _ in range(3):
            for name, weight in policy.trained_parameters().items():
                weight.grad = gradients[name].clone()
            optimizer.step()
            state = optimizer_tensors(optimizer, policy.trained_parameters())
            restore_optimizer(optimizer, policy.trained_parameters(), state)
        assert {float(value) for name, value in state.items() if name.endswith(".step")} == {3.0}
        updated.append({name: weight.detach().clone() for name, weight in policy.trained_parameters().items()})
    torch.testing.assert_close(*updated, rtol=1e-5, atol=1e-9)


def moments_after(policy, optim: Optim, steps: int, *, saves: bool) -> tuple[dict, dict]:
    """Weights and state after steps with the same gradients; `saves`: through a new optimiser after each."""
    generator = torch.Generator().manual_seed(3)
    optimizer, parameters = build_optimizer(policy, optim), policy.trained_parameters()
    for _ in range(steps):
        for weight in parameters.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        if saves:
            state = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, parameters).items()}
            optimizer = build_optimizer(policy, optim)
            restore_optimizer(optimizer, parameters, state)
    weights = {name: weight.detach().clone() for name, weight in parameters.items()}
    return weights, optimizer_tensors(optimizer, parameters)


def test_moments_in_8_bits_go_on_to_the_same_bytes_and_update_as_adamw_does(tiny_checkpoints):
    pytest.importorskip("bitsandbytes")
    path, lora = tiny_checkpoints["qwen2_5_vl"], Lora(rank=64, alpha=64)  # large enough to be kept in 8 bits
    optim = Optim(lr=1e-2, weight_decay=0.1, name="adamw_8bit")
    weights, state = moments_after(tiny_policy(path, lora), optim, 5, saves=False)
    assert {tensor.dtype for name, tensor in state.items() if name.endswith(".state1")} >= {torch.uint8}
    assert {int(tensor) for name, tensor in state.items() if name.endswith(".step")} == {5}
    again, kept = moments_after(tiny_policy(path, lora), optim, 5, saves=True)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert all(torch.equal(state[name], kept[name]) for name in state)
    exact, full = moments_after(tiny_policy(path, lora), optim.model_copy(update={"name": "adamw"}), 5, saves=False)
    start = tiny_policy(path, lora).trained_parameters()
    moved, wanted = (torch.cat([(each[n] - start[n]).flatten() for n in start]) for each in (weights, exact))
    assert (moved - wanted).norm() / wanted.norm() < 0.05
    sizes = [sum(tensor.nbytes for tensor in each.values()) for each in (state, full)]
    assert sizes[0] < 0.31 * sizes[1]  # small matrices stay in float32


def full_policy(path):
    policy = tiny_policy(path, None, freeze=())
    assert policy.peft is None
    return policy


def test_muon_updates_the_matrices_of_layers_as_torchs_own_does_and_adamw_the_rest(tiny_checkpoints):
    policy = full_policy(tiny_checkpoints["qwen2_5_vl"])
    parameters = policy.trained_parameters()
    by_muon = {name for name in parameters if parameters[name].ndim == 2 and re.search(r"\.(layers|blocks)\.\d", name)}
    rest = parameters.keys() - by_muon
    assert {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.patch_embed.proj.weight",
    } <= rest
    assert any("visual" in name for name in by_muon) and any("mlp.down_proj" in name for name in by_muon)
    optim = Optim(lr=1e-2, weight_decay=0.1, name="muon", momentum=0.9)
    clones = {name: weight.detach().clone().requires_grad_() for name, weight in parameters.items()}
    groups = [
        {"params": [clones[name] for name in rest if clones[name].ndim > 1], "weight_decay": 0.1},
        {"params": [clones[name] for name in rest if clones[name].ndim == 1], "weight_decay": 0.0},
    ]
    theirs = (
        torch.optim.Muon([clones[name] for name in by_muon], lr=1e-2, weight_decay=0.1, momentum=0.9,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    )  # fmt: skip
    ours = build_optimizer(policy, optim)
    generator = torch.Generator().manual_seed(0)
    for rate in (1e-2, 5e-3, 5e-3):
        set_learning_rate(ours, rate)
        for name in parameters:
            parameters[name].grad = torch.randn(parameters[name].shape, generator=generator)
            clones[name].grad = parameters[name].grad.clone()
        ours.step()
        for each in theirs:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()
        assert all(torch.equal(parameters[name], clones[name]) for name in parameters)
    assert {name for name in parameters if "momentum_buffer" in ours.state[parameters[name]]} == by_muon


def test_one_step_of_muon_by_hand():
    """A diagonal gradient stays diagonal. Whatever momentum has scaled its values 3 and 4 by, they become 0.6 and 0.8,
    because 3 * 3 + 4 * 4 = 5 * 5. Then each goes five times through a x + b x^3 + c x^5 of Newton and Schulz."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, -1.0]]))
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    groups = [{"params": [weight], "weight_decay": 0.5}]
    MuonAndAdamW(groups, [], momentum=0.95, lr=0.1, betas=(0.9, 0.999), eps=1e-8, fused=False, foreach=True).step()
    step = [0.6, 0.8]
    for _ in range(5):
        step = [3.4445 * x - 4.775 * x**3 + 2.0315 * x**5 for x in step]
    assert step == pytest.approx([0.7229, 1.1192], abs=1e-4)
    decayed = torch.tensor([[0.95, 1.9], [0.0, -0.95]])  # 1 - lr * weight_decay
    expected = decayed - 0.1 * 0.2 * 2**0.5 * torch.diag(torch.tensor(step))  # 0.2 sqrt(rows): AdamW's size
    torch.testing.assert_close(weight.detach(), expected, atol=1e-3, rtol=0)  # torch iterates in bfloat16


def test_muon_goes_on_to_the_same_bytes(tiny_checkpoints):
    path, optim = tiny_checkpoints["qwen2_5_vl"], Optim(lr=1e-2, weight_decay=0.1, name="muon")
    weights, state = moments_after(full_policy(path), optim, 4, saves=False)
    again, kept = moments_after(full_policy(path), optim, 4, saves=True)
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    assert state.keys() == kept.keys() and all(torch.equal(state[name], kept[name]) for name in state)
    assert {name.rpartition(".")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_muon_needs_a_matrix_of_a_layer(tiny_checkpoints):
    policy = full_policy(tiny_checkpoints["qwen2_5_vl"])
    for name, parameter in policy.trained_parameters().items():
        parameter.requires_grad_("layers" not in name and "blocks" not in name)
    with pytest.raises(ModelError, match=r"optim\.name: is muon, but no matrix of a layer is trained"):
        build_optimizer(policy, Optim(name="muon"))


def test_paged_moments_need_a_gpu(tiny_checkpoints):
    pytest.importorskip("bitsandbytes")
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    with pytest.raises(EnvironmentProblem, match=r"optim\.name: paged_adamw needs a GPU"):
        build_optimizer(policy, Optim(name="paged_adamw"))
