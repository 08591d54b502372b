"""Define the rewards that must be started before they score, because they have their own process, a server or a model:
their keys and their checks. tiercel/rewards/runtime/batches.py has what scores them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import JsonValue

from tiercel.config_base import (
    Keys,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problems,
    Section,
    Source,
    address_fault,
    shown,
)
from tiercel.reward_types import Sample
from tiercel.rewards.base import Reward, RewardEntry, TruthReward
from tiercel.secret_names import is_secret_name
from tiercel.user_functions import CALL_FORM, is_call

_VARIABLE = re.compile(r"[A-Za-z_]\w*")


class Math(TruthReward):
    """1 if math-verify finds it equal to the row's, or to one of its list, else 0; runs under the
    limits of your own rewards"""

    name: Literal["math"] = "math"
    reads: ClassVar[str] = "the expression that the answer settles on, LaTeX or plain"
    needs: ClassVar[str | None] = "math_verify"
    takes_time: ClassVar[bool] = True
    own_right_from: ClassVar[float | None] = 1.0


class Judge(Section):
    """The server and the question of the reward `judge`."""

    url: str
    """Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str
    """The judge's name there."""
    prompt: str | None = None
    """File with the question: {prompt}, {completion} and {answer} are filled in; null takes tiercel's own, which asks
    for a grade from 0 to 10."""
    best: PositiveFloat = 10.0
    """The grade that is worth 1."""
    key: str | None = None
    """Name of the environment variable that holds the server's key, such as OPENAI_API_KEY."""
    concurrency: PositiveInt = 16
    """Requests at a time."""
    timeout: PositiveFloat = 60.0
    """Seconds that a request may take."""
    retries: NonNegativeInt = 3
    """Further tries of a request that the server did not answer, or was too busy for."""
    max_tokens: PositiveInt = 512
    """Length of the judge's reply."""


class ByJudge(TruthReward):
    """that model's grade / `best` (10); a completion without a grade is unscorable"""

    name: Literal["judge"] = "judge"
    reads: ClassVar[str] = "the whole completion, as another model reads it"
    takes_time: ClassVar[bool] = True
    judge: Judge
    """The section that names the server to ask, such as {url: http://127.0.0.1:8000/v1, model: NAME}."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if (fault := address_fault(self.judge.url)) is not None:
            yield Keys("judge.url").problem(f"{fault}; use an address such as http://127.0.0.1:8000/v1")
        if self.judge.key is not None and not _VARIABLE.fullmatch(self.judge.key):
            yield Keys("judge.key").problem(  # the message does not repeat what was given, as it may be the key itself
                "must be the name of an environment variable, such as OPENAI_API_KEY; the key itself stays out of "
                "the recipe"
            )


class RewardModel(Source):
    """The checkpoint of the reward `model`: what `tiercel reward` trained, which sees the prompt's pictures, or a
    Hugging Face sequence-classification model, which does not."""

    adapter: str | None = None
    """Directory of an adapter that `tiercel reward` trained on it, such as RUN/checkpoints/step-000100/adapter; null
    if the checkpoint itself is a reward model."""
    min_pixels: PositiveInt | None = None
    """As model.min_pixels, for a reward model of `tiercel reward`; write what its recipe had."""
    max_pixels: PositiveInt | None = None
    """As model.max_pixels, likewise."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What it is held in and computes in."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the rank's own GPU, if there is one; every rank holds a copy."""
    template: str | None = None
    """File with a Jinja chat template; null takes the one of the reward model's own tokenizer."""
    max_tokens: PositiveInt = 4096
    """A longer conversation is unscorable; it is never cut."""
    batch_tokens: PositiveInt = 16384
    """Tokens of a pass, padding included; it only bounds memory."""
    label: NonNegativeInt | None = None
    """Which of its scores is the reward, counted from 0; null if it has one."""


class ByModel(Reward):
    """the score that a reward model gives the conversation; one that is too long is unscorable"""

    name: Literal["model"] = "model"
    reads: ClassVar[str] = (
        "the whole completion, after the turns of its prompt; what `tiercel reward` trained also sees their pictures"
    )
    model: RewardModel
    """The section that says which reward model, such as {path: organisation/name}."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        low, high = self.model.min_pixels, self.model.max_pixels
        if low is not None and high is not None and low > high:
            yield Keys("model.min_pixels", "model.max_pixels").problem(
                f"is {low}, but max_pixels is only {high}, so no image can satisfy both; lower one or raise the other"
            )
        if self.model.max_tokens > self.model.batch_tokens:
            yield Keys("model.batch_tokens", "model.max_tokens").problem(
                f"is {self.model.batch_tokens}, but must hold the longest conversation: model.max_tokens is "
                f"{self.model.max_tokens}"
            )


class ByCall(Reward):
    """A function of the user."""

    takes_time: ClassVar[bool] = True
    call: str
    """Your own: file.py:function or package.module:function, taking a Sample, answering a number or None; a function
    written for TRL or a class written for ms-swift is taken too (docs/rewards.md)."""
    env: tuple[str, ...] | None = None
    """Names of environment variables that your function needs and that look like secrets, such as OPENAI_API_KEY; it
    sees no other `*_KEY`, `*TOKEN*`, `*SECRET*` or `*PASSWORD*`."""
    arguments: Mapping[str, JsonValue] = {}
    """Further arguments of your function, or of your class when it is created, such as {format_weight: 0.3}; a column
    of the rows with such a name is not passed."""

    @property
    def title(self) -> str:
        return self.call.rpartition(":")[2]

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if not all(_VARIABLE.fullmatch(name) for name in self.env or ()):
            yield Keys("env").problem(  # the message does not repeat what was given, as it may be a secret
                "must be only names of environment variables, such as [OPENAI_API_KEY]; their values stay out of the "
                "recipe"
            )
        for key in _named_like_secrets(self.arguments, "arguments"):
            yield Keys(key).problem(
                "looks like a secret, which would be written into the run directory; name a variable in env, and read "
                "it in your function"
            )
        if not is_call(self.call):
            yield Keys("call").problem(f"is {shown(self.call)}, but must be {CALL_FORM}")

    def missing(self) -> Problems:
        for name in self.env or ():
            if name not in os.environ:
                yield Keys("env").problem(
                    f"is {name}, which is not set in the environment; export it, or remove it from the list"
                )


def _named_like_secrets(tree: Mapping[str, JsonValue], above: str) -> Iterator[str]:
    """Yield the dotted names of the texts in a tree that are named like secrets."""
    for name, value in tree.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _named_like_secrets(inner, f"{above}.{name}")
            elif isinstance(inner, str) and is_secret_name(name):
                yield f"{above}.{name}"


STARTED = (Math, ByJudge, ByModel, ByCall)


class OfEnvironment(Reward):
    """what `get_reward` of rollout.environment answers; it does not apply if that answers None"""

    name: Literal["environment"] = "environment"
    reads: ClassVar[str] = "the environment's state at the end"

    def score(self, sample: Sample) -> float | None:
        return None if sample.outcome is None else sample.outcome.value
