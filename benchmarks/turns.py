"""A step on trajectories of three turns: each token computed once, against the history computed again before each turn.

    python -m benchmarks.turns
    python -m benchmarks.turns --group 16 --tokens 64 --layers 16

A step samples a group, whose answers contain a picture each, and computes the gradient of its sampled tokens. The other
way computes all of a row again before each of its turns, and learns from each turn as a completion of everything before
it. The first turns share the prompt there too, and pictures are computed once in both ways, so the ratio is that of the
tokens alone. Both ways have the same random weights (512 wide, float32) and the same tokens; they take turns, and their
gradients must be equal. Seconds are processor time, which other programs on the machine disturb little.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from benchmarks.drivers.learner_step import make_policy, make_prompt
from benchmarks.peers import machine
from benchmarks.peers_report import spread
from benchmarks.shapes import SHAPES, save_images
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.rollout.scripted_dialogues import ScriptedDialogues
from tests.rollout.test_local import likelier_end
from tests.rollout.test_local_turns import Repeating
from tests.tiny_models import noise_image
from tiercel.models.chat import encode_answer
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.batch import group_item
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.rollout.dialogue import Limits
from tiercel.rollout.local.decoding import Decoder, SharedDecoder
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams
from tiercel.types import Completion, EncodedPrompt, Group, Message, Observation

TURNS = 3
SHOWN = 224  # pixels: side of a picture in an answer
CACHE = 10**9
PARTS = ("rollout_seconds", "learn_seconds", "seconds")


def answers(policy: Policy) -> ScriptedDialogues:
    """Return dialogues that answer each turn with a picture, a different one for each text."""

    def answer(number: int, text: str) -> Observation:
        image = policy.family.encode_image(noise_image(SHOWN, SHOWN, crc32(f"{number} {text}".encode())))
        return encode_answer(policy.family, [Message(role="user", content="<image>")], [image])

    return ScriptedDialogues(answer, limits=Limits(max_turns=TURNS, max_tokens=10**5))


def items_once(group: Group) -> list[PackItem]:
    """Return the prompt with all trajectories."""
    return [group_item(group.prompt, group.completions)]


def items_again(group: Group) -> list[PackItem]:
    """Return the prompt with all first turns, and each further turn after everything before it."""
    first = PackItem(
        prompt=group.prompt, continuations=tuple(_turn(each, *each.trajectory.spans[0]) for each in group.completions)
    )
    return [first] + [
        PackItem(prompt=_history(group.prompt, each, start, number), continuations=(_turn(each, start, stop),))
        for each in group.completions
        for number, (start, stop) in enumerate(each.trajectory.spans)
        if number
    ]


def _turn(completion: Completion, start: int, stop: int) -> Continuation:
    return Continuation(
        token_ids_L=completion.token_ids_L[start:stop],
        positions_DL=completion.trajectory.positions_DL[:, start:stop],
        is_scored_L=torch.ones(stop - start, dtype=torch.bool),
    )


def _history(prompt: EncodedPrompt, completion: Completion, stop: int, pictures: int) -> EncodedPrompt:
    """Return everything before a turn as a prompt."""
    return replace(
        prompt,
        token_ids_P=torch.cat([prompt.token_ids_P, completion.token_ids_L[:stop]]),
        positions_DP=torch.cat([prompt.positions_DP, completion.trajectory.positions_DL[:, :stop]], dim=1),
        images=prompt.images + completion.trajectory.images[:pictures],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How turns are sampled and learnt from."""

    decoder: Callable[[Policy, VisionStore], Decoder]
    items: Callable[[Group], list[PackItem]]


