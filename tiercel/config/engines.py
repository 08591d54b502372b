"""What each engine of `rollout.engine` is. All that treats engines differently asks here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EngineName = Literal["local", "vllm", "vllm-server"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """One engine. One that does not share the trainer's weights gets each version of the policy: its adapter, or all
    weights in full fine-tuning."""

    name: EngineName
    title: str  # what samples, as messages name it
    package: str | None = None  # that every rank imports, beyond tiercel's own
    shares_weights: bool = False  # it samples from the weights that are trained
    is_served: bool = False  # servers sample, on processors and memory of their own
    samples_ahead: bool = False  # it can sample the next step's prompts while the learner works
    takes_videos: bool = False
    shows_progress: bool = True  # it gives signs of life while it samples
    own_keys: tuple[str, ...] = ()  # keys of rollout that it reads and others refuse
    required_keys: Mapping[str, str] = field(default_factory=dict)  # keys of rollout that it needs, and what to write
    remedy: str  # where its logprobs are not the learner's

    @property
    def is_beside(self) -> bool:
        """Say whether it has weights, keys and values of its own in the ranks' memory, beside the trainer's."""
        return not self.shares_weights and not self.is_served


_KINDS = (
    EngineKind(
        name="local",
        title="the trained model",
        shares_weights=True,
        takes_videos=True,
        remedy="run `tiercel doctor`, or write learner.form: repeated",
    ),
    EngineKind(
        name="vllm",
        title="vLLM",
        package="vllm",
        shows_progress=False,
        own_keys=("vllm",),
        remedy="update vLLM, or write rollout.engine: local",
    ),
    EngineKind(
        name="vllm-server",
        title="vLLM",
        is_served=True,
        samples_ahead=True,
        own_keys=("urls", "vllm"),
        required_keys={"urls": "write the servers' addresses, such as [http://127.0.0.1:8000]"},
        remedy="start the servers again with the recipe's model and without other adapters",
    ),
)
ENGINE_KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in _KINDS}
# Families of which vLLM was seen to apply adapters on vision tower and projector exactly (docs/vllm.md).
VISION_ADAPTERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Families that vLLM was seen not to compute as the trainer does, and why.
NOT_SERVED: Mapping[str, str] = {
    "llava_onevision": "whose picture on one tile vLLM would make of the one on the canvas, not of the row's",
    "ovis2": "whose processor in transformers cannot count a picture's tokens, which vLLM asks it for",
}
