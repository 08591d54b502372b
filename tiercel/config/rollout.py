"""The section `rollout` of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tiercel.config.engines import ENGINE_KINDS, EngineKind, EngineName
from tiercel.config_base import SECTION_FORM, TEXT_FORM, NonNegativeInt, PositiveFloat, PositiveInt, Section, form_of


class Vllm(Section):
    """The engine of `rollout.engine: vllm`, in the ranks' own processes."""

    tensor_parallel: PositiveInt = 1
    """Ranks of one machine that share an engine, each with a part of every weight; 1 is an engine for each rank."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of a GPU's memory for the engine: its weights, its keys and values, its workspace."""
    sleep_level: Literal[0, 1, 2] = 0
    """While the learner works the engine keeps everything (0), moves its weights to the host's memory (1), or drops
    them and reads them from disk again (2); 1 and 2 free its keys and values."""
    options: Mapping[str, Any] = {}
    """Further arguments of vLLM's engine, such as {max_num_seqs: 64, enforce_eager: true}; `tiercel serve` gives them
    to a server. Those that tiercel sets itself, or that would change what is sampled from, are refused by name."""


class Rollout(Section):
    """How completions are sampled."""

    engine: EngineName = "local"
    """What samples: local is the trained model itself, by transformers; vllm is an engine beside it in each rank;
    vllm-server is any number of `vllm serve` processes, which share the trainer's file system."""
    vllm: Vllm = Vllm()
    urls: tuple[str, ...] = ()
    """Addresses of the servers of vllm-server, such as http://127.0.0.1:8000. Their key is read from VLLM_API_KEY."""
    request_timeout: PositiveFloat = 300.0
    """Seconds that a server may take for the completions of one prompt."""
    patience: PositiveFloat = 600.0
    """Seconds without an answer from any server after which the run ends; it can be resumed."""
    parity_tolerance: PositiveFloat | None = None
    """Largest difference between an engine's logprobs and the trainer's before the first step; null takes 1e-3 with
    model.dtype float32, 0.25 else. In a narrower dtype than float32 the mean may be half of it, that of 99 % of the
    tokens twice as much, and that of a single token eight times as much."""
    parity_action: Literal["stop", "warn"] = "stop"
    """What happens when at a later step many of an engine's logprobs are far beyond the tolerance: stop ends the run
    before the update, warn logs it and continues."""
    lookahead: NonNegativeInt = 0
    """Steps whose prompts vllm-server samples ahead, while the learner works; each from the policy that the learner
    starts from then, so that completions are so many versions old. Needs algorithm.correction."""
    max_staleness: PositiveInt = 1
    """Versions by which completions may be older than the policy that learns from them; bounds lookahead. The tokens of
    a completion are always of one version, which the rollouts record."""
    prepacked_bytes: NonNegativeInt = 2_000_000_000
    """Memory on a CPU for copies of weights in the order that decoding reads fastest (local, float32); layers beyond it
    are decoded more slowly."""
    group_size: PositiveInt = 8
    """Completions sampled for each prompt."""
    branches: tuple[PositiveInt, ...] = ()
    """Makes the completions of a prompt fork: [2, 4] samples two first parts and four continuations of each, and so
    group_size 8. A part ends at branch_at or, with tools or an environment, with a turn and its answer. Sampled and
    learnt once, a part counts with the sum of the advantages after it; one that cannot go on stands for all of its
    continuations and is counted in branches/reached_fraction."""
    branch_at: str | None = None
    """With branches and without tools and environments: the string that ends a part, such as "</think>"."""
    min_new_tokens: NonNegativeInt = 1
    """End-of-turn tokens are masked before this many tokens."""
    max_new_tokens: PositiveInt = 256
    """A completion without an end by then is truncated and counted."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by this, in sampling and in learning alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegativeInt = 0
    """Only the k likeliest tokens; 0 is off."""
    resample_tries: NonNegativeInt = 0
    """Dynamic sampling (DAPO 2025): if fewer than optim.prompts_per_step groups have rewards that differ, at most
    this many more rollouts of other rows fill the step; groups that differ already are kept. 0 is off."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""
    environment: (
        Annotated[
            Annotated[str, Tag(TEXT_FORM)] | Annotated[Mapping[str, str], Tag(SECTION_FORM)], Discriminator(form_of)
        ]
        | None
    ) = None
    """A class of your own, as file.py:Class or package.module:Class, whose methods the policy calls as tools, or whose
    `respond` answers each of its turns (docs/environments.md), or a server of OpenEnv, as openenv:http://HOST:PORT.
    Several by their names, as {shop: shop.py:Shop}; then the column `environment` of each row names its own."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: the built-in zoom, crop and mark, or your own as file.py:function."""
    max_turns: PositiveInt = 8
    """Turns of the policy in one completion, with an environment or tools."""
    max_trajectory_tokens: PositiveInt = 8192
    """Tokens of one completion, with an environment or tools: what the policy writes and what comes back. One that
    would become longer is truncated and counted; max_new_tokens then limits a turn."""
    record_images: NonNegativeInt | Literal["all"] = 4
    """Prompts of each step whose pictures are kept in images/, at the size of the pages: the first that have any. Those
    of held-out rows are kept too. 0 keeps none."""
    record_tokens: NonNegativeInt = 4
    """Prompts of each step whose tokens are recorded in tokens/, for `tiercel view`: text, logprob, entropy and engine
    gap of the first 1,024 of a completion, in about 35 bytes each. 0 records none."""

    @property
    def most_pictured(self) -> int | None:
        """Return for how many prompts of a step pictures are kept; None for all."""
        return None if self.record_images == "all" else self.record_images

    @property
    def has_turns(self) -> bool:
        """Return whether tools or an environment answer the policy."""
        return self.environment is not None or bool(self.tools)

    @property
    def continues(self) -> bool:
        """Return whether engines go on from what they sampled before."""
        return self.has_turns or bool(self.branches)

    @property
    def environments(self) -> Mapping[str | None, str | None]:
        """Return the classes by the names that rows call them. One class for all rows, or none, has the name None."""
        if isinstance(self.environment, Mapping):
            return {name: environment for name, environment in self.environment.items()}  # of a wider type
        return {None: self.environment}

    @property
    def versions(self) -> int:
        """Return how many versions of the policy are sampled from at the same time."""
        return max(1, self.lookahead)

    @property
    def longest(self) -> int:
        """Return the largest number of tokens that a completion can have."""
        return self.max_trajectory_tokens if self.has_turns else self.max_new_tokens

    @property
    def longest_key(self) -> str:
        """Return the key that sets it."""
        return "rollout.max_trajectory_tokens" if self.has_turns else "rollout.max_new_tokens"

    @property
    def engine_kind(self) -> EngineKind:
        return ENGINE_KINDS[self.engine]
