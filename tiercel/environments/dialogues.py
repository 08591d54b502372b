"""The dialogues of a policy with the user's environment, the user's tools and the built-in tools.

Resets, answers and rewards run on threads, each of which waits for a process of the user's code. Nothing depends on
when they finish.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiercel.config.schema import Data, Reliability
from tiercel.environments.answers import EnvironmentAnswer, answer_of, with_observation
from tiercel.environments.calls import Malformed
from tiercel.environments.processes import EnvironmentFailure, EnvironmentProcess
from tiercel.environments.setting import EnvironmentSetting, settings_of
from tiercel.environments.tools import BUILT_IN, PictureTools, SeenPicture, Toolboxes, ToolProblem, use
from tiercel.errors import DataError, RecipeError
from tiercel.models.chat import encode_answer
from tiercel.models.families.base import Family
from tiercel.reward_types import PolicyTurn, RewardValue, SampleImage, ToolCall
from tiercel.rewards.runtime.user import checked_reply, without_secrets_of
from tiercel.rollout.dialogue import Dialogue, Limits, TrajectoryEnd, TurnReply
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.sandbox.process import FOREIGN_REPLY
from tiercel.types import EncodedImage, EncodedPrompt, ImageSource, Message, VideoSource

RESET_TRIES = 2  # for a prompt: if the second one works, the others of its samples do too
THREADS = 64  # number of answers awaited at a time
UNKNOWN = "unknown"  # the tool of an answer to a call of an unknown tool


class EnvironmentDialogues:
    """The maker of a run's dialogues. A context manager, which ends all processes when it closes."""

    def __init__(
        self, toolboxes: Toolboxes, family: Family, *, data: Data, reliability: Reliability, limits: Limits, seed: int
    ):
        """`seed` is the run's. Gives the family the tools, which the chat template shows. Raises ModelError if that
        writes no tool calls, and RecipeError if built-in tools cannot know the coordinates of boxes."""
        names = {name: None for toolbox in toolboxes.values() for name in toolbox.names if name in BUILT_IN}
        if family.coordinate_space is None and names:
            why = "does not document how it writes boxes; set data.coordinates"
            why = "reads no pictures; remove them" if family.image_marker is None else why
            raise RecipeError([f"rollout.tools: {', '.join(names)} given, and {family.name} {why}"])
        self.limits = limits
        self._seed, self._family = seed, family
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
        self._settings = settings_of(toolboxes, family, data, reliability)

    def __enter__(self) -> "EnvironmentDialogues":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompts_of(self, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
        """Return the prompts with the answer of the environment's `reset` for their first sample; their rows stay the
        same. A prompt whose reset fails is unchanged, and its dialogues fail with the reason."""
        if self._settings.keys() == {None} and self._settings[None].toolbox.code.environment is None:
            return list(prompts)
        return list(self._threads.map(self._observed, prompts))

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        """Return the limits of a trajectory, which are the same for all."""
        return self.limits

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        """Begin a trajectory for each of these samples of a prompt that `prompts_of` returned."""
        setting = self._setting_of(prompt)
        seeds = [self._seed_of(prompt, sample) for sample in samples]
        return [EnvironmentDialogue(setting, self._threads, prompt, seed) for seed in seeds]

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for setting in self._settings.values():
            setting.processes.close()
        self._threads.shutdown()

    def _observed(self, prompt: EncodedPrompt) -> EncodedPrompt:
        setting = self._setting_of(prompt)
        for _ in range(RESET_TRIES):
            with suppress(EnvironmentFailure, DataError):
                with setting.processes.lent() as process:
                    observation = setting.reset(process, prompt.row, self._seed_of(prompt, 0))
                encoded = setting.encode(with_observation(prompt.row, observation), prompt.index)
                return replace(encoded, row=prompt.row)
        return prompt

    def _setting_of(self, prompt: EncodedPrompt) -> EnvironmentSetting:
        return self._settings[self._family.environment_of(prompt.row)]

    def _seed_of(self, prompt: EncodedPrompt, sample: int) -> int:
        return sampling_seed(self._seed, prompt.index) + sample


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """What a tool, or `respond`, returned. `call` is None for `respond`."""

    call: ToolCall | None
    content: str
    images: tuple[EncodedImage, ...] = ()
    is_done: bool = False

    @property
    def message(self) -> Message:
        """Return the result as a message for the chat template."""
        if self.call is None:
            return Message(role="user", content=self.content)
        tool = self.call.name if self.call.is_known else UNKNOWN  # otherwise the name is whatever the policy wrote
        return Message(role="tool", content=self.content, tool=tool)


class EnvironmentDialogue:
    """Answers to the turns of one trajectory. Its requests run on threads, one after another."""

    def __init__(self, setting: EnvironmentSetting, threads: ThreadPoolExecutor, prompt: EncodedPrompt, seed: int):
        self._setting, self._threads, self._prompt, self._seed = setting, threads, prompt, seed
        self._process: EnvironmentProcess | None = None
        self._copy = 0  # the number of the environment in that process
        self._pictures: list[SeenPicture] = []
        self._ending: TrajectoryEnd | None = None
        self._begun = threads.submit(self._begin)

    def answer(self, text: str, token_count: int) -> "Future[TurnReply]":
        """Answer a turn; see Dialogue."""
        return self._threads.submit(self._reply, PolicyTurn(text=text, token_count=token_count))

    def fork(self) -> "EnvironmentDialogue":
        """Copy the trajectory with its environment; see Dialogue."""
        made = copy(self)
        made._pictures = list(self._pictures)
        if self._process is not None and self._ending is None:
            with self._failing():
                number = self._ask("fork").get("copy")
                if not isinstance(number, int):
                    raise EnvironmentFailure(FOREIGN_REPLY)
                made._copy = number
                self._setting.processes.share(self._process)
        made._ending = self._ending
        return made

    def end(self) -> TrajectoryEnd:
        """End the trajectory; see Dialogue."""
        self._begun.result()
        return self._finished()

    def _begin(self) -> None:
        setting, prompt = self._setting, self._prompt
        with self._failing():
            row = with_observation(prompt.row, EnvironmentAnswer(content=""))
            if setting.toolbox.code.exists:
                self._process = setting.processes.take()
            if setting.toolbox.code.environment is not None:
                assert self._process is not None
                observation = setting.reset(self._process, prompt.row, self._seed)
                row = with_observation(prompt.row, observation)
                setting.require_observation(prompt, row, observation)
            self._see(row.visuals, prompt.images)

    def _reply(self, turn: PolicyTurn) -> TurnReply:
        self._begun.result()
        reply = TurnReply(turn=turn, observation=None)
        if self._ending is None:
            with self._failing():
                reply = self._answered(turn)
        if reply.observation is None:
            self._finished()  # here, so that `end` need not wait
        return reply

    def _answered(self, turn: PolicyTurn) -> TurnReply:
        results = self._results(turn.text)
        if not results:
            return TurnReply(turn=turn, observation=None)
        images = [image for result in results for image in result.images]
        turn = replace(
            turn,
            calls=tuple(result.call for result in results if result.call is not None),
            answer="\n".join(result.content for result in results),
            images=tuple(
                SampleImage(path=None, original_size=image.plan.original_size, processed_size=image.plan.processed_size)
                for image in images
            ),
        )
        if results[-1].is_done:
            return TurnReply(turn=turn, observation=None)
        pictures = sum(each.plan.fps is None for each in self._pictures)  # with those of this answer
        observation = encode_answer(
            self._setting.family, [result.message for result in results], images, pictures - len(images)
        )
        return TurnReply(turn=turn, observation=observation)

    def _results(self, text: str) -> list[_Result]:
        """Make the calls of a turn, or let the environment respond if there are none."""
        try:
            calls = self._setting.reader.read(text, self._prompt.text) if self._setting.reader is not None else ()
        except Malformed as problem:
            return [self._refused(ToolCall(name="", arguments={}, is_known=False), problem)]
        results: list[_Result] = []
        for call in calls:
            results.append(self._called(call))
            if results[-1].is_done:
                break
        if not calls and self._setting.toolbox.responds:
            answer = answer_of(self._ask("respond", completion=text), self._setting.harmless)
            results += [] if answer is None else [self._shown(None, answer)]
        return results

    def _called(self, call: ToolCall) -> _Result:
        names = self._setting.toolbox.names
        if call.name not in names:
            problem = f"there is no tool {call.name!r}; the tools are {', '.join(names)}"
            return self._refused(replace(call, is_known=False), problem)
        if call.name in BUILT_IN:
            return self._by_built_in(call)
        reply = self._ask("call", name=call.name, arguments=dict(call.arguments))
        if isinstance(error := reply.get("error"), str):
            return replace(self._refused(call, error), is_done=reply.get("is_done") is True)
        return self._shown(call, answer_of(reply, self._setting.harmless) or EnvironmentAnswer(content=""))

    def _by_built_in(self, call: ToolCall) -> _Result:
        space, row = self._setting.family.coordinate_space, self._prompt.row
        assert space is not None
        try:
            picture = use(call.name, PictureTools(self._pictures, space), call.arguments)
            image = self._setting.family.encode_image(picture, row.pixels)
        except (ToolProblem, DataError) as problem:
            return self._refused(call, problem)
        self._pictures.append(SeenPicture(original=lambda: picture, plan=image.plan))
        label = call.arguments.get("label")
        text = f"image {len(self._pictures)}" + (f": {label}" if label else "")
        return _Result(call=call, content=f"{self._setting.harmless(text)}\n<image>", images=(image,))

    def _shown(self, call: ToolCall | None, answer: EnvironmentAnswer) -> _Result:
        """Turn an answer of the user's code into a result. Raises DataError if its pictures cannot be used."""
        images = self._setting.encode_pictures(self._prompt.row, answer.pictures)
        self._see(answer.pictures, images)
        return _Result(call=call, content=answer.content, images=images, is_done=answer.is_done)

    def _see(self, sources: Sequence[ImageSource | VideoSource], images: Sequence[EncodedImage]) -> None:
        """Make pictures that the policy sees available to the built-in tools."""
        row = self._prompt.row
        self._pictures += [
            SeenPicture(original=partial(self._setting.original, row, source), plan=image.plan)
            for source, image in zip(sources, images, strict=True)
        ]

    def _refused(self, call: ToolCall, problem: object) -> _Result:
        """Return a result that tells the policy why a call has none."""
        return _Result(call=replace(call, failure=str(problem)), content=self._setting.harmless(f"error: {problem}"))

    def _finished(self) -> TrajectoryEnd:
        """Get the environment's reward and release its process, once."""
        if self._ending is None:
            with self._failing():
                outcome = None
                if self._setting.toolbox.gives_reward:
                    value, failure = checked_reply(self._ask("get_reward"))
                    if failure is not None:
                        raise EnvironmentFailure(failure)
                    outcome = RewardValue(value=value)
                self._ending = TrajectoryEnd(outcome=outcome)
                if self._process is not None:
                    self._setting.processes.give_back(self._process)
        assert self._ending is not None
        return self._ending

    def _ask(self, ask: str, **fields: Any) -> Mapping[str, Any]:
        assert self._process is not None
        return self._process.ask(ask, copy=self._copy, **fields)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the trajectory if the environment cannot continue."""
        try:
            yield
        except (EnvironmentFailure, DataError) as error:
            row = self._prompt.row
            text = f"{self._setting.toolbox.code.name}, row {row.id}: {error}"
            self._ending = TrajectoryEnd(outcome=None, failure=without_secrets_of(row.columns, text))
            if self._process is not None:
                self._setting.processes.end(self._process)
