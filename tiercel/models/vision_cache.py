"""Vision features, computed once for each image and kept for the step, and across steps within a limit of bytes."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tiercel.devices import is_reproducible, moved
from tiercel.models.policy import Policy
from tiercel.types import EncodedImage


class VisionStore:
    """The store of image features by content hash, for the sampler, the learner and the reference.

    A frozen tower computes each image once. If features are kept across steps, or the run has to be reproducible, each
    image has a pass of its own, so that rounding depends neither on the store's earlier content nor on whether a step
    was sampled or came from the journal. Otherwise all new images share a pass. A trained tower computes each image
    once more in an update, with gradient. If several microbatches show an image, their gradients are added up, and
    `backward` runs the sum through the tower at the end.
    """

    def __init__(self, policy: Policy, cache_bytes: int):
        self.policy = policy
        self.cache_bytes = cache_bytes
        self.is_frozen = policy.vision_is_frozen
        self.has_own_passes = cache_bytes > 0 or is_reproducible(policy.device)  # one for each image
        self._features: OrderedDict[tuple[str, bool], Tensor] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()  # in how many microbatches of the update an image is shown
        self._gathering: dict[str, tuple[Tensor, Tensor]] = {}  # the tower's output, and the leaf that replaces it

    def features(
        self, images: Sequence[EncodedImage], *, with_gradient: bool = False, of_reference: bool = False
    ) -> Tensor | None:
        """Return features (K, H) of all images in order, or None without images. `of_reference` must be true inside
        `Policy.as_reference`, because a trained tower's features differ from the reference's."""
        if not images:
            return None
        if with_gradient and not self.is_frozen:
            return self._features_with_gradient(images)
        is_apart = of_reference and not self.is_frozen
        keys = [(image.sha256, is_apart) for image in images]
        fresh = {key: image for key, image in zip(keys, images, strict=True) if key not in self._features}
        passes = [[key] for key in fresh] if self.has_own_passes else [list(fresh)]
        for passed in filter(None, passes):
            with torch.no_grad():
                computed = self.policy.vision_features([fresh[key] for key in passed])
            self._features.update(zip(passed, computed, strict=True))
        for key in keys:
            self._features.move_to_end(key)
        return torch.cat([self._features[key] for key in keys])

    def _features_with_gradient(self, images: Sequence[EncodedImage]) -> Tensor:
        fresh = {image.sha256: image for image in images if image.sha256 not in self._gathering}
        computed = self.policy.vision_features(list(fresh.values())) if fresh else []
        found = dict(zip(fresh, computed, strict=True))
        if any(self._uses[key] > 1 for key in fresh):  # images of one pass share its graph, so all wait for `backward`
            self._gathering |= {key: (output, output.detach().requires_grad_()) for key, output in found.items()}
        found |= {key: leaf_KH for key, (_, leaf_KH) in self._gathering.items()}
        return torch.cat([found[image.sha256] for image in images])

    @contextmanager
    def update(self, images_of_microbatches: Sequence[Sequence[EncodedImage]]) -> Iterator[None]:
        """Wrap one optimiser update whose microbatches show these images."""
        self._uses = Counter(key for images in images_of_microbatches for key in {image.sha256 for image in images})
        try:
            yield
        finally:
            self._uses.clear()
            self._gathering.clear()

    def backward(self) -> None:
        """Run the gradients of all microbatches of the update through a trained tower."""
        pairs = [(output, leaf.grad) for output, leaf in self._gathering.values() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def held(self, images: Sequence[EncodedImage]) -> dict[str, Tensor]:
        """Return the stored features of these images, by content hash, for another rank to adopt. Empty for a trained
        tower, which recomputes them in each update."""
        keys = {image.sha256 for image in images} if self.is_frozen else set()
        return {key: self._features[key, False].cpu() for key in sorted(keys) if (key, False) in self._features}

    def adopt(self, features: Mapping[str, Tensor]) -> None:
        """Store features that another rank computed."""
        for key, value_KH in features.items():
            self._features.setdefault((key, False), moved(value_KH, self.policy.device))

    def end_step(self) -> None:
        """Drop the features that exceed the limit of bytes, or all features if the tower is trained."""
        if not self.is_frozen:
            self._features.clear()
        held = sum(value.nbytes for value in self._features.values())
        while self._features and held > self.cache_bytes:
            _, value = self._features.popitem(last=False)
            held -= value.nbytes
