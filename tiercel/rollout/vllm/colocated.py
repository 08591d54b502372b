"""The `vllm` engine: vLLM in the processes of the ranks, one engine per rank or tensor-parallel over several.

vLLM is imported only when an engine is built.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.errors import ElsewhereError, EnvironmentProblem, TiercelError, TrainingError
from tiercel.models.families.base import Family
from tiercel.rollout.dialogue import Dialogues
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.trajectory import TrajectoryBuilder, awaited, begun_trajectories, ended_trajectories
from tiercel.rollout.vllm.full_weights import reload
from tiercel.rollout.vllm.requests import (
    ImpossibleCompletion,
    PromptRequest,
    add_sampled,
    engine_options,
    make_completion,
    require_same_prompt,
    sampling_fields,
    scheduling,
    visual_data,
)
from tiercel.rollout.vllm.shared_memory import meeting_by_name
from tiercel.types import Completion, EncodedPrompt, Group

RELOADS_WITH_LORA = Version("0.33")
# vLLM shuts an engine down once it is collected, and with it the process group of the ranks: it ends with the process.
ENGINES_OF_RANKS: list[Any] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A prompt, as the ranks of an engine send it to each other."""

    token_ids: list[int]  # with one placeholder for each picture, which vLLM repeats as often as it needs
    visuals: dict[str, list[Any]]
    params: SamplingParams
    seed: int


_Share = tuple[list[_Request], tuple[int, int, str] | None]  # of a rank, with its number, code and error if it failed


