"""Settings of accelerate: the number of processes, and how they shard the model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.config.yaml_text import YamlProblem, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How ranks shard a model: ZeRO's stage (0 is none) or FSDP, and what is offloaded to the CPU."""

    stage: int | None = None
    is_fsdp: bool = False
    offload_parameters: bool = False
    offload_optimizer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerate:
    """The content of a file of accelerate."""

    processes: int | None
    sharding: Sharding
    precision: str | None  # bf16, fp16, no


def accelerate_of(file: Path) -> Accelerate | None:
    """Read a file of accelerate; None where it is not one."""
    try:
        tree = parse(file.read_text(encoding="utf-8"))[0]
    except (OSError, UnicodeDecodeError, YamlProblem):
        return None
    if not isinstance(tree, dict):
        return None
    zero = tree.get("deepspeed_config")
    processes, precision = tree.get("num_processes"), tree.get("mixed_precision")
    return Accelerate(
        processes=processes if isinstance(processes, int) else None,
        sharding=_zero(zero)
        if isinstance(zero, dict)
        else Sharding(is_fsdp="FSDP" in str(tree.get("distributed_type"))),
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
    """Read a DeepSpeed config; None where it has no stage."""
    zero = tree.get("zero_optimization") if isinstance(tree, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if not isinstance(zero, dict) or not isinstance(stage, int):
        return None
    return Sharding(
        stage=stage,
        offload_parameters=_is_on_cpu(zero.get("offload_param")),
        offload_optimizer=_is_on_cpu(zero.get("offload_optimizer")),
    )


def _is_on_cpu(section: object) -> bool:
    return isinstance(section, dict) and section.get("device") in ("cpu", "nvme")


def sharding_by_name(name: str) -> Sharding | None:
    """Read names such as zero3_offload, deepspeed_zero2.yaml or ds_z3_config.json, as the peers use them."""
    if "fsdp" in name:
        return Sharding(is_fsdp=True)
    found = re.search(r"(?:zero|stage|ds_z)[_-]?([0-3])", name)
    if found is None:
        return None
    stage, is_offloaded = int(found[1]), "offload" in name
    return Sharding(stage=stage, offload_parameters=is_offloaded and stage == 3, offload_optimizer=is_offloaded)
