"""The bytes that a run leaves on the disk, estimated from its recipe.

Rollouts and pictures were measured by benchmarks/run_sizes.py, on English text and on pictures like photographs.
"""

from dataclasses import dataclass

from tiercel.config.schema import GrpoRecipe, Recipe
from tiercel.planning.memory import BYTES, MOMENT_BYTES
from tiercel.planning.sizes import ModelSizes

COMPLETION_BYTES = 150  # of its line in rollouts/, compressed, without its text
TEXT_TOKEN_BYTES = 1.85  # of a token's text and id
NOTED_TOKEN_BYTES = 6.8  # of a token in tokens/
MOST_NOTED = 1024  # tokens of a completion
PICTURE_BYTES = 16_000  # WebP of 448 pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The bytes of a whole run by purpose, and of each checkpoint."""

    rollouts: int  # with evaluations/ and tokens/, if every completion is as long as it may be
    pictures: int
    checkpoint: int
    checkpoints: int  # that exist at the same time, with the one that is being written

    @property
    def total(self) -> int:
        return self.rollouts + self.pictures + self.checkpoint * self.checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """The rows of a recipe that can be used, and their images."""

    rows: int
    images: int
    heldout: int = 0
    heldout_images: int = 0


def run_files(recipe: Recipe, sizes: ModelSizes, steps: int, counts: RowCounts) -> RunFiles:
    """Estimate what a run of so many steps writes."""
    train = recipe.train
    rollouts, pictures = 0.0, counts.heldout_images if recipe.purpose == "pairs" else 0
    if isinstance(recipe, GrpoRecipe):
        sampling, prompts = recipe.rollout, recipe.optim.prompts_per_step
        line = COMPLETION_BYTES + TEXT_TOKEN_BYTES * sampling.longest
        noted = NOTED_TOKEN_BYTES * min(sampling.longest, MOST_NOTED) * min(sampling.record_tokens, prompts)
        evaluations = 1 + -(-steps // (train.eval_every or steps))
        rollouts = steps * sampling.group_size * (prompts * line + noted) + evaluations * counts.heldout * line
        kept = prompts if sampling.most_pictured is None else min(sampling.most_pictured, prompts)
        shown = round(steps * kept * counts.images / max(1, counts.rows))
        pictures = min(counts.images, shown) + (counts.heldout_images if kept else 0)
    frozen = BYTES[recipe.model.dtype] * (sizes.weights - sizes.trained) if recipe.lora is None else 0
    return RunFiles(
        rollouts=round(rollouts),
        pictures=PICTURE_BYTES * pictures,
        checkpoint=round((BYTES["float32"] + MOMENT_BYTES[recipe.optim.moment_bits]) * sizes.trained) + frozen,
        checkpoints=min(-(-steps // train.save_every), train.keep + 1 + (train.keep_best is not None)),
    )
