"""Turn each form that a reward of the user may have, as told by the object itself, into a function of samples.

- tiercel's own: it takes a sample, or a list of samples if it has `batched = True`, and is not changed;
- TRL's: a function with a parameter `completions`, called by keyword with `prompts` and every column of the rows, each
  a list with an entry for every completion; VLM-R1's rewards have this form, too;
- by name: a function with a parameter `completion`, called for each completion with the values that it has parameters
  for, such as f(completion, answer): the names of a Sample, and the columns of the row;
- ms-swift's: a class, or an object of one, whose `__call__` has that parameter;
- verl's: a function with a parameter `solution_str`, or `solution_strs` for a batch;
- EasyR1's: a function with a parameter `reward_input`, a dict, or `reward_inputs`, a list of them; earlier ones have
  `predict_str`, `predict` or `predicts`.

verl's and EasyR1's may return a dict, of which one entry is the reward.

Loaded in the process of a reward; imports nothing heavy.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

from tiercel.reward_types import Sample, SampleImage

SAMPLE_NAMES = ("id", "prompt", "completion", "answer", "token_count", "is_truncated", "messages", "coordinate_space")
KEYS_OF_VERL, KEYS_OF_EASYR1 = ("score", "reward"), ("overall",)  # the reward in a dict that a function returns
PREDICTIONS = ("predict_str", "predict")  # names of a completion in EasyR1's functions until the middle of 2025
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
STOOD_IN = ("ORM", "AsyncORM", "orms")  # names in swift.plugin and swift.rewards


class NoReward(TypeError):
    """What the recipe names is not a reward; the message says why."""


def as_reward(found: Any, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> Callable[..., Any]:
    """Return what to call with a sample, or with a list of samples if it has `batched = True`. `arguments` are passed
    to a class when it is created, and to a function in every call. Raises NoReward."""
    if inspect.isclass(found):
        found, arguments = _made(found, arguments), NO_ARGUMENTS
    if not callable(found):
        raise NoReward(f"is a {type(found).__name__}, which cannot be called")
    if arguments:
        found = _with_arguments(found, arguments)
    if getattr(found, "batched", False):
        return found
    is_of_class = inspect.isfunction(getattr(type(found), "__call__", None))  # noqa: B004
    if _takes(found, "completion"):
        return _by_name(found)
    if _takes(found, "solution_str"):
        return _of_verl(found)
    if _takes(found, "solution_strs"):
        return _batched(lambda samples: _call(found, _lists_of_verl(samples)), KEYS_OF_VERL)
    if _takes(found, "reward_inputs"):
        inputs = "reward_inputs"
        return _batched(lambda samples: _call(found, {inputs: list(map(_reward_input, samples))}), KEYS_OF_EASYR1)
    if _takes(found, "reward_input"):
        return _of_each(found, lambda sample: {"reward_input": _reward_input(sample)}, KEYS_OF_EASYR1)
    text = next((name for name in PREDICTIONS if _takes(found, name)), None)
    if text is not None and _takes(found, "ground_truth"):
        return _of_each(found, lambda sample: _names_of_verl(sample, text), (*KEYS_OF_EASYR1, *KEYS_OF_VERL))
    if _takes(found, "predicts") and _takes(found, "ground_truths"):
        return _batched(lambda samples: _call(found, _predictions(samples)), KEYS_OF_EASYR1)
    if not _takes(found, "completions"):
        _require_one_parameter(found)
        return found.__call__ if is_of_class else found  # the method tells whether it is async
    said = getattr(found, "conversational", None)
    if said is None and not is_of_class:
        own = getattr(found, "func", found)  # of a functools.partial
        return _of_lists(found, list if _names_content(getattr(own, "__code__", None)) else Conversation)
    return _of_lists(found, list if said else None)


def _names_content(code: CodeType | None) -> bool:
    """Return whether a function, or one inside it, names the key `content` of a turn, and so expects conversations."""
    constants = () if code is None else code.co_consts
    return any(_names_content(each) if isinstance(each, CodeType) else each == "content" for each in constants)


def _made(found: type, arguments: Mapping[str, Any]) -> Any:
    """Make an object of a class, as ms-swift does without arguments. Raises whatever its constructor raises."""
    _require_parameters(found, arguments)
    if names := [each.name for each in _named(found) if each.default is each.empty and each.name not in arguments]:
        raise NoReward(f"is a class that requires {', '.join(names)}; give them in the reward's `arguments`")
    return found(**arguments)


def _with_arguments(found: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind arguments to a function, and keep the attributes that say what it takes."""
    _require_parameters(found, arguments)
    bound = partial(found, **arguments)
    for name in ("batched", "conversational"):
        if hasattr(found, name):
            setattr(bound, name, getattr(found, name))
    return bound