class ColocatedSampler:
    """Sampler with vLLM in this process. Every rank of an engine requests all prompts of the engine's ranks, and keeps
    the completions of its own prompts."""

    shares_weights = False

    def __init__(
        self,
        family: Family,
        recipe: GrpoRecipe,
        ranks: Ranks,
        visuals: Mapping[str, int],
        *,
        adapts_vision: bool = False,
    ):
        self.family = family
        self.rollout = recipe.rollout
        self.ranks = ranks
        self.group = _tensor_parallel_group(ranks, recipe.rollout.vllm.tensor_parallel)
        with meeting_by_name(ranks, recipe.rollout.vllm.tensor_parallel):
            options = _engine_options(family, recipe, visuals, ranks.world_size > 1)
            if adapts_vision:
                options["enable_tower_connector_lora"] = True
            self.engine = _build_engine(options, recipe.rollout.vllm.sleep_level)
        if adapts_vision and not all(self.engine.apply_model(_adapts_vision)):
            raise EnvironmentProblem(
                f"rollout.engine: vllm: this vLLM ignores adapters on vision layers of {family.name}; update vLLM, "
                "or set lora.targets: language, or rollout.engine: local"
            )
        self.adapter: Any = None
        self.version = 0
        self._is_asleep = False
        self._freed_bytes = 0  # by the last sleep, of this rank's GPU

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        from vllm.lora.request import LoRARequest

        assert adapter_directory is not None
        self.version = version
        self.adapter = LoRARequest(adapter_directory.name, version + 1, str(adapter_directory.absolute()))

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by those of a version, given one after another by their names in the checkpoint. The
        engine stays awake afterwards. Raises TrainingError."""
        self._wake()
        try:
            reload(self.engine, weights)
        except (ValueError, RuntimeError, LookupError, AttributeError) as error:
            raise TrainingError(
                f"rollout.engine: vllm failed to load version {version} of the weights: {error}"
            ) from error
        self.version = version

    def require_usable(self, prompt: EncodedPrompt) -> None:
        """Check nothing, because the engine was built from the recipe."""

    def _wake(self) -> None:
        if not self._is_asleep:
            return
        torch.cuda.empty_cache()  # what the learner freed; vLLM 0.19 does not ask torch for it
        self.engine.wake_up()
        if self.rollout.vllm.sleep_level == 2:
            self.engine.collective_rpc("reload_weights")
        self._is_asleep = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        level = self.rollout.vllm.sleep_level
        self._wake()
        try:
            yield
        finally:
            if level and torch.cuda.is_available():
                free_before, _ = torch.cuda.mem_get_info()
                self.engine.sleep(level=level)
                self._freed_bytes = torch.cuda.mem_get_info()[0] - free_before
                self._is_asleep = True

    def sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        return self.sample(prompts, params, seeds)

    def metrics(self) -> dict[str, float]:
        return {"memory/freed_by_sleep_bytes": self._freed_bytes} if self.rollout.vllm.sleep_level else {}

    def close(self) -> None:
        if self.ranks.world_size > 1:
            ENGINES_OF_RANKS.append(self.engine)
            return
        self.engine.llm_engine.engine_core.shutdown()

    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        seeds: Sequence[int],
        dialogues: Dialogues | None = None,
    ) -> tuple[Group, ...]:
        if dialogues is None:
            asked = [
                PromptRequest(prompt=each, params=params, seed=seed) for each, seed in zip(prompts, seeds, strict=True)
            ]
            outputs = self._outputs(asked) or []
            sampled = list(map(self._completions, asked, outputs))
        else:
            sampled = self._trajectories(begun_trajectories(self.family, prompts, params, seeds, dialogues), params)
        return tuple(
            Group(prompt=prompt, completions=completions, policy_version=self.version)
            for prompt, completions in zip(prompts, sampled, strict=True)
        )

    def _trajectories(
        self, begun: Sequence[Sequence[TrajectoryBuilder]], params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        """Sample turn by turn; the engine is called once for a turn of all trajectories that go on. An error of one
        rank's turn is kept until the ranks of the engine meet again, because the others would wait for it there."""
        open_ones = [builder for builders in begun for builder in builders]
        failed: TiercelError | None = None
        while True:
            asked = [PromptRequest.of_turn(each, params) for each in open_ones]
            outputs = self._outputs(asked, failed)
            if outputs is None:
                every = [builder for builders in begun for builder in builders]
                ended = iter(ended_trajectories(every, self.ranks.heartbeat.beat))
                return [tuple(next(ended) for _ in builders) for builders in begun]
            try:
                open_ones = self._going_on(open_ones, asked, outputs)
            except TiercelError as error:
                failed, open_ones = error, []

    def _going_on(
        self, builders: Sequence[TrajectoryBuilder], asked: Sequence[PromptRequest], outputs: Sequence[Any]
    ) -> list[TrajectoryBuilder]:
        """Add a turn to each trajectory, and return those that go on."""
        sampled = map(self._completions, asked, outputs)
        replies = [add_sampled(builder, turn) for builder, (turn,) in zip(builders, sampled, strict=True)]
        return [
            builder
            for builder, reply in zip(builders, replies, strict=True)
            if reply is not None and builder.add_reply(awaited(reply, self.ranks.heartbeat.beat))
        ]

    def _outputs(self, asked: Sequence[PromptRequest], failed: TiercelError | None = None) -> list[Any] | None:
        """Sample what this rank asks for, together with what the other ranks of the engine ask for; None if none of
        them asks for anything. If a rank has failed, all of them raise: that rank its error, the others
        ElsewhereError."""
        end = None if failed is None else (self.ranks.rank, failed.exit_code, str(failed))
        shares, place = self._of_engine(([self._request(each) for each in asked], end))
        if failed is not None:
            raise failed
        if (end := next((end for _, end in shares if end is not None), None)) is not None:
            raise ElsewhereError(*end)
        every = [request for requests, _ in shares for request in requests]
        start = sum(len(requests) for requests, _ in shares[:place])
        if not every:
            return None
        sampled = self._generate(every)[start : start + len(asked)]
        self.ranks.heartbeat.beat()  # each turn of a trajectory may take as long as a whole answer
        return sampled

    def _of_engine(self, own: _Share) -> tuple[list[_Share], int]:
        """Return the shares of all ranks that share the engine, in their order, and the place of this rank's."""
        if self.group is None:
            return [own], 0
        shares: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(shares, own, group=self.group)
        return shares, dist.get_rank(self.group)

    def _request(self, asked: PromptRequest) -> _Request:
        prompt = asked.prompt
        return _Request(
            token_ids=self.family.unexpanded_token_ids(prompt.token_ids_P, [image.plan for image in prompt.images]),
            visuals=visual_data(self.family, prompt.images),
            params=asked.params,
            seed=asked.seed,
        )

    def _generate(self, requests: Sequence[_Request]) -> list[Any]:
        from vllm import SamplingParams as VllmParams

        prompts = [
            {"prompt_token_ids": request.token_ids} | ({"multi_modal_data": request.visuals} if request.visuals else {})
            for request in requests
        ]
        asked = [
            VllmParams(
                max_tokens=request.params.max_new_tokens,
                logprobs=0,
                detokenize=bool(request.params.stop),
                **_known(sampling_fields(self.family, request.params, request.seed), request.params),
            )
            for request in requests
        ]
        try:
            return self.engine.generate(prompts, asked, lora_request=self.adapter, use_tqdm=False)
        except (ValueError, RuntimeError) as error:
            raise TrainingError(f"rollout.engine: vllm failed to sample: {error}") from error

    def _completions(self, asked: PromptRequest, output: Any) -> tuple[Completion, ...]:
        prompt, params = asked.prompt, asked.params
        require_same_prompt(self.family, prompt, output.prompt_token_ids, "rollout.engine: vllm")
        completions = sorted(output.outputs, key=lambda each: each.index)
        try:
            return tuple(
                make_completion(
                    self.family,
                    each.token_ids,
                    [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)],
                    each.finish_reason,
                    asked.seed + number,
                    params,
                )
                for number, each in islice(enumerate(completions), params.group_size)
            )
        except ImpossibleCompletion as error:
            raise TrainingError(
                f"rollout.engine: vllm: row {prompt.row.id}: its answer cannot be right: {error}; update vLLM, or "
                "set rollout.engine: local"
            ) from error


