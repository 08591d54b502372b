"""One learner module under three sharding strategies against a single-process oracle, on CPU.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 sharded_learner.py --strategy zero3 [--mistake "no padding"]

A tiny random Qwen2.5-VL with LoRA on its language model trains on two gloo ranks, which hold different kinds of rows
and different numbers of microbatches. The flat LoRA gradient before clipping, and the LoRA weights after three clipped
AdamW steps, are compared with the repeated-prompt computation over all rows by transformers' own forward pass in one
process (fp32).

T packed tokens, N scored tokens, F image tokens, H hidden size, V vocabulary.
"""

import argparse
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

KINDS = (("text", "text"), ("text", "image"), ("image", "image"))
MICROBATCHES = ((3, 1), (1, 2), (2, 2))  # per step: of rank 0, of rank 1
VARIANTS = {
    "logits head": {"head": "logits"},
    "jacobian head": {},
    "tied": {"tied": True},
    "checkpointing": {"checkpointing": True},
    "eval between steps": {"evaluate": True},
    "all of these": {"tied": True, "checkpointing": True, "evaluate": True},
    "empty unscored": {"empty": "unscored"},
}
MISTAKES = ("head weight outside forward", "no padding", "no backward when empty", "no world factor")
VOCABULARY, HIDDEN, IMAGE_ID, LEARNING_RATE, MAX_NORM = 320, 64, 303, 1e-2, 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    head: str = "jacobian"
    tied: bool = False
    checkpointing: bool = False
    evaluate: bool = False
    empty: str = "weightless"
    mistake: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with its completions, packed as [prompt | c1 | c2 | ..]: one microbatch."""

    token_ids_T: Tensor
    position_ids_31T: Tensor
    mask_TT: Tensor | None  # None: plain causal
    scored_N: Tensor  # packed index of the hidden state that scores each token
    target_N: Tensor
    weight_N: Tensor
    image_at_F: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    pixels: Tensor | None = None
    grid: Tensor | None = None
    prompt_length: int = 0
    completions: tuple[Tensor, ...] = ()


class TokenLogprobs(torch.autograd.Function):
    """Computes logp_N of y_N under softmax(h W^T), and keeps d logp/d h (N x H). The weight is frozen."""

    @staticmethod
    def forward(ctx, h_NH, W_VH, y_N, chunk=4):
        logp_N, jacobian_NH = h_NH.new_empty(len(h_NH)), torch.empty_like(h_NH)
        for i in range(0, len(h_NH), chunk):
            z, y = h_NH[i : i + chunk] @ W_VH.T, y_N[i : i + chunk]
            lse = torch.logsumexp(z, -1)
            logp_N[i : i + chunk] = z.gather(1, y[:, None])[:, 0] - lse
            jacobian_NH[i : i + chunk] = W_VH[y] - z.sub_(lse[:, None]).exp_() @ W_VH
        ctx.save_for_backward(jacobian_NH)
        return logp_N

    @staticmethod
    def backward(ctx, grad_N):
        return grad_N[:, None] * ctx.saved_tensors[0], None, None, None


class Head(nn.Module):
    """Owns the output weight, so that a strategy's hooks gather it around this forward pass."""

    def __init__(self, weight: nn.Parameter, form: str):
        super().__init__()
        self.weight, self.form = weight, form

    def forward(self, h_NH: Tensor, y_N: Tensor) -> Tensor:
        if self.form == "jacobian":
            return TokenLogprobs.apply(h_NH, self.weight, y_N)
        return (h_NH @ self.weight.T).log_softmax(-1).gather(1, y_N[:, None])[:, 0]


class Learner(nn.Module):
    """Everything that is sharded, and nothing else: embedding, decoder layers, norm, head."""

    def __init__(self, language_model: nn.Module, head: Head):
        super().__init__()
        self.language_model, self.head = language_model, head

    def forward(self, row: Row, features_FH: Tensor) -> Tensor:
        embeds_TH = self.language_model.embed_tokens(row.token_ids_T)
        embeds_TH = embeds_TH.index_copy(0, row.image_at_F, features_FH)
        hidden_TH = self.language_model(
            inputs_embeds=embeds_TH[None],
            position_ids=row.position_ids_31T,
            use_cache=False,
            attention_mask=None if row.mask_TT is None else row.mask_TT[None, None],
        ).last_hidden_state[0]
        return self.head(hidden_TH[row.scored_N], row.target_N)


