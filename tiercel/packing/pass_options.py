"""Options of a pass: the form that computes it, and what it computes besides plain logprobs and entropy. Shape
suffixes: docs/shapes.md."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiercel.errors import ModelError
from tiercel.packing.divergence import Target
from tiercel.packing.tree import PrefixTree

AUTO = {"cpu": "split", "cuda": "flex"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingNoise:
    """Noise added to the embeddings of tokens (NEFTune: Jain et al. 2023), uniform within +-alpha / sqrt(L H) for a row
    of L tokens. Each row has its own generator, so that its noise depends neither on its neighbours in the pack nor on
    the rank that computes it."""

    alpha: float
    seeds: tuple[int, ...]  # one for each root of the pack, which are rows; an empty pass has none

    def of(self, tree: PrefixTree, like_TH: Tensor, width: int) -> Tensor:
        """Draw the noise (T, H) for a pack, on the device of `like_TH` and in its dtype. It is 0 beyond `width`, where
        a family keeps inputs of layers."""
        noise_TH = like_TH.new_zeros(tree.length, like_TH.shape[-1])
        for (start, stop), seed in zip(tree.roots, self.seeds, strict=bool(self.seeds)):
            generator = torch.Generator(like_TH.device).manual_seed(seed)
            even_LH = torch.rand(stop - start, width, generator=generator, device=like_TH.device)
            size = self.alpha / math.sqrt((stop - start) * width)
            noise_TH[start:stop] = pad((2 * even_LH - 1) * size, (0, like_TH.shape[-1] - width)).to(like_TH.dtype)
        return noise_TH


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOptions:
    """What a pass computes beyond logprobs and an entropy without gradient. The default options cost nothing."""

    entropy_gradient: bool = False
    target: Target | None = None  # a teacher's distribution at the scored tokens, to compute the divergence from it
    smoothing: float = 0.0  # e: logprobs become (1-e) log p + e times the mean of log p over all words
    noise: EmbeddingNoise | None = None
    squares: bool = False  # log of the sum of p² over all words, at each token

    @property
    def needs_whole_distribution(self) -> bool:
        """Return whether the gradient needs more of the distribution than the target's logprob."""
        return self.smoothing > 0 or self.entropy_gradient

    def of_tokens(self, places_M: Tensor | slice) -> "PassOptions":
        """Return the options for some of the scored tokens."""
        if self.target is None:
            return self
        return replace(self, target=replace(self.target, tokens=self.target.tokens[places_M]))


NOTHING = PassOptions()


def chosen_form(asked: str, device: torch.device, obstacle: str | None, *, in_parts: bool = False) -> str:
    """Choose the form to run. `obstacle` says why the model cannot share prompts (see `shared_prefix_obstacle`), in
    which case `auto` becomes `repeated`. `in_parts` is true if ranks compute a pack together. Raises ModelError if this
    device or model cannot compute the form."""
    if in_parts and obstacle:
        raise ModelError(f"train.context_parallel: ranks cannot compute a row together: {obstacle}; remove it")
    if asked == "auto" and in_parts:
        return "flex" if device.type == "cuda" else "dense"
    if asked == "auto":
        return "repeated" if obstacle else AUTO.get(device.type, "dense")
    if asked != "repeated" and obstacle:
        raise ModelError(
            f"learner.form: {asked} runs a prompt once, which this model cannot do: {obstacle}; use repeated"
        )
    if asked == "split" and device.type != "cpu":
        raise ModelError(f"learner.form: split runs only on a CPU, but the device is {device.type}; use flex")
    if asked == "flex" and device.type == "cpu":
        raise ModelError("learner.form: flex has no backward pass on a CPU; use split")
    return asked
