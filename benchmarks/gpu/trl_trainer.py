"""TRL's trainer, timed. This needs TRL 1.16, so only trl_learner.py imports it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, Image
from peft import LoraConfig
from transformers import AutoProcessor, GenerationConfig, Qwen2_5_VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer

from benchmarks.drivers.measuring import LORA_TARGETS, QUESTION, SYSTEM, installed
from benchmarks.flops import decoder_shape, decoder_update, head_update, repeated_pairs, vision_forward
from benchmarks.gpu.learning import Place
from benchmarks.gpu.models import MODELS, ModelShape, make_config
from benchmarks.gpu.setup import Clock, Setup
from benchmarks.peers_report import rounded, spread
from benchmarks.shapes import ROWS_FROM_FIRST_SPECIAL_TOKEN, SPECIAL_TOKENS, make_tokenizer, save_images, save_processor

TOY_VOCABULARY = 3000  # its tokenizer knows a thousand pieces of words


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with clocks for its steps and the rollouts inside them."""

    def __init__(self, setup: Setup, **options: Any):
        self.rollout, self.whole = Clock(setup), Clock(setup)
        self.lengths: set[tuple[int, int]] = set()  # tokens of a prompt and of a completion
        super().__init__(**options)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        with self.rollout.running():
            batch = super()._generate_and_score_completions(inputs)
        prompts, completions = batch["prompt_mask"].sum(1).tolist(), batch["completion_mask"].sum(1).tolist()
        self.lengths |= set(zip(prompts, completions, strict=True))
        return batch

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with self.whole.running():
            return super().training_step(*arguments, **options)


def measure(place: Place, is_checkpointed: bool, setup: Setup) -> dict[str, Any]:
    """Return the median seconds of the learner over the counted steps, times the groups of a step."""
    shape, model_shape = place.shape, _model_shape(place.model)
    with TemporaryDirectory() as folder:
        trainer = _trainer(place, model_shape, is_checkpointed, setup, Path(folder))
        trainer.train()
    learning = [
        shape.groups * (whole - rollout)
        for whole, rollout in zip(trainer.whole.seconds[1:], trainer.rollout.seconds[1:], strict=True)
    ]
    ((prompt, completion),) = trainer.lengths
    config = make_config(model_shape)
    decoder = decoder_shape(config.get_text_config(), model_shape.lora_rank)
    rows = [completion] * shape.group_size
    operations = decoder_update(decoder, sum(prompt + each for each in rows), repeated_pairs(prompt, rows))
    operations += head_update(decoder, sum(rows))
    side = shape.side // config.vision_config.patch_size
    for _ in rows:
        operations += vision_forward(config.vision_config, (1, side, side))
    total = shape.groups * operations.total
    share = setup.share_of_flops(total, spread(learning)["median"])
    return {
        "model": place.model,
        **asdict(replace(shape, prompt_tokens=prompt, completion_tokens=completion)),
        "learner": "TRL, full checkpointing" if is_checkpointed else "TRL",
        "seconds": spread(learning),
        "rollout_seconds_of_a_group": spread(trainer.rollout.seconds[1:]),
        "peak_bytes": setup.peak_bytes,
        "operations": {"total": total},
        "mfu": None if share is None else rounded(share),
        "trl": installed(("trl",)),
    }


def _model_shape(name: str) -> ModelShape:
    if name != "toy":
        return MODELS[name]
    first = TOY_VOCABULARY - ROWS_FROM_FIRST_SPECIAL_TOKEN
    return replace(MODELS[name], vocabulary=TOY_VOCABULARY, first_special_token=first)


def _trainer(place: Place, model_shape: ModelShape, is_checkpointed: bool, setup: Setup, folder: Path) -> TimedTrainer:
    steps, group_size = 1 + setup.repetitions, place.shape.group_size
    tokenizer = make_tokenizer(model_shape.first_special_token + ROWS_FROM_FIRST_SPECIAL_TOKEN)
    config = make_config(model_shape)
    config.save_pretrained(folder)
    save_processor(folder, tokenizer)
    torch.manual_seed(0)
    with setup.device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=setup.dtype, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(**json.loads((folder / "generation_config.json").read_text()))
    save_images(folder / "images", place.shape.side, steps)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    rows = [{"prompt": messages, "image": str(file)} for file in sorted((folder / "images").iterdir())]
    return TimedTrainer(
        setup,
        model=model,
        reward_funcs=lambda completions, **columns: [float(i % 2) for i in range(len(completions))],
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=group_size,
            num_generations=group_size,
            gradient_accumulation_steps=1,
            max_completion_length=place.shape.completion_tokens,
            generation_kwargs={"suppress_tokens": [tokenizer.vocab[token] for token in SPECIAL_TOKENS]},
            max_steps=steps,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            gradient_checkpointing=is_checkpointed,
            shuffle_dataset=False,
            dataloader_num_workers=0,
            use_cpu=setup.device.type == "cpu",
            bf16=setup.dtype == torch.bfloat16,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows).cast_column("image", Image()),
        processing_class=AutoProcessor.from_pretrained(folder),
        peft_config=LoraConfig(
            r=model_shape.lora_rank, lora_alpha=2 * model_shape.lora_rank, target_modules=LORA_TARGETS
        ),
    )