def _known(fields: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Leave out the fields of stop strings if there are none: vLLM looks for them in text, which it then does not
    make."""
    if params.stop:
        return fields
    return {name: value for name, value in fields.items() if name not in ("stop", "include_stop_str_in_output")}


def _adapts_vision(model: Any) -> bool:
    """Return whether vLLM's model, when asked to, applies adapters to its vision layers."""
    return bool(model.lora_manager.supports_tower_connector_lora)


def _engine_options(
    family: Family, recipe: GrpoRecipe, visuals: Mapping[str, int], is_launched: bool
) -> dict[str, Any]:
    """Return the engine arguments of the recipe. If a launcher started the ranks, the engine uses their process
    group."""
    vllm = recipe.rollout.vllm
    own = {
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "tensor_parallel_size": vllm.tensor_parallel,
        "distributed_executor_backend": "external_launcher" if is_launched else None,
        "enable_sleep_mode": vllm.sleep_level > 0 and torch.cuda.is_available(),
        "seed": recipe.train.seed,
        "disable_log_stats": True,
    }
    given = {name.replace("-", "_"): value for name, value in vllm.options.items()}
    return {**engine_options(recipe, family, visuals, 1), **scheduling(recipe, family), **own, **given}


def _build_engine(options: dict[str, Any], sleep_level: int) -> Any:
    """Build a `vllm.LLM`. Raises EnvironmentProblem if vLLM is not installed or does not start."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM, __version__
    except ImportError as error:
        raise EnvironmentProblem(f"rollout.engine: vllm needs the package vllm ({error}); pip install vllm") from error
    _require_reload(Version(__version__), sleep_level)
    try:
        return LLM(**options)
    except Exception as error:  # any kind, for models that vLLM supports only in part
        remedy = (
            "`tiercel plan` says how much memory vLLM needs; its share is rollout.vllm.gpu_memory_utilization "
            f"({options['gpu_memory_utilization']:g})"
            if "memory" in str(error).lower()
            else "docs/vllm.md lists the models that were tried; rollout.engine: local does not need vLLM"
        )
        raise EnvironmentProblem(
            f"rollout.engine: vllm does not start: {type(error).__name__}: {error}; {remedy}"
        ) from error


def _require_reload(installed: Version, sleep_level: int) -> None:
    """Raise EnvironmentProblem if this vLLM cannot read its weights again with an adapter loaded."""
    if sleep_level == 2 and installed < RELOADS_WITH_LORA:
        raise EnvironmentProblem(
            f"rollout.vllm.sleep_level: 2 does not work with vLLM {installed}, which cannot read weights again "
            "beside an adapter (KeyError in reload_weights); set sleep_level: 1, or install vLLM "
            f"{RELOADS_WITH_LORA} or newer"
        )


def _tensor_parallel_group(ranks: Ranks, size: int) -> Any:
    """Return the process group of the ranks that share this rank's engine, which are neighbours; None if the rank has
    its own engine. Raises EnvironmentProblem if the number of ranks is not a multiple of `size`."""
    if size == 1:
        return None
    if ranks.world_size % size:
        raise EnvironmentProblem(
            f"rollout.vllm.tensor_parallel: got {size}, but {ranks.world_size} ranks are not a multiple of it"
        )
    mine, _ = dist.new_subgroups(size, backend="gloo")
    return mine
