"""Check before a run that versions, recipe, data and model files are the same on all ranks."""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tiercel.algorithms.section import own_calls
from tiercel.algorithms.teacher import Teacher
from tiercel.config import flatten
from tiercel.config.row_sources import names_in, row_source
from tiercel.config.schema import BaseRecipe, GrpoRecipe, Recipe
from tiercel.config_base import shown
from tiercel.data.readers import files_of
from tiercel.data.reading import heldout_source, sources_of
from tiercel.data.remote import parts_of
from tiercel.devices import driver_version
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.versions import fingerprint, installed_versions
from tiercel.errors import EXIT_USER, ElsewhereError, EnvironmentProblem
from tiercel.models.weights.hub import resolve
from tiercel.reliability.redaction import redact
from tiercel.rewards.external import ByModel, RewardModel
from tiercel.user_functions import call_file


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Holds what must be equal on all ranks, by names for messages. `node` is the machine. `hashes` has hashes of whole
    values, because `values` has them shortened and without secrets. Hashes are compared but never shown."""

    node: str
    values: Mapping[str, str]
    hashes: Mapping[str, str] = field(default_factory=dict)


def require_same_recipe(recipe: Recipe, ranks: Ranks) -> None:
    """Compare programs and recipes, before any file is downloaded or read. Raises EnvironmentProblem if they differ,
    with the names, the ranks and their values."""
    own = recipe_facts(recipe)
    own = replace(own, values={**program(), **own.values})
    _require_equal(ranks.all_gather(own, anywhere=True))  # if programs differ, the places in the code differ too


def require_same_files(recipe: Recipe, ranks: Ranks) -> None:
    """Compare devices, data and model files. Raises EnvironmentProblem as `require_same_recipe` does."""
    _require_equal(
        ranks.all_gather(RankFacts(node=_node(), values=ranks.run_on_all(lambda: facts(recipe, ranks.heartbeat.beat))))
    )


def _node() -> str:
    return f"node {os.environ.get('GROUP_RANK', '0')}, {platform.node()}"


def _require_equal(every: Sequence[RankFacts]) -> None:
    """Raise on all ranks if facts differ. The first rank of every machine has the message, because a machine may show
    only the output of its own ranks."""
    lines = differences(every)
    if lines and os.environ.get("LOCAL_RANK", "0") == "0":
        raise EnvironmentProblem("\n  ".join(["the ranks differ; make them equal and start again", *lines]))
    if lines:
        raise ElsewhereError(0, EXIT_USER)


def differences(facts_of_ranks: Sequence[RankFacts]) -> list[str]:
    """Return a line for each fact that differs. `facts_of_ranks` is in the order of the ranks."""
    nodes = [each.node for each in facts_of_ranks]
    lines = []
    for name in sorted({name for each in facts_of_ranks for name in each.values}):
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, each in enumerate(facts_of_ranks):
            ranks_of.setdefault((each.values.get(name, "none"), each.hashes.get(name, "")), []).append(rank)
        if len(ranks_of) > 1:
            parts = [f"{value} on {_ranks(ranks, nodes)}" for (value, _), ranks in ranks_of.items()]
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def program() -> dict[str, str]:
    """Return versions of packages and a hash of tiercel's own files, which may differ even if the version is the
    same."""
    package = Path(__file__).parents[1]
    own = fingerprint(sorted(package.rglob("*.py")))
    return {"python": platform.python_version(), **installed_versions(), "tiercel's files": own}


def recipe_facts(recipe: Recipe) -> RankFacts:
    """Return every key of the recipe, with its value without secrets."""
    values = flatten(recipe)
    hashes = {key: hashlib.sha256(str(value).encode()).hexdigest() for key, value in values.items()}
    return RankFacts(node=_node(), values={key: redact(shown(value)) for key, value in values.items()}, hashes=hashes)


def facts(recipe: Recipe, beat: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Return the devices, and hashes of data and model files, by names for messages."""
    found: dict[str, str] = {}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = str(driver_version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for key, (given, _) in {**sources_of(recipe.data), **heldout_source(recipe.data)}.items():
        parts = [part for each in names_in(given) for part in parts_of(row_source(each), recipe.data, beat)]
        found[key] = fingerprint([file for part in parts for file in files_of(part)])
    named = {"data.template": recipe.data.template, "train.deepspeed.config": recipe.train.deepspeed.config}
    if isinstance(recipe, GrpoRecipe):
        named |= {key: call_file(call) for key, call in own_calls(recipe.algorithm).items()}
    read = {"model files": _checkpoint_files(resolve(recipe.model))}
    if recipe.lora is not None and recipe.lora.init is not None:
        read["lora.init"] = _checkpoint_files(Path(recipe.lora.init))
    for key, model in models_beside(recipe).items():
        files = _checkpoint_files(resolve(model))
        is_served = isinstance(model, Teacher) and model.url is not None  # then no rank reads its weights
        read[f"{key}.path"] = [file for file in files if not is_served or file.suffix != ".safetensors"]
        if model.adapter is not None:
            read[f"{key}.adapter"] = _checkpoint_files(Path(model.adapter))
        named[f"{key}.template"] = model.template
    read |= {key: [Path(file)] for key, file in named.items() if file is not None}
    return found | {key: fingerprint(files) for key, files in read.items()}


def models_beside(recipe: BaseRecipe) -> dict[str, Teacher | RewardModel]:
    """Return the teacher and the reward models, by their keys."""
    rewards = recipe.rewards if isinstance(recipe, GrpoRecipe) else ()
    teacher = {} if recipe.taught_by is None else {recipe.teacher_key: recipe.taught_by}
    scorers = {f"rewards.{n}.model": reward.model for n, reward in enumerate(rewards) if isinstance(reward, ByModel)}
    return {**teacher, **scorers}


def _checkpoint_files(directory: Path) -> list[Path]:
    suffixes = ("json", "safetensors", "jinja", "txt")
    return sorted(path for suffix in suffixes for path in directory.glob(f"*.{suffix}"))


def _ranks(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Return the ranks in words, with their machines if there are several. `nodes` has the machine of each rank."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    where = list(dict.fromkeys(nodes[rank] for rank in ranks)) if len(set(nodes)) > 1 else []
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" ({'; '.join(where)})" if where else "")
