"""Ranks agree before they work: versions, recipe, data and model files are the same on all, or the run is refused."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tiercel.config import recipe_to_yaml
from tiercel.config.row_sources import row_source
from tiercel.config.schema import GrpoRecipe, SftRecipe
from tiercel.data.readers import files_of
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.versions import installed_versions
from tiercel.errors import EXIT_USER, ElsewhereError, EnvironmentProblem
from tiercel.models.loading import resolve

SAMPLED_BYTES = 2**20  # at each end of a file too large to be read whole


def require_agreement(recipe: SftRecipe | GrpoRecipe, ranks: Ranks) -> None:
    """Raises EnvironmentProblem that names the ranks and their values where one differs."""
    if ranks.world_size == 1:
        return
    # Programs first: of different ones nothing else can be compared, the places in their code least of all.
    lines = differences(ranks.gather(program(), anywhere=True))
    lines = lines or differences(ranks.gather(ranks.together(lambda: facts(recipe))))
    if lines and ranks.is_first:
        raise EnvironmentProblem("\n  ".join(["the ranks differ; make them equal and start again", *lines]))
    if lines:
        raise ElsewhereError(0, EXIT_USER)


def differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each fact that is not equal on all ranks, whose facts stand in their order."""
    lines = []
    for name in sorted({name for each in facts_of_ranks for name in each}):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(facts_of_ranks):
            ranks_of.setdefault(each.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()]
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def program() -> dict[str, str]:
    """Versions, and tiercel's own files, which may be of any commit."""
    package = Path(__file__).parents[1]
    own = fingerprint(sorted(package.rglob("*.py")))
    return {"python": platform.python_version(), **installed_versions(), "tiercel's files": own}


def facts(recipe: SftRecipe | GrpoRecipe) -> dict[str, str]:
    """What must be equal on all ranks, by the name that an error gives it."""
    found: dict[str, str] = {}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["recipe"] = hashlib.sha256(recipe_to_yaml(recipe).encode()).hexdigest()[:16]
    rows = {
        "data.train": recipe.data.train,
        **{f"data.mix.{number}": more.path for number, more in enumerate(recipe.data.mix)},
        **({"data.eval": recipe.data.eval} if isinstance(recipe.data.eval, str) else {}),
    }
    found |= {key: fingerprint(files_of(row_source(given))) for key, given in rows.items()}
    named = {
        "lora.init": f"{recipe.lora.init}/adapter_model.safetensors" if recipe.lora and recipe.lora.init else None,
        "train.deepspeed.config": recipe.train.deepspeed.config,
    }
    found |= {key: fingerprint([Path(file)]) for key, file in named.items() if file is not None}
    directory = resolve(recipe.model)
    files = [path for suffix in ("json", "safetensors", "jinja", "txt") for path in directory.glob(f"*.{suffix}")]
    found["model files"] = fingerprint(sorted(files))
    return found


def fingerprint(files: Sequence[Path]) -> str:
    """A hash of the files' names, sizes and contents; of a large one only both ends, a safetensors file's names and
    shapes among them: whole checkpoints would take minutes."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            if size > 2 * SAMPLED_BYTES:
                file.seek(size - SAMPLED_BYTES)
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"
