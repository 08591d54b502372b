"""Describe each engine of `rollout.engine`. All code that treats engines differently asks here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EngineName = Literal["local", "vllm", "vllm-server"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """One engine. An engine that does not share the trainer's weights receives each version of the policy: its adapter,
    or all weights in full fine-tuning."""

    name: EngineName
    title: str  # what samples, as it is called in messages
    package: str | None = None  # a package that every rank imports, in addition to tiercel's own
    shares_weights: bool = False  # it samples from the weights that are being trained
    is_served: bool = False  # servers sample, on their own processors and memory
    samples_ahead: bool = False  # it can sample the next step's prompts while the learner works
    shows_progress: bool = True  # it shows that it is alive while it samples
    own_keys: tuple[str, ...] = ()  # keys of rollout that it reads and other engines refuse
    required_keys: Mapping[str, str] = field(default_factory=dict)  # keys of rollout that it needs, and what to write
    remedy: str  # what to do if its logprobs are not the learner's

    @property
    def is_beside(self) -> bool:
        """Return whether its own weights, keys and values are in the ranks' memory, beside the trainer's."""
        return not self.shares_weights and not self.is_served


_KINDS = (
    EngineKind(
        name="local",
        title="the trained model",
        shares_weights=True,
        remedy="run `tiercel doctor`, or set learner.form: repeated",
    ),
    EngineKind(
        name="vllm",
        title="vLLM",
        package="vllm",
        shows_progress=False,
        own_keys=("vllm",),
        remedy="update vLLM, or set rollout.engine: local",
    ),
    EngineKind(
        name="vllm-server",
        title="vLLM",
        is_served=True,
        samples_ahead=True,
        own_keys=("urls", "vllm"),
        required_keys={"urls": "list the servers' addresses, such as [http://127.0.0.1:8000]"},
        remedy="start the servers again with the recipe's model and without other adapters",
    ),
)
ENGINE_KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in _KINDS}
# Families for which vLLM was found to apply adapters on vision tower and projector exactly (docs/vllm.md).
VISION_ADAPTERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Families that vLLM was found not to compute as the trainer does, and the reason.
NOT_SERVED: Mapping[str, str] = {
    "llava_onevision": (
        "for which vLLM would make the picture on one tile from the one on the canvas, not from the row's"
    ),
    "ovis2": "whose processor in transformers cannot count a picture's tokens, which vLLM needs",
}
