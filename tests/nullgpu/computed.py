"""What kernels would have computed, if a run needs the numbers to continue: sampled tokens, sizes, stop strings,
metrics that are not NaN."""

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import torch

from tiercel.devices import moved
from tiercel.models.families.gemma4 import Gemma4
from tiercel.models.weights import loading
from tiercel.rollout.local.engine import LocalSampler
from tiercel.runs.directory import RunDirectory
from tiercel.training import optimizer_step
from tiercel.training.grpo import train_inference_mismatch


def stand_in() -> None:
    """Write plausible values where kernels would have written theirs. The copies from and to the device stay real."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False  # there is no null cuDNN
    completions = LocalSampler._completions

    def drawn_completions(self, sequences, seeds):
        sequences.token_ids_RL.cpu(), sequences.logprobs_RL.cpu()
        device = sequences.ended_R.device
        generator = torch.Generator().manual_seed(seeds[0])
        drawn = torch.randint(5, 60, sequences.token_ids_RL.shape, generator=generator)
        logprobs = torch.full(drawn.shape, -1.0)
        drawn_sequences = replace(sequences, token_ids_RL=moved(drawn, device), logprobs_RL=moved(logprobs, device))
        return completions(self, drawn_sequences, seeds)

    def completes_no_stop(self, token_ids_RL, stop):
        token_ids_RL[:, -8:].tolist()
        return moved(torch.zeros(len(token_ids_RL), dtype=torch.bool), token_ids_RL.device)

    def features_of_planned_size(self, model, images):
        """The tower of Gemma 4 counts its features on the device."""
        weight = next(model.model.language_model.parameters())
        width = model.config.get_text_config().hidden_size
        return [
            torch.zeros(self.feature_count(image.plan), width, device=weight.device, dtype=torch.bfloat16)
            for image in images
        ]

    optimizer_step.math = SimpleNamespace(isfinite=lambda number: True)  # of losses and norms
    record = RunDirectory.record

    def record_finite(self, row):
        is_odd = {key: isinstance(value, float) and not math.isfinite(value) for key, value in row.items()}
        record(self, {key: 0.0 if is_odd[key] else value for key, value in row.items()})

    loading.require_finite = lambda *given: None  # weights that were quantised on the card
    train_inference_mismatch.gap_problem = lambda *given: None  # the gaps are what was in the card's memory
    RunDirectory.record = record_finite
    LocalSampler._completions = drawn_completions
    LocalSampler._completes_a_stop = completes_no_stop
    Gemma4.vision_features = features_of_planned_size
