"""Places where the host may wait for the device, and why. A place is a function of the product and the kind of wait:

read    the host reads a value
size    the size of a result depends on values
upload  a copy to the device without non_blocking: it waits for all that the device was given before
"""

LOADING = "once a run"
SAVING = "weights go to a checkpoint, or to an engine"
TRANSFORMERS = "transformers' own, once for the new pictures of a step"
FAULT = "an update that is not finite: the run ends, or leaves it out"

ALLOWED: dict[str, str] = {
    "models.weights.loading._loaded: upload": LOADING,
    "models.policy._add_adapter: upload": LOADING,
    "distributed.strategies.replicated.Replicated._on_first: read": SAVING,
    "distributed.strategies.replicated.Replicated.reduce_gradients: read": "once an update, to skip it by its norm",
    "training.optimizer_step._Sums.read: read": "once an update: whether it is finite, the engine, the metrics",
    "training.grpo.precomputed_values._threshold: read": "once a minibatch: the entropies of all ranks are ranked",
    "training.grpo.token_records._of_completions: read": "once a step: the tokens of its first prompts, recorded",
    "training.grpo.precomputed_values.kl_penalties: read": "twice a step: rewards and old logprobs are made of it",
    "training.nonfinite_guard.UpdateTrace.places_at_fault: read": FAULT,
    "training.nonfinite_guard.faulty_rows: upload": FAULT,
    "training.nonfinite_guard._of_completions: size": FAULT,
    "training.nonfinite_guard.faulty_rows: read": FAULT,
    "training.nonfinite_guard.spoilt_weight: read": FAULT,
    "models.families.ovis2.Ovis2.vision_features: upload": TRANSFORMERS,
    "models.families.gemma4.Gemma4.vision_features: read": TRANSFORMERS,
    "models.families.gemma4.Gemma4.vision_features: size": TRANSFORMERS,
    "models.families.llava_onevision.LlavaOnevision.vision_features: upload": TRANSFORMERS,
    "rollout.local.engine.LocalSampler._completions: read": "the completions of a batch, once",
    "rollout.local.turns._Turns._draw_tokens: read": "with tools or an environment, each token: which turns have ended",
    "rollout.local.engine.LocalSampler._kept: read": "every 8 tokens: rows that have ended leave the batch",
}
