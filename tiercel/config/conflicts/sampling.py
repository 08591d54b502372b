"""Check rollout.vllm.options: refuse what tiercel sets itself, and what would change the policy that is sampled
from."""

from tiercel.config.rollout import Vllm
from tiercel.config.schema import GrpoRecipe
from tiercel.sections import Keys, Problems, shown

KEY = "rollout.vllm.options"
OWN = {  # the name of vLLM's argument, and the key of the recipe that sets it
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "quantization": "model.quantize",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "seed": "train.seed",
    "mm_processor_kwargs": "model.min_pixels and model.max_pixels",
    "chat_template": "data.template",
    "max_lora_rank": "lora.rank",
    "enable_lora": "the section lora",
    "lora_target_modules": "lora.targets",
    "lora_dtype": "the section lora",
    "tokenizer_revision": "model.revision",
    "code_revision": "model.revision",
    "hf_token": "the variable HF_TOKEN",
}
FIXED = (  # tiercel relies on its own value of these
    *("logprobs_mode", "generation_config", "override_generation_config", "limit_mm_per_prompt", "max_loras"),
    *("enable_tower_connector_lora", "distributed_executor_backend", "disable_log_stats", "skip_tokenizer_init"),
    *(
        "served_model_name",
        "trust_remote_code",
        "model_impl",
        "worker_cls",
        "worker_extension_cls",
        "runner",
        "convert",
    ),
)
CHANGES_THE_POLICY = (
    *("hf_overrides", "hf_config_path", "config_format", "model_weights", "model_class_overrides", "load_format"),
    *("quantization_config", "logits_processors", "rope_scaling", "rope_theta", "disable_sliding_window"),
    *("default_mm_loras", "language_model_only", "mm_encoder_only", "mm_encoder_attn_dtype", "video_pruning_rate"),
    *("media_io_kwargs", "interleave_mm_strings", "watermark_config", "diffusion_config"),
)
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
KV_DTYPE = "kv_cache_dtype"  # keys and values of fewer bits give other logprobs than the trainer's


def vllm_options(recipe: GrpoRecipe) -> Problems:
    """Refuse options that are not yours to set, and keys that have no effect on servers."""
    vllm, engine = recipe.rollout.vllm, recipe.rollout.engine_kind
    if engine.is_served and vllm.model_copy(update={"options": {}}) != Vllm():
        yield Keys("rollout.vllm", "rollout.engine").problem(
            f"is set, but rollout.engine {engine.name} uses only its options; remove the other keys, or set "
            "rollout.engine: vllm"
        )
    for name, value in vllm.options.items():
        word = name.replace("-", "_")
        if not word.isidentifier():
            yield Keys(KEY).problem(
                f"{shown(name)} is not the name of an argument; write it as in vLLM, such as max_num_seqs"
            )
        elif word in OWN:
            yield Keys(KEY).problem(f"{name} is set by {OWN[word]}; set that key instead, and remove {name} here")
        elif word in FIXED:
            yield Keys(KEY).problem(f"{name} is set by tiercel, which relies on its value; remove it")
        elif word in CHANGES_THE_POLICY or (word == KV_DTYPE and value not in ("auto", recipe.model.dtype)):
            yield Keys(KEY).problem(
                f"{name} would make vLLM sample from a policy other than the trained one; remove it"
            )
        elif word in SPECULATION:
            yield Keys(KEY).problem(
                f"{name} would make vLLM guess tokens ahead, and the logprobs that it then reports are not always the "
                "policy's (docs/vllm.md); remove it"
            )