WAYS = {
    "once": Way(decoder=SharedDecoder, items=items_once),
    "again": Way(decoder=Repeating, items=items_again),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a step of one way took, and what must be the same in both."""

    rollout_seconds: float
    learn_seconds: float
    tokens: int  # of the passes that are learnt from
    token_ids: list[list[int]]
    gradient_T: Tensor

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.learn_seconds


def step(policy: Policy, prompt: EncodedPrompt, way: Way, size: int, tokens: int) -> Step:
    """Sample a group, and compute the gradient of the mean of its sampled tokens' logprobs."""
    vision = VisionStore(policy, CACHE)
    sampler = LocalSampler(policy, vision)
    sampler.decoder = way.decoder(policy, vision)
    params = SamplingParams(
        group_size=size,
        min_new_tokens=tokens - 1,
        max_new_tokens=tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=(),
        greedy=False,
    )
    started = time.process_time()
    with likelier_end(policy, 1e4):  # each turn ends as soon as it may
        (group,) = sampler.sample([prompt], params, [1], answers(policy))
    sampled = time.process_time()
    policy.model.zero_grad()
    learner, passes = PackedPolicy(policy, "split", False), [pack([item]) for item in way.items(group)]
    sampled_count = sum(each.sampled_count for each in group.completions)
    for packed in passes:
        (-learner(packed, vision.features(packed.images), 1.0).logprobs_N.sum() / sampled_count).backward()
    learnt = time.process_time()
    gradients = [each.grad.flatten() for each in policy.trained_parameters().values() if each.grad is not None]
    return Step(
        rollout_seconds=sampled - started,
        learn_seconds=learnt - sampled,
        tokens=sum(len(packed.token_ids_T) for packed in passes),
        token_ids=[each.token_ids_L.tolist() for each in group.completions],
        gradient_T=torch.cat(gradients),
    )


def measure(policy: Policy, prompt: EncodedPrompt, options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of both ways, after one that does not count. Raises SystemExit if they compute different things."""
    steps: dict[str, list[Step]] = {name: [] for name in WAYS}
    for number in range(1 + options.rounds):
        for name in sorted(WAYS, reverse=number % 2 == 1):
            steps[name].append(step(policy, prompt, WAYS[name], options.group, options.tokens))
        once, again = steps["once"][-1], steps["again"][-1]
        gap = float((once.gradient_T - again.gradient_T).norm() / once.gradient_T.norm())
        if once.token_ids != again.token_ids or gap > 1e-4:
            raise SystemExit(f"the ways disagree: gradients by {gap:.2g}")
        print(f"round {number}: {once.seconds:.2f} s, {again.seconds:.2f} s", flush=True)
    found: dict[str, Any] = {"prompt_tokens": len(prompt.token_ids_P), "trajectory_tokens": len(once.token_ids[0])}
    for name, measured in steps.items():
        found[name] = {"learnt_tokens": measured[0].tokens} | {
            part: spread([getattr(each, part) for each in measured[1:]]) for part in PARTS
        }
    pairs = list(zip(steps["once"][1:], steps["again"][1:], strict=True))
    found["ratio"] = {
        part: spread([getattr(again, part) / getattr(once, part) for once, again in pairs]) for part in PARTS
    }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for title, part in zip(("rollout", "learn", "both"), PARTS, strict=True):
        ratio = found["ratio"][part]
        seconds = [f"{found[name][part]['median']:.2f} s" for name in ("again", "once")]
        rows.append((title, *seconds, f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"))
    learnt = [found[name]["learnt_tokens"] for name in ("again", "once")]
    rows.append(("tokens learnt from", *(f"{count:,}" for count in learnt), f"{learnt[0] / learnt[1]:.2f}"))
    return markdown_table(("three turns", "history again", "each token once", "ratio (rounds)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=4, help="trajectories")
    parser.add_argument("--tokens", type=int, default=32, help="of each turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--side", type=int, default=448, help="pixels of the prompt's picture")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS / "turns.json")
    options = parser.parse_args()
    with TemporaryDirectory() as work:
        model, images = Path(work, "model"), Path(work, "images")
        SHAPES["qwen2_5_vl"].save(model, 32768, options.layers)
        save_images(images, options.side, 1)
        policy = make_policy(model)
        prompt = make_prompt(policy, sorted(images.glob("*.png")), 1)
        found = measure(policy, prompt, options)
    sizes = {"group": options.group, "turn_tokens": options.tokens, "layers": options.layers}
    about = {"machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}
    write_results(options.results, about | sizes | found, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
