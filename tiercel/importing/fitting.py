"""Combinations that the peer allows and tiercel does not: the nearest combination is taken, with a note."""

from tiercel.config.engines import ENGINE_KINDS
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.importing.draft import RecipeDraft
from tiercel.importing.preferences import needs_reference

_ENGINE_LABELS = (
    "--use_vllm", "--vllm_mode", "--vllm_gpu_memory_utilization", "--vllm_tensor_parallel_size", "--sleep_level",
    "--vllm_enable_sleep_mode", "--vllm_server_base_url", "--vllm_server_host", "--vllm_server_port",
    "--vllm_server_timeout", "--async_generate",
)  # fmt: skip
_ENGINE_KEYS = ("rollout.vllm.", "rollout.urls", "rollout.patience", "rollout.lookahead", "algorithm.correction.")


def fit(draft: RecipeDraft) -> None:
    """Replace combinations that tiercel does not allow, each with a note."""
    for step in (_engine, _reference, _sharding, _sampling):
        step(draft)


def _trains_whole(draft: RecipeDraft) -> bool:
    return "lora.rank" not in draft.values or draft.values.get("freeze") == []


def _trains_vision(draft: RecipeDraft) -> bool:
    targets, stays = draft.values.get("lora.targets"), draft.values.get("freeze", ["vision", "projector"])
    return targets in ("all", "vision", "projector") or not {"vision", "projector"} <= set(stays)


def _engine(draft: RecipeDraft) -> None:
    """Fall back to the local engine where the policy is not an adapter on the language model, which vLLM needs."""
    engine = ENGINE_KINDS[draft.values.get("rollout.engine", "local")]
    if engine.shares_weights or not (_trains_whole(draft) or _trains_vision(draft)):
        if engine.is_served:
            draft.note("start a plain vLLM in place of their server: tiercel serve RECIPE", "--vllm_mode")
        return
    draft.drop(*[key for key in draft.values if key.startswith(_ENGINE_KEYS)])
    reason = f"{engine.name} takes adapters on the language model only"
    draft.set("rollout.engine", "local", "--use_vllm", remark=reason)
    draft.note(f"{reason}; here local samples", *_ENGINE_LABELS)


def _reference(draft: RecipeDraft) -> None:
    """Drop a moving reference where no adapter is trained: only the reference of an adapter can move."""
    if _trains_whole(draft) and "algorithm.kl.sync_every" in draft.values:
        draft.drop("algorithm.kl.sync_every", "algorithm.kl.sync_mix")
        labels = ("--sync_ref_model", "--ref_model_sync_steps", "--ref_model_mixup_alpha")
        draft.note("the reference moves beside an adapter only; here it stays where the run starts", *labels)


def _sharding(draft: RecipeDraft) -> None:
    """Replace ZeRO by fsdp2 where ZeRO cannot be used. Under ZeRO a rank holds parts of each weight, so it cannot keep
    a copy of the start or a moving reference, and a trained vision part would wait for all ranks at each picture."""
    keeps = needs_reference(draft) and (_trains_whole(draft) or "algorithm.kl.sync_every" in draft.values)
    kind = STRATEGY_KINDS.get(draft.values.get("train.strategy", "auto"))
    if kind is None or not kind.divides_adapters or not (keeps or _trains_vision(draft)):
        return
    labels = draft.origins["train.strategy"].labels
    draft.drop(*[key for key in draft.values if key.startswith("train.deepspeed.")])
    draft.set("train.strategy", "fsdp2", *labels, remark="see above")
    text = "here fsdp2, which shards the model as ZeRO-3 does, without offloading"
    lack = "with ZeRO tiercel trains no vision part, and keeps no copy of the start as the reference"
    draft.note(f"{text}: {lack}", *labels)


def _sampling(draft: RecipeDraft) -> None:
    """Sample from the whole distribution where a rollout is used for several updates."""
    updates = draft.updates_per_step
    if updates == 1:
        return
    for key, flag, whole in (("rollout.top_p", "--top_p", 1.0), ("rollout.top_k", "--top_k", 0)):
        if draft.values.get(key, whole) not in (whole, 0):
            draft.set(key, whole, flag, remark="whole, for several updates of a rollout")
            text = f"with {updates} updates of a rollout the ratio is not defined for tokens that a cut removes"
            draft.note(f"{text}; {key} is {whole} here", flag)
