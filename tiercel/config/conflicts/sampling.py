"""Check how completions are sampled: rollout.vllm.options, of which what tiercel sets itself and what would change the
policy that is sampled from is refused, and groups that fork."""

from functools import cache
from math import prod

from tiercel.config.conflicts.table import conflict
from tiercel.config.rollout import Vllm
from tiercel.config.schema import GrpoRecipe
from tiercel.config_base import Problems, shown
from tiercel.tables import table_rows

KEY = "rollout.vllm.options"
KV_DTYPE = "kv_cache_dtype"  # keys and values of fewer bits give other logprobs than the trainer's


def vllm_options(recipe: GrpoRecipe) -> Problems:
    """Refuse options that are not yours to set, and keys that have no effect on servers."""
    vllm, engine = recipe.rollout.vllm, recipe.rollout.engine_kind
    if engine.is_served and vllm.model_copy(update={"options": {}}) != Vllm():
        yield conflict("vllm", engine.name)
    refused = _refused()
    for name, value in vllm.options.items():
        word = name.replace("-", "_")
        reason = refused.get(word)
        if not word.isidentifier():
            yield conflict("no argument of vLLM", shown(name))
        elif reason == "fixed":
            yield conflict("vLLM fixed", name)
        elif reason == "policy" or (word == KV_DTYPE and value not in ("auto", recipe.model.dtype)):
            yield conflict("vLLM policy", name)
        elif reason == "speculation":
            yield conflict("vLLM speculation", name)
        elif reason is not None:
            yield conflict("vLLM of another key", name, reason)


@cache
def _refused() -> dict[str, str]:
    """Read which arguments are refused, and why."""
    rows = table_rows("tiercel.config.conflicts", "vllm_options.txt")
    return {name: reason for names, reason in rows for name in names.split(", ")}


def branches(recipe: GrpoRecipe) -> Problems:
    rollout = recipe.rollout
    given, size, at = shown(list(rollout.branches)), prod(rollout.branches), rollout.branch_at
    if not rollout.branches:
        if at is not None:
            yield conflict("branch_at without branches", shown(at))
        return
    if len(rollout.branches) == 1:
        yield conflict("branches", given)
    if size != rollout.group_size:
        yield conflict("branches and group_size", given, size, rollout.group_size)
    if rollout.has_turns:
        if at is not None:
            yield conflict("branch_at and tools", shown(at))
        if len(rollout.branches) > rollout.max_turns:
            yield conflict(
                "branches and max_turns", given, len(rollout.branches) - 1, rollout.max_turns, len(rollout.branches)
            )
    elif not at:
        yield conflict("branches without branch_at", given)
    elif at in rollout.stop:
        yield conflict("branch_at and stop", shown(at))
    if rollout.lookahead:
        yield conflict("branches and lookahead", given, rollout.lookahead)
