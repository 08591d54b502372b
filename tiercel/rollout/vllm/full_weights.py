"""Full fine-tuning with vLLM: the policy's weights by their names in the checkpoint, loaded into a running engine.

Adapters take another path: training/grpo/policy_sync.py publishes them, and colocated.py or server.py loads them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tiercel.distributed.strategies.replicated import saved_tensors
from tiercel.errors import EnvironmentProblem
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.experts import mixtures
from tiercel.models.weights.checkpoint_files import INDEX, read_json

WEIGHTS = "model.safetensors"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointForm:
    """The names under which a checkpoint has the tensors of the model."""

    names: Mapping[str, str]

    @classmethod
    def of(cls, family: Family, model: HuggingFaceModel) -> "CheckpointForm":
        """Find the names. Raises EnvironmentProblem if they are not the names in the recipe's checkpoint, which the
        engine has read, or if shapes differ."""
        if mixtures(model):
            raise EnvironmentProblem(
                f"rollout.engine: vLLM needs lora here, because {family.name} has experts, whose weights a "
                "checkpoint holds in another form; add the section lora, or set rollout.engine: local"
            )
        names = saved_names(family, model)
        tensors = saved_tensors(model)
        given = {names[name]: tuple(_whole_shape(tensors[name])) for name in tensors if name in names}
        require_same(given, checkpoint_shapes(Path(family.checkpoint.path)), _left_out(model))
        return cls(names=names)

    def weights(self, model: HuggingFaceModel) -> Iterator[tuple[str, Tensor]]:
        """Yield one tensor after another, without a copy, by its name in the checkpoint."""
        for name, tensor in saved_tensors(model).items():
            yield self.names[name], tensor.detach()


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Read one tensor after another from a model directory."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def saved_names(family: Family, model: HuggingFaceModel) -> dict[str, str]:
    """Return the name that each tensor is saved under, by its name in the model. To find it, a number is saved in each
    tensor's place."""
    tensors = saved_tensors(model)
    shapes = {name: _whole_shape(tensor) for name, tensor in tensors.items()}
    numbers = {name: torch.full((1,) * len(shape), place) for place, (name, shape) in enumerate(shapes.items())}
    with TemporaryDirectory() as directory:
        family.save(model, Path(directory), numbers)
        saved = load_file(Path(directory) / WEIGHTS)
    own = list(tensors)
    return {own[int(number.flatten()[0])]: name for name, number in saved.items()}


def _whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor, which DeepSpeed erases in a parameter that it has partitioned."""
    return getattr(tensor, "ds_shape", tensor.shape)


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a checkpoint's tensors from the headers of its files."""
    index = read_json(directory / INDEX)["weight_map"] if (directory / INDEX).is_file() else {"": WEIGHTS}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(index.values())):
        with safe_open(directory / file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def require_same(given: Shapes, wanted: Shapes, left_out: str) -> None:
    """Raise EnvironmentProblem for the first name or shape that differs. `left_out` is a regular expression of names
    that a model of the checkpoint need not have."""
    missing = sorted(name for name in set(wanted) - set(given) if not re.search(left_out, name))
    unknown = sorted(set(given) - set(wanted))
    other = sorted(name for name in set(given) & set(wanted) if given[name] != wanted[name])
    for names, fault in (
        (missing, "is missing from the trainer's weights"),
        (unknown, "is not in the checkpoint"),
        (other, "has a different shape in the checkpoint"),
    ):
        if names:
            raise EnvironmentProblem(
                f"rollout.engine: vLLM: {names[0]} {fault}, and {len(names) - 1} more; the engine would keep old "
                "weights; save the checkpoint again with this transformers, or set rollout.engine: local"
            )


def _left_out(model: HuggingFaceModel) -> str:
    """Return a pattern of names that a checkpoint may have beyond the model's tensors: tied ones, and ones that
    transformers does not read."""
    tied = [re.escape(name) + "$" for name in getattr(model, "all_tied_weights_keys", {})]
    return "|".join([*tied, *(model._keys_to_ignore_on_load_unexpected or ())]) or "(?!)"


def reload(engine: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a `vllm.LLM`, and drop what it has computed with the old ones."""
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    engine.apply_model(_pack_head_again)
    engine.llm_engine.reset_encoder_cache()  # reload_weights empties the worker's part of it, not the scheduler's
    if not engine.reset_prefix_cache():
        raise RuntimeError("its prefix cache, computed with the old weights, cannot be emptied")


def _pack_head_again(model: nn.Module) -> None:
    """Pack the head's weights again for products on a CPU: if they are tied to the embeddings, vLLM 0.32 keeps the old
    copy."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
