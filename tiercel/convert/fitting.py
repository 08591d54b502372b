"""Replace combinations that the peer allows but tiercel does not by the nearest combination, with a note."""

import re
from collections.abc import Iterable

from tiercel.config.engines import ENGINE_KINDS, NOT_SERVED, VISION_ADAPTERS, EngineKind
from tiercel.config.loading import problems_of_tree
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.preferences import needs_reference
from tiercel.convert.tuning import tuner_of

_OF_ENGINES = (
    "rollout.engine", "rollout.vllm.", "rollout.urls", "rollout.patience", "rollout.lookahead", "algorithm.correction.",
)  # fmt: skip
_EXPERTS = re.compile(r"a\d+b")  # in the names of mixtures of experts


def fit(launch: Launch, draft: RecipeDraft) -> None:
    """Replace combinations that tiercel does not allow, each with a note."""
    for step in (_reference, _sharding, _sleep, _engine, _sampling):
        step(launch, draft)


def drop_unused(launch: Launch, draft: RecipeDraft) -> None:
    """Drop keys that nothing in this recipe reads: the peers' tables set them whatever else is given."""
    values, engine = draft.values, draft.values.get("rollout.engine", "local")
    loss = values.get("algorithm.loss")
    is_read = {
        "lora.": tuner_of(launch) != "full",
        "algorithm.gate_": loss == "sapo",
        "algorithm.gamma_": loss == "vespo",
        "algorithm.correction.": "algorithm.correction.level" in values and engine != "local",
        "rollout.vllm.": engine == "vllm",
        "rollout.patience": engine == "vllm-server",
    }
    draft.drop(*[start for start, is_there in is_read.items() if not is_there])


def _trains_whole(draft: RecipeDraft) -> bool:
    return "lora.rank" not in draft.values or draft.values.get("freeze") == []


def _trains_vision(draft: RecipeDraft) -> bool:
    targets, stays = draft.values.get("lora.targets"), draft.values.get("freeze", ["vision", "projector"])
    return targets in ("all", "vision", "projector") or not {"vision", "projector"} <= set(stays)


def _sleep(launch: Launch, draft: RecipeDraft) -> None:
    """Keep the weights of a sleeping engine if it could not read the policy's weights again."""
    refused = [each.key for each in problems_of_tree(draft.tree, launch.kind)]
    if "rollout.vllm.sleep_level" in refused:
        draft.set("rollout.vllm.sleep_level", 1, "sleep_level", remark="see above")
        text = "level 2 drops weights, which are trained whole; tiercel takes 1, which moves them to the host"
        draft.note(text, "sleep_level")


def _engine(launch: Launch, draft: RecipeDraft) -> None:
    """Fall back to the local engine if the requested one cannot sample from what is trained."""
    engine = ENGINE_KINDS[draft.values.get("rollout.engine", "local")]
    if engine.shares_weights:
        return
    if (reason := _obstacle(launch, draft, engine)) is None:
        if engine.is_served:
            draft.note(f"start a plain vLLM in place of {launch.framework}'s server: tiercel serve RECIPE", "vllm_mode")
        return
    labels = draft.drop(*_OF_ENGINES)
    draft.set("rollout.engine", "local", remark="see above")
    draft.note(f"{reason}; the local engine samples", *labels, otherwise="rollout.engine: local")


def _obstacle(launch: Launch, draft: RecipeDraft, engine: EngineKind) -> str | None:
    """Return why the engine cannot sample from what is trained; None if it can. The rules check the keys; the family is
    only known from the model's name."""
    for problem in problems_of_tree(draft.tree, launch.kind):
        if problem.touches("rollout.engine") and (problem.touches("lora") or problem.touches("freeze")):
            return problem.text.partition(", but ")[2].partition("; ")[0]
    if found := _named(draft, NOT_SERVED):
        return f"{engine.title} cannot sample for {found}, {NOT_SERVED[found]}"
    is_known = _named(draft, VISION_ADAPTERS) is not None and not _EXPERTS.search(draft.model_name)
    if "lora.rank" in draft.values and _trains_vision(draft) and not is_known:
        return f"{engine.title} applies adapters on vision layers of {', '.join(VISION_ADAPTERS)} only"
    return None


def _named(draft: RecipeDraft, families: Iterable[str]) -> str | None:
    """Return the family that the model's path or id contains."""
    name = re.sub(r"[\W_]", "", draft.model_name)
    return next((family for family in families if family.replace("_", "") in name), None)


def _reference(launch: Launch, draft: RecipeDraft) -> None:
    """Drop a moving reference if no adapter is trained: only the reference of an adapter can move."""
    if _trains_whole(draft) and "algorithm.kl.sync_every" in draft.values:
        labels = draft.drop("algorithm.kl.sync_every", "algorithm.kl.sync_mix")
        text = "tiercel moves the reference only for adapters; with whole weights it stays as at the start"
        draft.note(text, *labels)


def _sharding(launch: Launch, draft: RecipeDraft) -> None:
    """Replace ZeRO by fsdp2 if ZeRO cannot be used. Under ZeRO a rank holds parts of each weight, so it cannot keep a
    copy of the start or a moving reference, and a trained vision part would wait for all ranks at each picture."""
    if "model.quantize" in draft.values and draft.values.get("train.strategy") == "fsdp2":
        labels = draft.drop("train.strategy")
        draft.set("train.strategy", "ddp", *labels, remark="see above")
        draft.note("tiercel takes ddp: fsdp2 cannot shard quantised weights, so each rank holds all of them", *labels)
    keeps = needs_reference(draft) and (_trains_whole(draft) or "algorithm.kl.sync_every" in draft.values)
    kind = STRATEGY_KINDS.get(draft.values.get("train.strategy", "auto"))
    if kind is None or not kind.divides_adapters or not (keeps or _trains_vision(draft)):
        return
    labels = draft.drop("train.strategy", "train.deepspeed.")
    draft.set("train.strategy", "fsdp2", *labels, remark="see above")
    text = "tiercel takes fsdp2, which shards the model as ZeRO-3 does, without offloading: with ZeRO it trains no"
    draft.note(f"{text} vision part, and keeps no copy of the start as the reference", *labels)


def _sampling(launch: Launch, draft: RecipeDraft) -> None:
    """Sample from the whole distribution if a rollout is used for several updates."""
    updates = draft.updates_per_step
    if updates == 1:
        return
    for key, flag, whole in (("rollout.top_p", "top_p", 1.0), ("rollout.top_k", "top_k", 0)):
        if draft.values.get(key, whole) not in (whole, 0):
            labels = draft.drop(key)
            draft.set(key, whole, *labels, remark="whole, for several updates of a rollout")
            text = f"{flag} gives tokens probability 0: with {updates} updates of a rollout their ratio is not defined"
            draft.note(f"{text}; the recipe has {key}: {whole}", *labels, otherwise=f"{key}: {whole}")
