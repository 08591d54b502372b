"""Forward and backward passes over one group, by tiercel's learner or by plain transformers on repeated prompts.

    python -m benchmarks.drivers.learner_step --by tiercel --model DIR --images F.png --completion-tokens 64 \\
        --group-size 8 --warmup 1 --steps 5

Both give the gradient of the same loss of the same random tokens; the vision pass is on the clock. Shape suffixes:
G completions, P prompt tokens, C tokens of a completion, L = P + C.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from benchmarks.drivers.measuring import LORA_ALPHA, LORA_RANK, QUESTION, answer_stream, peak_bytes
from tests.models.test_families import huggingface_inputs
from tiercel.config.schema import Data, Lora, Model, SftRecipe, Train
from tiercel.models.policy import Policy, build_policy
from tiercel.models.prompts import completion_positions, encode_prompt
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.types import EncodedPrompt, ImageSource, Message, Row

TEXT_IDS = 200  # completions take their ids from the first ones, none of which is special


def make_policy(model: Path) -> Policy:
    """Return the checkpoint's policy with an adapter that is not zero."""
    recipe = SftRecipe(
        model=Model(path=str(model), dtype="float32"),
        lora=Lora(rank=LORA_RANK, alpha=LORA_ALPHA),
        data=Data(train="rows.jsonl"),
        train=Train(steps=1),
        output="unused",
    )
    policy = build_policy(recipe, torch.device("cpu"))
    for name, parameter in policy.trained_parameters().items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    return policy


def make_prompt(policy: Policy, images: Sequence[Path], questions: int) -> EncodedPrompt:
    """Return a prompt that asks `questions` times about the images."""
    row = Row(
        id="row",
        messages=(Message(role="user", content="<image>" * len(images) + " ".join([QUESTION] * questions)),),
        images=tuple(ImageSource(path=image.name) for image in images),
        columns={},
        file="rows.jsonl",
        line=1,
    )
    encoded = []
    for image in images:
        with Image.open(image) as picture:
            encoded.append(policy.family.encode_image(picture.convert("RGB")))
    return encode_prompt(policy.family, row, 0, encoded, system=None, max_prompt_tokens=8192)


def tiercel_logprobs(policy: Policy, prompt: EncodedPrompt, ids_GC: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes logprobs (G, C) with the prompt and the picture once."""
    learner = PackedPolicy(policy, "split", False)
    continuations = tuple(
        Continuation(
            token_ids_L=ids_C,
            positions_DL=completion_positions(prompt.positions_DP, len(ids_C)),
            is_scored_L=torch.ones(len(ids_C), dtype=torch.bool),
        )
        for ids_C in ids_GC
    )
    packed = pack([PackItem(prompt=prompt, continuations=continuations)])

    def compute() -> Tensor:
        features_KH = VisionStore(policy, 0).features(packed.images)
        return learner(packed, features_KH, 1.0).logprobs_N.view(ids_GC.shape)

    return compute


def plain_logprobs(policy: Policy, prompt: EncodedPrompt, ids_GC: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes logprobs (G, C) by transformers' own forward pass, with prompt and picture
    repeated for each completion."""
    groups, length = ids_GC.shape
    ids_GL = torch.cat([prompt.token_ids_P.expand(groups, -1), ids_GC], dim=1)
    pictures = [image.views[0].permute(2, 0, 1) for image in prompt.images]
    one = huggingface_inputs(policy.family, prompt, ids_GL[0], pictures)
    inputs = {name: value.repeat(groups, *[1] * (value.ndim - 1)) for name, value in one.items()}
    inputs |= {"input_ids": ids_GL, "logits_to_keep": length + 1}

    def compute() -> Tensor:
        logits = policy.model(**inputs).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, ids_GC[..., None])[..., 0]

    return compute


BY = {"tiercel": tiercel_logprobs, "plain": plain_logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=sorted(BY), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, nargs="+", required=True)
    parser.add_argument("--questions", type=int, default=1, help="how often the prompt asks")
    for name in ("completion-tokens", "group-size", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args()
    with answer_stream() as stream:
        torch.manual_seed(0)
        policy = make_policy(task.model)
        prompt = make_prompt(policy, task.images, task.questions)
        ids_GC = torch.randint(TEXT_IDS, (task.group_size, task.completion_tokens))
        advantages_G1 = torch.randn(task.group_size, 1)
        compute = BY[task.by](policy, prompt, ids_GC)
        loaded = peak_bytes()
        seconds, logprobs_GC = [], torch.empty(0)
        for _ in range(task.warmup + task.steps):
            policy.model.zero_grad()
            start = time.perf_counter()
            logprobs_GC = compute()
            (-((logprobs_GC - logprobs_GC.detach()).exp() * advantages_G1).mean()).backward()
            seconds.append(time.perf_counter() - start)
        gradient = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values() if p.grad is not None])
        answer = {
            "prompt_tokens": len(prompt.token_ids_P),
            "grid": prompt.images[0].plan.grid,
            "seconds": seconds[task.warmup :],
            "peak_bytes": peak_bytes(),
            "loaded_bytes": loaded,
            "gradient_norm": float(gradient.norm()),
            "logprob_mean": float(logprobs_GC.mean()),
        }
        stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
