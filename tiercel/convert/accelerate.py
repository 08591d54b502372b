"""Read the settings of accelerate: the number of processes, and how they shard the model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.config.yaml_text import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How ranks shard a model: by ZeRO's stage (0 shards nothing) or by FSDP, and what is offloaded to the CPU."""

    stage: int | None = None
    is_fsdp: bool = False
    offload_parameters: bool = False
    offload_optimizer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerate:
    """The content of accelerate's config file."""

    processes: int | None
    sharding: Sharding
    precision: str | None  # bf16, fp16, no


def mapping_in(file: Path | None, read: Callable[[str], Any] = lambda text: parse(text)[0]) -> dict[Any, Any] | None:
    """Read a file that contains a mapping, as YAML unless `read` is given; None if there is no such file or no mapping
    in it."""
    try:
        tree = None if file is None else read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def accelerate_of(file: Path) -> Accelerate | None:
    """Read accelerate's config file; None if the file is not one."""
    tree = mapping_in(file)
    if tree is None:
        return None
    zero, processes, precision = (tree.get(name) for name in ("deepspeed_config", "num_processes", "mixed_precision"))
    is_fsdp = "FSDP" in str(tree.get("distributed_type"))
    return Accelerate(
        processes=processes if isinstance(processes, int) else None,
        sharding=_zero(zero) if isinstance(zero, dict) else Sharding(is_fsdp=is_fsdp),
        precision=str(precision) if precision is not None else None,
    )


def _zero(zero: dict[str, Any]) -> Sharding:
    stage = zero.get("zero_stage")
    return Sharding(
        stage=stage if isinstance(stage, int) else None,
        offload_parameters=zero.get("offload_param_device") in ("cpu", "nvme"),
        offload_optimizer=zero.get("offload_optimizer_device") in ("cpu", "nvme"),
    )


def sharding_of_json(tree: object) -> Sharding | None:
    """Read a DeepSpeed config; None if it has no stage."""
    zero = tree.get("zero_optimization") if isinstance(tree, dict) else None
    if not isinstance(zero, dict) or not isinstance(zero.get("stage"), int):
        return None
    devices = {f"{name}_device": part.get("device") for name, part in zero.items() if isinstance(part, dict)}
    return _zero({**devices, "zero_stage": zero["stage"]})


def sharding_by_name(name: str) -> Sharding | None:
    """Guess the sharding from names such as zero3_offload, deepspeed_zero2.yaml or ds_z3_config.json, as the peers use
    them."""
    if "fsdp" in name:
        return Sharding(is_fsdp=True)
    found = re.search(r"(?:zero|stage|ds_z)[_-]?([0-3])", name)
    if found is None:
        return None
    stage, is_offloaded = int(found[1]), "offload" in name
    return Sharding(stage=stage, offload_parameters=is_offloaded and stage == 3, offload_optimizer=is_offloaded)
