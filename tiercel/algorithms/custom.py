"""The user's own losses and advantages: loaded once per process and called with tensors, with checks on their results.

They run in the trainer's process, not in a separate one as rewards do, because a loss needs the gradient.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tiercel.algorithms.types import LossInput, Options, RewardTable, TokenTerms
from tiercel.errors import RecipeError, TrainingError
from tiercel.user_functions import CannotLoad, functions_of, load_module

if TYPE_CHECKING:
    from torch import Tensor


LOSS_KEY, ADVANTAGE_KEY = "algorithm.loss.call", "algorithm.advantage.call"
_ALLOCATOR = "DefaultCPUAllocator"  # it has no exception class of its own
SUM_PREFIX = "loss/"  # of the metrics that a user's own loss adds


class OwnFunction:
    """A user's own function, with the key that names it."""

    def __init__(self, key: str, call: str):
        """Load what `call` names. Raises RecipeError if there is no such function."""
        self.key, self.call = key, call
        self._was_checked = False
        try:
            self._function = _loaded(call)
        except CannotLoad as error:
            raise RecipeError([f"{key}: {error}"]) from error

    def ask(self, *given: Any) -> Any:
        """Call the function. Raises TrainingError if it fails, with the place in the user's file."""
        try:
            return self._function(*given)
        except Exception as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _ALLOCATOR in str(error):
                raise  # the run itself says what to do if memory runs out
            place = _place(error, self._function)
            raise self.fault(f"raised {type(error).__name__}: {error}\n  at {place}") from error

    def require(self, values: Any, like: Tensor, meaning: str) -> None:
        """Raise TrainingError if a returned value is not a tensor with the shape, dtype and device of `like`."""
        if not hasattr(values, "dtype") or not hasattr(values, "requires_grad"):
            raise self.fault(f"returned a {type(values).__name__}, not a tensor: {meaning}")
        for name in ("shape", "dtype", "device"):
            given, wanted = getattr(values, name), getattr(like, name)
            if given != wanted:
                raise self.fault(f"returned a tensor of {name} {_shown(given)}, not {_shown(wanted)}: {meaning}")

    def require_finite_at_first(self, values: Tensor, *inputs: Tensor) -> None:
        """Raise TrainingError if the first values are not finite although the inputs are. Later ones are detected by
        the run itself, as with every loss: it names the row and may skip the update."""
        if not self._was_checked and not _is_finite(values) and all(_is_finite(each) for each in inputs):
            raise self.fault(f"returned values that are not finite, such as {_first_non_finite(values)}")
        self._was_checked = True

    def fault(self, text: str) -> TrainingError:
        """Build the error that names the key, the function and the remedy."""
        where = f"{self.key}: {self.call}"
        if "\n" in text:
            return TrainingError(f"{where} {text}\ncorrect the function and run the same command again")
        return TrainingError(f"{where} {text}; correct the function and run the same command again")


@cache
def own_function(key: str, call: str) -> OwnFunction:
    """Load a function once per process. Raises RecipeError if there is no such function."""
    return OwnFunction(key, call)


def forget_own_functions() -> None:
    """Forget what was loaded, so that the next run of this process reads edited files again."""
    own_function.cache_clear()
    _module.cache_clear()


def own_terms(call: str, batch: LossInput) -> TokenTerms:
    """Call a user's own loss. Raises TrainingError if it fails or returns anything other than values (N,)."""
    if not len(batch.logprobs_N):
        return TokenTerms(values_N=batch.logprobs_N)  # nothing to learn; the graph is kept for the backward pass
    function = own_function(LOSS_KEY, call)
    answer = function.ask(batch)
    terms = answer if isinstance(answer, TokenTerms) else TokenTerms(values_N=answer)
    function.require(terms.values_N, batch.logprobs_N, "a value for each scored token (N,)")
    if batch.logprobs_N.requires_grad and not terms.values_N.requires_grad:
        raise function.fault("returned values without gradient; compute them from batch.logprobs_N, not detached")
    function.require_finite_at_first(terms.values_N, batch.logprobs_N, batch.old_logprobs_N, batch.advantages_C)
    if not isinstance(terms.token_sums, Mapping):
        raise function.fault(f"returned token_sums as a {type(terms.token_sums).__name__}, but it must be a dict")
    for name, value in terms.token_sums.items():
        if not name.startswith(SUM_PREFIX) or not hasattr(value, "detach") or value.shape != ():
            raise function.fault(
                f"returned token_sums with {name!r}, but its names must begin with {SUM_PREFIX}, and its values must "
                "be tensors of one number, the sum over the microbatch's tokens"
            )
    return TokenTerms(
        values_N=terms.values_N, token_sums={name: value.detach() for name, value in terms.token_sums.items()}
    )


def own_advantages(call: str, table: RewardTable, options: Options) -> Tensor:
    """Call a user's own advantage. Raises TrainingError if it fails or returns anything other than finite values
    (C,)."""
    if not len(table.totals_C):
        return table.totals_C
    function = own_function(ADVANTAGE_KEY, call)
    given = replace(table, totals_C=table.totals_C.clone())  # a copy, because the function may change it
    values_C = function.ask(given, options)
    function.require(values_C, table.totals_C, "a value for each completion of the step (C,)")
    if not _is_finite(values_C):
        raise function.fault(f"returned values that are not finite, such as {_first_non_finite(values_C)}")
    return values_C.detach()


@cache
def _module(source: str) -> ModuleType:
    # Loaded once, so that a loss and an advantage from one file share the module.
    return load_module(source, "tiercel_own", is_own_process=False)


def _loaded(call: str) -> Any:
    source, _, name = call.rpartition(":")
    try:
        module = _module(source)
    except CannotLoad:
        raise
    except (Exception, SystemExit) as error:
        raise CannotLoad(
            f"{source} cannot be imported for its function {name}: {type(error).__name__}: {error}\n  {_place(error)}"
        ) from error
    function = getattr(module, name, None)
    if inspect.isclass(function):
        raise CannotLoad(f"{source}: {name} is a class, but must be a function")
    if not callable(function):
        there = ", ".join(functions_of(module)) or "none"
        raise CannotLoad(f"{source} has no function {name}; its functions are: {there}")
    return function


def _place(error: BaseException, function: Any = None) -> str:
    """Return file, line and text of the failure: the last frame in the function's own file, or else the last frame of
    all."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    frame = next((each for each in reversed(frames) if each.filename == own_file), frames[-1])
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _first_non_finite(values: Tensor) -> float:
    return float(values.detach()[~values.isfinite()][0])


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
