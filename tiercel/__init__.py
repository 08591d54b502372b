"""tiercel: LoRA fine-tuning and GRPO of vision-language models; each image and each prompt is computed once."""

__version__ = "0.1.0"