def build_model(tied: bool) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            tie_word_embeddings=tied,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            out_hidden_size=HIDDEN,
            fullatt_block_indexes=[1],
        ),
        vision_start_token_id=301,
        vision_end_token_id=302,
        image_token_id=IMAGE_ID,
        video_token_id=304,
        tie_word_embeddings=tied,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).requires_grad_(False)
    targets = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model.model.language_model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.ndim == 2 and "lora_A" not in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def lora_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a list in module order, which is the same on every rank; the order of a set of parameters is not."""
    return [p for n, p in module.named_parameters() if "lora_" in n]


def make_row(kind: str, seed: int, model: nn.Module) -> Row:
    g = torch.Generator().manual_seed(seed)
    prompt, pixels, grid = torch.randint(3, 300, (6 + seed % 3,), generator=g), None, None
    if kind == "image":
        prompt = torch.cat([prompt[:2], torch.tensor([301] + [IMAGE_ID] * 4 + [302]), prompt[2:]])
        pixels, grid = torch.randn(16, 3 * 2 * 14 * 14, generator=g), torch.tensor([[1, 4, 4]])
    lengths = [2 + (seed + i) % 4 for i in range(1 if seed % 4 == 3 else 3)]  # one completion: plain causal
    completions = tuple(torch.randint(3, 300, (n,), generator=g) for n in lengths)
    P, packed = len(prompt), torch.cat([prompt, *completions])
    positions, _ = model.model.get_rope_index(
        prompt[None], image_grid_thw=grid, mm_token_type_ids=(prompt == IMAGE_ID).int()[None]
    )
    suffix = torch.cat([positions.max() + 1 + torch.arange(n) for n in lengths]).expand(3, 1, -1)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([P, *lengths]))
    order_T = torch.arange(len(packed))
    sees_TT = (segment_T == 0) | (segment_T[:, None] == segment_T) & (segment_T != 0)
    scored, start = [], P
    for n in lengths:
        scored += [P - 1, *range(start, start + n - 1)]
        start += n
    return Row(
        token_ids_T=packed,
        position_ids_31T=torch.cat([positions, suffix], 2),
        mask_TT=None if len(lengths) == 1 else sees_TT & (order_T <= order_T[:, None]),
        scored_N=torch.tensor(scored),
        target_N=packed[P:],
        weight_N=torch.cat([torch.randn(1, generator=g).expand(n) for n in lengths]),
        image_at_F=(packed == IMAGE_ID).nonzero()[:, 0],
        pixels=pixels,
        grid=grid,
        prompt_length=P,
        completions=completions,
    )


def make_rows(step: int, rank: int, kinds: tuple[str, str], model: nn.Module) -> list[Row]:
    return [make_row(kinds[rank], 100 * step + 10 * rank + i, model) for i in range(MICROBATCHES[step][rank])]


def empty_row(form: str, length: int = 1) -> Row:
    """Return a row that is scored once with weight zero, or not scored at all (N = 0)."""
    scored_N = torch.zeros(int(form == "weightless"), dtype=torch.long)
    return Row(
        token_ids_T=torch.zeros(length, dtype=torch.long),
        position_ids_31T=torch.arange(length).expand(3, 1, -1),
        mask_TT=None,
        scored_N=scored_N,
        target_N=scored_N,
        weight_N=torch.zeros(len(scored_N)),
    )


def image_features(visual: nn.Module, row: Row) -> Tensor:
    """Compute features with a frozen, replicated tower, which only a rank that holds an image calls."""
    if row.pixels is None:
        return torch.empty(0, HIDDEN)
    with torch.no_grad():
        return visual(row.pixels, grid_thw=row.grid).pooler_output


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def oracle(case: Case, kinds: tuple[str, str]) -> tuple[list[Tensor], Tensor]:
    """Return the gradient of every step and the final weights: whole model, repeated prompts, one process."""
    model = build_model(case.tied)
    lora = lora_parameters(model)
    optimizer = torch.optim.AdamW(lora, lr=LEARNING_RATE, weight_decay=0.0)
    gradients = []
    for step in range(len(MICROBATCHES)):
        rows = [row for rank in (0, 1) for row in make_rows(step, rank, kinds, model)]
        total = sum(len(row.target_N) for row in rows)
        for row in rows:
            at = 0
            for completion in row.completions:
                ids = torch.cat([row.token_ids_T[: row.prompt_length], completion])[None]
                logits = model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    pixel_values=row.pixels,
                    image_grid_thw=row.grid,
                    mm_token_type_ids=(ids == IMAGE_ID).int(),
                ).logits[0, row.prompt_length - 1 : -1]
                logp = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
                (-(logp * row.weight_N[at : at + len(completion)]).sum() / total).backward()
                at += len(completion)
        gradients.append(flat(p.grad for p in lora))
        nn.utils.clip_grad_norm_(lora, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, flat(lora)


class Replicated:
    """LoRA replicated, with its gradients summed by one all_reduce. `shard` shards the frozen base (FSDP2)."""

    loss_scale = 1.0

    def __init__(self, learner: Learner, shard: bool):
        self.module, self.lora = learner, lora_parameters(learner)
        if shard:
            options = dict(mesh=init_device_mesh("cpu", (2,)), ignored_params=set(self.lora))
            for layer in learner.language_model.layers:
                fully_shard(layer, **options, reshard_after_forward=True)
            fully_shard(learner, **options)
        self.optimizer = torch.optim.AdamW(self.lora, lr=LEARNING_RATE, weight_decay=0.0)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def gradient(self) -> Tensor:
        gradient = flat(p.grad for p in self.lora)
        dist.all_reduce(gradient)
        for p, g in zip(self.lora, gradient.split([p.numel() for p in self.lora]), strict=True):
            p.grad.copy_(g.view_as(p))
        return gradient

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.lora, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Zero3:
    """DeepSpeed ZeRO-3 with parameters and optimiser offloaded. Gradients are averaged over ranks."""

    def __init__(self, learner: Learner, case: Case):
        self.lora = lora_parameters(learner)
        self.loss_scale = 1.0 if case.mistake == "no world factor" else float(dist.get_world_size())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": MAX_NORM,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": True}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
                # The default, 1e5, leaves every parameter of a tiny model whole, so nothing would be tested.
                "stage3_param_persistence_threshold": 0,
            },
        }
        self.module, *_ = deepspeed.initialize(model=learner, model_parameters=self.lora, config=config)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(last)
        self.module.backward(loss)

    def gradient(self) -> Tensor:
        return flat(safe_get_full_grad(p) for p in self.lora)

    def step(self) -> None:
        self.module.step()


def agreed(value: int, op: dist.ReduceOp) -> int:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op)
    return int(tensor)


def run_case(strategy: str, case: Case, kinds: tuple[str, str]) -> tuple[float, float]:
    """Return the relative error of the worst step's gradient and of the weights' movement over all steps."""
    expected, final = oracle(case, kinds)
    model = build_model(case.tied)
    start = flat(lora_parameters(model))
    learner = Learner(model.model.language_model, Head(model.lm_head.weight, case.head))
    if case.checkpointing:
        model.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    learner.train()
    wrapped = Zero3(learner, case) if strategy == "zero3" else Replicated(learner, shard=strategy == "fsdp2")
    errors = []
    for step, want in enumerate(expected):
        rows = make_rows(step, dist.get_rank(), kinds, model)
        total = agreed(sum(len(row.target_N) for row in rows), dist.ReduceOp.SUM)
        count = agreed(len(rows), dist.ReduceOp.MAX)
        real = len(rows)
        count = real if case.mistake == "no padding" else count
        rows += [empty_row(case.empty)] * (count - real)
        for i, row in enumerate(rows):
            features_FH = image_features(model.model.visual, row)
            if case.mistake == "head weight outside forward":
                features_FH.new_zeros(1, HIDDEN) @ learner.head.weight.T
            logp_N = wrapped.module(row, features_FH)
            if case.mistake == "no backward when empty" and i >= real:
                continue
            loss = -(logp_N * row.weight_N).sum() / total * wrapped.loss_scale
            wrapped.backward(loss, last=i + 1 == count)
        errors.append(float((wrapped.gradient() - want).norm() / want.norm()))
        wrapped.step()
        if case.evaluate:  # like generation: the same number of forward passes without gradients on each rank
            wrapped.module.eval()
            with torch.no_grad():
                for length in (4, 5, 6):
                    wrapped.module(empty_row("weightless", length), torch.empty(0, HIDDEN))
            wrapped.module.train()
    weights = flat(map(safe_get_full_fp32_param, wrapped.lora) if strategy == "zero3" else wrapped.lora)
    moved = float((weights - final).norm() / (final - start).norm())
    return max(errors), moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2", "zero3"), required=True)
    parser.add_argument("--mistake", choices=MISTAKES, default="", help="make one mistake instead of the cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=15 if arguments.mistake else 120))
    variants = {arguments.mistake: {"mistake": arguments.mistake}} if arguments.mistake else VARIANTS
    for (name, options), kinds in product(variants.items(), KINDS):
        label = f"{arguments.strategy:<6} {name:<27} {'/'.join(kinds):<12}"
        gradient, moved = run_case(arguments.strategy, Case(**options), kinds)
        if dist.get_rank() == 0:
            verdict = "ok" if gradient < 1e-5 and moved < 1e-4 else "WRONG"
            print(f"{label} gradient {gradient:.1e}  weights {moved:.1e}  {verdict}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
