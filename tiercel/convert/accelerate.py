"""Settings of accelerate: the number of processes, and how they shard the model."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tiercel.convert.values import file_in, mapping_in

Sharding = dict[str, Any]  # keys of a recipe's section train
FSDP: Sharding = {"train.strategy": "fsdp2"}
STAGE = "train.deepspeed.stage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerate:
    """The content of a file of accelerate."""

    processes: int | None
    sharding: Sharding | None
    precision: str | None  # bf16, fp16, no


def accelerate_of(file: Path, folders: Sequence[Path]) -> Accelerate | None:
    """Read a configuration file of accelerate, or return None if it is not one. The DeepSpeed config that it may name
    is looked for beside it, and in `folders`."""
    tree = mapping_in(file)
    if tree is None:
        return None
    given, processes, precision = (tree.get(name) for name in ("deepspeed_config", "num_processes", "mixed_precision"))
    sharding = FSDP if "FSDP" in str(tree.get("distributed_type")) else None
    if isinstance(given, dict):
        names = ("zero_stage", "offload_param_device", "offload_optimizer_device")
        sharding = zero(*(given.get(name) for name in names))
        if isinstance(named := given.get("deepspeed_config_file"), str):  # accelerate takes no stage beside it
            config = mapping_in(file_in((file.parent, *folders), named), json.loads)
            sharding = sharding_of_json(config) or sharding_by_name(PurePath(named).name)
    return Accelerate(
        processes=processes if isinstance(processes, int) else None,
        sharding=sharding,
        precision=str(precision) if precision is not None else None,
    )


def zero(stage: object, parameters: object = None, optimizer: object = None) -> Sharding | None:
    """Return the keys for a stage of ZeRO, by where weights and moments are kept. Without a stage, return None."""
    if not isinstance(stage, int):
        return None
    if stage == 0:
        return {"train.strategy": "ddp"}
    hosts = ("cpu", "nvme")
    offloads = {"parameters": stage == 3 and parameters in hosts, "optimizer": optimizer in hosts}
    offloaded = {f"train.deepspeed.offload_{name}": True for name, is_on in offloads.items() if is_on}
    return {"train.strategy": "deepspeed", STAGE: stage, **offloaded}


def sharding_of_json(tree: object) -> Sharding | None:
    """Read a DeepSpeed config; None where it has no stage."""
    found = tree.get("zero_optimization") if isinstance(tree, dict) else None
    if not isinstance(found, dict):
        return None
    devices = {name: part.get("device") for name, part in found.items() if isinstance(part, dict)}
    return zero(found.get("stage"), devices.get("offload_param"), devices.get("offload_optimizer"))


def sharding_by_name(name: str) -> Sharding | None:
    """Read names such as zero3_offload, deepspeed_zero2.yaml or ds_z3_config.json, as the peers use them."""
    if "fsdp" in name:
        return FSDP
    found = re.search(r"(?:zero|stage|ds_z)[_-]?([0-3])", name)
    device = "cpu" if "offload" in name else None
    return None if found is None else zero(int(found[1]), device, device)
