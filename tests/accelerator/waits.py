"""Places where the host may wait for the device, and why. A place is a function of the product and the kind of wait:

read    the host reads a value
size    the size of a result depends on values
upload  a copy to the device without non_blocking: it waits for all that the device was given before
"""

ONCE = "once a run"
SAVING = "weights are written to a checkpoint or published"
DECODING = "to be tightened: the decoder is given new loops"
TOWER = "to be tightened: once for the new pictures of a step"
UPDATE = "to be tightened"

ALLOWED: dict[str, str] = {
    "models.loading._loaded: upload": ONCE,
    "models.policy._add_adapter: upload": ONCE,
    "distributed.replicated.Replicated._on_first: read": SAVING,
    "distributed.replicated.Replicated.reduce_gradients: read": "the norm decides, on all ranks, whether to step",
    "models.qwen_vl.Qwen2VL._vision_output: read": TOWER,
    "models.qwen_vl.Qwen2VL._vision_output: size": TOWER,
    "models.qwen_vl.Qwen2VL._vision_output: upload": TOWER,
    "models.internvl.InternVL.vision_features: upload": TOWER,
    "models.llava_onevision.LlavaOnevision.vision_features: upload": TOWER,
    "models.ovis2.Ovis2.vision_features: upload": TOWER,
    "models.ovis2.Ovis2._with_indicators: upload": TOWER,
    "models.family.Family.is_placeholder: upload": UPDATE,
    "rollout.decoding.BaseDecoder.padded: upload": DECODING,
    "rollout.decoding.DecodeAttention._arrange: read": DECODING,
    "rollout.decoding.DecodeAttention._arrange: size": DECODING,
    "rollout.decoding.DecodeAttention.keep: size": DECODING,
    "rollout.decoding.DecodeAttention.keep: read": DECODING,
    "rollout.decoding.SharedDecoder.prefill: size": DECODING,
    "rollout.local.LocalSampler._completions: read": "the completions of a batch, once",
    "rollout.local.LocalSampler._decode: size": DECODING,
    "rollout.local.LocalSampler._decode: upload": DECODING,
    "rollout.local.LocalSampler._draw: upload": DECODING,
    "rollout.local.LocalSampler._sample_batch: read": DECODING,
    "rollout.local.LocalSampler._sample_batch: upload": DECODING,
    "algorithms.completions.lengths: size": UPDATE,
    "algorithms.correction._count: read": UPDATE,
    "algorithms.correction.drift_sums: upload": UPDATE,
    "backward: size": UPDATE,
    "learner.layout.PrefixLayout.dense_mask: upload": UPDATE,
    "learner.learner.Learner._decoded: size": UPDATE,
    "learner.learner.Learner._decoded: upload": UPDATE,
    "learner.learner.Learner._embedded: upload": UPDATE,
    "learner.learner.Learner.forward: upload": UPDATE,
    "training.passes._by_group.<locals>.<genexpr>: read": UPDATE,
    "training.passes._threshold.<locals>.<listcomp>: read": UPDATE,
    "training.passes._threshold.<locals>.<listcomp>: size": UPDATE,
    "training.passes._threshold.<locals>.<listcomp>: upload": UPDATE,
    "training.passes.kl_penalties: read": UPDATE,
    "training.passes.kl_penalties: upload": UPDATE,
    "training.update._add: read": UPDATE,
    "training.update._apply: read": UPDATE,
    "training.update._policy_contribution: upload": UPDATE,
    "training.update.engine_match: size": UPDATE,
}
