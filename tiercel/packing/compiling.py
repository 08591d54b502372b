"""Compiled decoder layers: the norms, the MLP and what surrounds the attention become a few fused kernels.

All layers, and rows of all lengths, use the same graphs. The form of attention stays outside them. The learner runs
compiled, and on a GPU the sampler does with the prompts; otherwise the sampler runs the layers as they are. Shape
suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.fx.experimental import _config

from tiercel.config.conflicts.compiling import compile_obstacle
from tiercel.config.schema import BaseRecipe
from tiercel.config.strategies import StrategyKind
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.models.layers.experts import is_mixture
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.reliability.card_faults import plain_reason

LAYER_GRAPHS = 4  # for a model with a gradient, and as many without: norm, before and after the attention, MLP
GRAPH_LIMIT = 32  # for a function in one process: a few models, dtypes and adapters
ATTENTION = "self_attn"  # the part of a layer that calls the form
TOWER_ATTENTION = "attn"  # the part of a tower's block that reads the lengths of spans, on the CPU
_TOO_MANY = (
    "learner.compile: a decoder layer would need more than {limit} graphs in this process, and would go on uncompiled; "
    "write learner.compile: false, and report the recipe, please"
)
_shapes: Any = _config


def default_backend(device: torch.device) -> str:
    """Return the compiler for a device. On a CPU, graphs are traced as on a GPU but run operation by operation."""
    return "aot_eager" if device.type == "cpu" else "inductor"


def chosen_backend(
    recipe: BaseRecipe, strategy: StrategyKind, form: str, device: torch.device
) -> tuple[str | None, str]:
    """Choose the compiler of the decoder's layers by `learner.compile`, or None if they are not compiled, and say what
    `auto` means on a GPU; an empty text elsewhere. `form` comes from pass_options.chosen_form."""
    asked = recipe.learner.compile
    if asked != "auto":
        return default_backend(device) if asked else None, ""
    if device.type != "cuda":
        return None, ""
    obstacle = compile_obstacle(recipe, strategy)
    if form != "flex" or obstacle:
        return None, f"learner.compile: false, with {obstacle.given if obstacle else f'learner.form {form}'}"
    reason = "learner.compile: true; the first passes take longer, because layers are compiled then"
    return default_backend(device), reason


def require_compilable(recipe: BaseRecipe, strategy: StrategyKind) -> None:
    """Raise EnvironmentProblem if `learner.compile: true` is incompatible with the strategy that the run chose."""
    if recipe.learner.compile is True and (obstacle := compile_obstacle(recipe, strategy)):
        raise EnvironmentProblem(f"learner.compile: true does not work with {obstacle}")


@contextmanager
def few_graphs(limit: int, message: str) -> Iterator[None]:
    """Compile at most `limit` graphs of a function inside. Raises TrainingError with `message` instead of compiling one
    more, because PyTorch would silently go on uncompiled."""
    try:
        # With duck shapes, PyTorch would recompile when two sizes that happened to be equal, say of blocks and of
        # heads, are no longer equal.
        with (
            torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True),
            _shapes.patch(use_duck_shape=False),
        ):
            yield
    except FailOnRecompileLimitHit as error:
        raise TrainingError(message) from error


class CompiledFunction:
    """A function that is compiled for tensors of all sizes. If the compiler fails, a warning says so, and the function
    runs uncompiled from then on, also in later batches."""

    def __init__(self, function: Callable[..., Any], backend: Any, name: str):
        self.plain = function
        self.name = name
        self.compiled: Callable[..., Any] | None = torch.compile(
            function, dynamic=True, fullgraph=True, backend=backend
        )

    def __call__(self, *inputs: Any) -> Any:
        if self.compiled is None:
            return self.plain(*inputs)
        try:
            return self.compiled(*inputs)
        except (RuntimeError, FailOnRecompileLimitHit) as error:
            if is_out_of_memory(error):
                raise
            told = f"{self.name} continues uncompiled, which is slower: {plain_reason(error)}"
            warn(told, RuntimeWarning, stacklevel=2)
            self.compiled = None
            return self.plain(*inputs)


class CompiledLayers:
    """The compiled parts of decoder layers. They run compiled in passes inside `running`, and when they are recomputed
    in a backward pass. With `runs_always`, they run compiled in every pass."""

    def __init__(
        self,
        layers: nn.ModuleList,
        backend: str,
        limit: int = GRAPH_LIMIT,
        *,
        dynamic: bool = True,
        runs_always: bool = False,
    ):
        self.limit = limit
        self.runs_always = runs_always
        self.is_running = False
        functions: dict[type, Callable[..., Any]] = {}
        for name, part in _parts(layers):
            # A delta net is routed elsewhere; of a mixture, only the device knows the sizes of its products.
            if "forward" in vars(part) or is_mixture(part) or name == TOWER_ATTENTION:
                continue
            kind = type(part)
            if kind not in functions:
                functions[kind] = torch.compile(
                    kind.forward, dynamic=dynamic, fullgraph=name != ATTENTION, backend=backend
                )
            part.forward = _Region(layers=self, compiled=functions[kind], part=part)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the decoder compiled inside the context."""
        self.is_running = True
        try:
            with self.few_graphs():
                yield
        finally:
            self.is_running = False

    def few_graphs(self) -> Any:
        return few_graphs(self.limit, _TOO_MANY.format(limit=self.limit))


def compiled_layers(language_model: Any, backend: str | None) -> CompiledLayers | None:
    """Compile the layers of a decoder, or undo this if `backend` is None."""
    _undo(language_model.layers)
    return None if backend is None else CompiledLayers(language_model.layers, backend)


def compile_tower(tower: Any, backend: str | None) -> None:
    """Compile the norms and MLPs of a vision tower's blocks in all of its passes, or undo this if `backend` is None."""
    _undo(tower.blocks)
    if backend is not None:
        CompiledLayers(tower.blocks, backend, runs_always=True)


@contextmanager
def running_regions(language_model: Any) -> Iterator[None]:
    """Run those parts of a decoder's layers compiled inside the context that the learner compiled, if it did."""
    regions = _regions(language_model.layers)
    with regions[0][1].layers.running() if regions else nullcontext():  # all belong to the same learner
        yield


@contextmanager
def without_regions(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Give the parts of layers their own forward functions inside the context. A graph of a whole layer would otherwise
    contain the compiled parts of that layer, and serve no other."""
    regions = _regions(layers)
    for part, _ in regions:
        del part.forward
    try:
        yield
    finally:
        for part, region in regions:
            part.forward = region


def like_later_inputs(embeddings: Tensor) -> Tensor:
    """Copy the input of the first layer into a tensor like the inputs of the others: contiguous, not a view, and with a
    gradient in training. PyTorch would recompile for any other kind."""
    hidden = embeddings.clone(memory_format=torch.contiguous_format)
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """The forward function of a part of a layer."""

    layers: CompiledLayers
    compiled: Callable[..., Any]
    part: nn.Module

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.layers.is_running:
            return self.compiled(self.part, *inputs, **options)
        if not torch.is_grad_enabled() and not self.layers.runs_always:  # the sampler
            return type(self.part).forward(self.part, *inputs, **options)
        with self.layers.few_graphs():
            return self.compiled(self.part, *inputs, **options)


def _undo(layers: Iterable[nn.Module]) -> None:
    for part, _ in _regions(layers):
        del part.forward


def _regions(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, _Region]]:
    forwards = [(part, vars(part).get("forward")) for _, part in _parts(layers)]
    return [(part, forward) for part, forward in forwards if isinstance(forward, _Region)]


def _parts(layers: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for layer in layers:
        yield from layer.named_children()