def _require_parameters(found: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise NoReward if a function or a class does not take all of the arguments."""
    parameters = _parameters(found)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_all and (unknown := [name for name in arguments if name not in parameters]):
        raise NoReward(f"takes no {', '.join(unknown)}, given in `arguments`; it takes {', '.join(parameters)}")


def _require_one_parameter(found: Callable[..., Any]) -> None:
    """Raise NoReward for a function that would be called with a sample but requires more than that."""
    required = [each.name for each in _named(found) if each.default is each.empty]
    if len(required) > 1:
        raise NoReward(
            f"takes {', '.join(required)}; a reward takes `completion`, and by their names whatever else it needs of "
            f"{', '.join(name for name in SAMPLE_NAMES if name != 'completion')} and the row's columns; or one sample"
        )


def _takes(found: Callable[..., Any], name: str) -> bool:
    """Return whether a function is called by the names of its parameters, one of which is `name`."""
    parameters = _parameters(found)
    kinds = [parameter.kind for parameter in parameters.values()]
    is_of_samples = next(iter(parameters), None) in ("sample", "samples")
    takes_all = name == "completions" and kinds == [inspect.Parameter.VAR_KEYWORD]
    return (name in parameters and not is_of_samples) or takes_all


def _by_name(found: Callable[..., Any]) -> Callable[[Sample], Any]:
    """Wrap a function that takes parts of a sample by name as a function of samples."""
    return _of_each(found, _values_by_name, ())


def _values_by_name(sample: Sample) -> dict[str, Any]:
    own = {name: getattr(sample, name) for name in SAMPLE_NAMES} | {"images": Pictures(sample.images)}
    values = {**sample.columns, **own, "answer": sample.columns.get("answer", sample.answer)}
    if values["answer"] is None:
        del values["answer"]  # a function that requires it fails; it might compare with None
    return values


def _of_verl(found: Callable[..., Any]) -> Callable[[Sample], Any]:
    """Wrap verl's function of one completion. A parameter with a default that verl does not pass, such as `score=1.0`,
    keeps it, even if a column has its name."""
    usual = {each.name for each in _named(found) if each.default is not each.empty} - {*SAMPLE_NAMES, "images"}

    def values(sample: Sample) -> dict[str, Any]:
        others = {name: value for name, value in _values_by_name(sample).items() if name not in usual}
        return others | _names_of_verl(sample)

    return _of_each(found, values, KEYS_OF_VERL)


def _of_each(
    found: Callable[..., Any], values: Callable[[Sample], Mapping[str, Any]], keys: Sequence[str]
) -> Callable[[Sample], Any]:
    """Wrap a function that is called for each completion with these values, and may return a dict."""

    def score(sample: Sample) -> Any:
        return _reward_in(_call(found, values(sample)), keys)

    async def score_async(sample: Sample) -> Any:
        return _reward_in(await _call(found, values(sample)), keys)

    return score_async if _is_async(found) else score


def _names_of_verl(sample: Sample, text: str = "solution_str") -> dict[str, Any]:
    """Return what verl calls a function with, as far as the row has it; the column `extra_info` may be missing. `text`
    is the name of the completion."""
    extra = sample.columns.get("extra_info", {})
    if isinstance(extra, Mapping):  # verl counts the question, the policy's turns, and the answers between them
        extra = {**extra, "num_turns": 2 * max(1, len(sample.turns))}
    given = {"data_source": sample.columns.get("data_source"), "ground_truth": _own_answer(sample)}
    known = {name: value for name, value in given.items() if value is not None}
    return {text: sample.completion, "extra_info": extra, **known}


def _lists_of_verl(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    every = [_names_of_verl(sample) for sample in samples]
    return {f"{name}s": [each.get(name) for each in every] for name in dict.fromkeys(chain(*every))}


def _is_async(found: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (found, type(found).__call__)))


def _reward_input(sample: Sample) -> dict[str, Any]:
    """Return what EasyR1 passes for a completion."""
    truth = _own_answer(sample)
    return {"response": sample.completion, "response_length": sample.token_count, "ground_truth": truth}


def _predictions(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return what EasyR1 passed for a batch until the middle of 2025."""
    truths = [_own_answer(sample) for sample in samples]
    return {"predicts": [sample.completion for sample in samples], "ground_truths": truths}


def _own_answer(sample: Sample) -> Any:
    """Return the right answer as the row has it. `Sample.answer` has no tags, and a list for a box as JSON text."""
    return sample.named.get("answer", sample.answer)


def _batched(call: Callable[[Sequence[Sample]], Any], keys: Sequence[str]) -> Callable[[Sequence[Sample]], Any]:
    """Wrap a function of samples, which may be async and whose values may be dicts."""

    def rewards_in(values: Any) -> Any:
        return [_reward_in(value, keys) for value in values] if isinstance(values, list | tuple) else values

    async def awaited(values: Awaitable[Any]) -> Any:
        return rewards_in(await values)

    def score(samples: Sequence[Sample]) -> Any:
        values = call(samples)
        return awaited(values) if inspect.isawaitable(values) else rewards_in(values)

    score.batched = True  # type: ignore[attr-defined]
    return score


def _reward_in(value: Any, keys: Sequence[str]) -> Any:
    """Return the reward in a dict, under the first of these keys that it has. Its other entries are metrics in EasyR1
    and verl, and are not kept."""
    names = [name for name in keys if isinstance(value, Mapping) and name in value]
    return value[names[0]] if names else value


def _parameters(found: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(found).parameters
    except ValueError:  # a function in C whose signature is not known
        return {}


def _named(found: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the function's parameters without *args and **kwargs."""
    return [each for each in _parameters(found).values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def _call(found: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with those of the values that it has parameters for, other than the arguments that it has been
    given. Raises TypeError if it requires others."""
    values = {name: value for name, value in values.items() if name not in getattr(found, "keywords", ())}
    named = _named(found)
    if missing := [each.name for each in named if each.default is each.empty and each.name not in values]:
        raise TypeError(
            f"it takes {', '.join(missing)}, which the rows here do not have; give it a default, or take what there "
            f"is: {', '.join(values)}"
        )
    takes_all = any(each.kind is each.VAR_KEYWORD for each in _parameters(found).values())
    names = {each.name for each in named}
    return found(**{name: value for name, value in values.items() if takes_all or name in names})


class Conversation(list[Any]):
    """A completion as a list of turns, for a function that neither says whether it takes conversations nor names the
    content of a turn. One that takes texts would find a text of length 1 that contains nothing; it raises TypeError
    instead."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError(
            "a completion is a list of turns here: take completion[0]['content'], or write NAME.conversational = False "
            "below the function NAME to get texts (True: lists without this check)"
        )

    def __contains__(self, value: object) -> bool:
        return super().__contains__(self._not_text(value))

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return type(self)(found) if isinstance(place, slice) else found  # the same check for completion[-20:]

    def count(self, value: object) -> int:
        return super().count(self._not_text(value))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(self._not_text(other))

    def __ne__(self, other: object) -> bool:
        return super().__ne__(self._not_text(other))

    def _not_text(self, value: object) -> object:
        if isinstance(value, str):
            len(self)  # raises
        return value


def _of_lists(found: Callable[..., Any], conversation: type[list[Any]] | None) -> Callable[..., Any]:
    """Wrap a function that takes lists by name as a function of samples. It is passed the lists that it has parameters
    for. `conversation` is the type of a completion; None: text."""

    def score(samples: Sequence[Sample]) -> Any:
        return _call(found, _lists(samples, conversation))

    score.batched = True  # type: ignore[attr-defined]
    return score


def _lists(samples: Sequence[Sample], conversation: type[list[Any]] | None) -> dict[str, list[Any]]:
    """Collect prompts, completions and every column of any row, including `answer`, and `solution`, which is the answer
    if no row has a column of that name. The entry is None if a row lacks a column. Pictures are in the forms of TRL and
    VLM-R1."""
    answers = [_own_answer(sample) for sample in samples]
    lists = {"solution": [sample.named.get("solution", sample.answer) for sample in samples], "answer": answers}
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    names = dict.fromkeys((*columns, *(name for sample in samples for name in sample.named if name not in lists)))
    lists |= {name: [sample.columns.get(name, sample.named.get(name)) for sample in samples] for name in names}
    if conversation is not None:
        lists["prompts"] = [[asdict(turn) for turn in sample.messages] for sample in samples]
        lists["completions"] = [conversation([{"role": "assistant", "content": each.completion}]) for each in samples]
    else:
        lists["prompts"] = [sample.prompt for sample in samples]
        lists["completions"] = [sample.completion for sample in samples]
    problems = [sample.prompt.replace("<image>", "") for sample in samples]
    return lists | {name: made for name, made in _pictures(samples, problem=problems).items() if name not in lists}


def _pictures(samples: Sequence[Sample], **lists: list[Any]) -> dict[str, list[Any]]:
    """Add to `lists` the pictures of each sample, their files, and the patches of the first picture, if any sample has
    one."""
    if not any(sample.images for sample in samples):
        return lists
    lists |= {
        "images": [Pictures(sample.images) for sample in samples],
        "image_path": [[image.file for image in sample.images] or None for sample in samples],
    }
    grids = [next((image.grid_thw for image in sample.images if image.grid_thw), None) for sample in samples]
    if any(grids):
        lists["image_grid_thw"] = [grid and list(grid) for grid in grids]
    return lists


class Pictures(Sequence[Any]):
    """The pictures of a sample, each opened only when it is accessed."""

    def __init__(self, images: Sequence[SampleImage]):
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, place: Any) -> Any:
        found = self._images[place]
        return [image.open() for image in found] if isinstance(place, slice) else found.open()


class _StandInOrm:
    """Replaces the base class of ms-swift's rewards."""

    def __init__(self, args: Any = None, **options: Any):
        self.args = args


def stand_in_for_swift() -> None:
    """Make `from swift.plugin import ORM, orms`, and the same import from swift.rewards, work in this process if
    ms-swift is not installed. Nothing else of ms-swift is provided."""
    package = ModuleType("swift")
    package.__path__ = []  # marks it as a package, without further modules
    registry: dict[str, Any] = {}
    for name in ("plugin", "rewards"):
        module = ModuleType(f"swift.{name}")
        for attribute, value in zip(STOOD_IN, (_StandInOrm, _StandInOrm, registry), strict=True):
            setattr(module, attribute, value)
        setattr(package, name, module)
        sys.modules[module.__name__] = module
    sys.modules["swift"] = package


def is_swifts(error: ImportError) -> bool:
    """Return whether an import failed because ms-swift, or something in it, is missing."""
    return (error.name or "").partition(".")[0] == "swift"
