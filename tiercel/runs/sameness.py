"""Whether a recipe goes on with the run of another: which keys may have changed, and which change only how sums round.

Here are all keys that change no result, besides those that say how long a run is, when it saves, and when it gives up.
"""

from collections.abc import Iterator, Mapping
from os.path import dirname, isdir, realpath
from typing import Any

from tiercel.config import Recipe, flatten
from tiercel.config.keys import declared_name
from tiercel.config.path_rules import PATH_CHECKS
from tiercel.config.schema import Learner, Reliability
from tiercel.reliability.redaction import redact_values

_FREE_IN = {
    "model": ("vision_cache_bytes", "reference"),
    "data": ("workers", "image_roots", "max_bad_fraction"),
    "train": ("steps", "epochs", "save_every", "eval_every", "log_every", "keep", "keep_best", "profile"),
    "train.profile": ("steps",),
    "rollout": ("urls", "request_timeout", "patience", "parity_tolerance", "parity_action", "record_tokens"),
    "rollout.vllm": ("gpu_memory_utilization", "sleep_level"),
    "rewards.N.judge": ("url", "key", "concurrency", "timeout", "retries"),
    "reliability": tuple(Reliability.model_fields),
}
_ROUNDED_IN = {
    "learner": tuple(Learner.model_fields),
    "dpo": ("precompute_reference",),
    "train": ("strategy", "shard_size", "context_parallel", "deterministic", "threads"),
    "train.deepspeed": ("stage", "offload_parameters", "offload_optimizer", "config"),
    "rollout": ("prepacked_bytes",),
    "rollout.vllm": ("tensor_parallel",),
    "rewards.N.model": ("device", "batch_tokens"),
}


def _keys(by_section: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    return (f"{section}.{key}" for section, keys in by_section.items() for key in keys)


ROUNDED = tuple(_keys(_ROUNDED_IN))  # the same result, but for sums that are taken in another order
MAY_DIFFER = (*_keys(_FREE_IN), *ROUNDED, "teacher.url", "algorithm.teacher.url", "trackers", "output")


def changes(before: Recipe, now: Recipe) -> dict[str, str]:
    """Return the keys with other values, each with both in words; a path that is written otherwise is the same."""
    old, new = redact_values(flatten(before)), redact_values(flatten(now))  # config.yaml was written without secrets
    return {
        key: f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_one_place(key, old, new)
    }


def may_differ(key: str) -> bool:
    """Tell whether a run goes on under another value of this key."""
    return declared_name(key) in MAY_DIFFER


def is_rounded(key: str) -> bool:
    """Tell whether another value of this key only takes sums in another order."""
    return declared_name(key) in ROUNDED


def _is_one_place(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if declared_name(key) not in PATH_CHECKS:
        return False
    places = [_place(key, each) for each in (old, new)]
    return None not in places and places[0] == places[1]


def _place(key: str, values: Mapping[str, Any]) -> str | None:
    """Return the real path that a key names; without `image_root`, images lie beside their rows."""
    given = values.get(key)
    if given is None and key == "data.image_root":
        rows = values["data.train"]
        given = rows if isdir(rows) else dirname(rows)
    return realpath(given) if isinstance(given, str) else None
