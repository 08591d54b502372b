"""Vision features, each picture once: kept for the step, and across steps within a byte budget."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tiercel.models.policy import Policy
from tiercel.types import EncodedImage


class VisionStore:
    """Features of pictures by content hash, shared by sampler, learner and reference.

    A frozen tower sees each picture once: a step's new pictures in one pass, or, where features are kept across
    steps, each in a pass of its own, so that rounding does not depend on what the store held before. A trained tower
    sees each picture once more in an update, with gradient; of one that several microbatches show, their gradients
    are gathered and go through the tower at the end, by `backward`.
    """

    def __init__(self, policy: Policy, cache_bytes: int):
        self.policy = policy
        self.cache_bytes = cache_bytes
        self.is_frozen = policy.vision_is_frozen
        self.pictures_computed = 0
        self._features: OrderedDict[tuple[str, bool], Tensor] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()  # microbatches of the update that show a picture
        self._gathering: dict[str, tuple[Tensor, Tensor]] = {}  # the tower's output, and the leaf in its place

    def features(
        self, images: Sequence[EncodedImage], *, with_gradient: bool = False, of_reference: bool = False
    ) -> Tensor | None:
        """Features (K, H) of all images in order, or None without images. Inside `Policy.as_reference` ask with
        `of_reference`: a trained tower's features are not the reference's."""
        if not images:
            return None
        if with_gradient and not self.is_frozen:
            return self._features_with_gradient(images)
        is_apart = of_reference and not self.is_frozen
        keys = [(image.sha256, is_apart) for image in images]
        fresh = {key: image for key, image in zip(keys, images, strict=True) if key not in self._features}
        self.pictures_computed += len(fresh)
        passes = [[key] for key in fresh] if self.cache_bytes else [list(fresh)]
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
        self.pictures_computed += len(fresh)
        found = dict(zip(fresh, computed, strict=True))
        if any(self._uses[key] > 1 for key in fresh):  # pictures of one pass share its graph, and so their way back
            self._gathering |= {key: (output, output.detach().requires_grad_()) for key, output in found.items()}
        found |= {key: leaf_KH for key, (_, leaf_KH) in self._gathering.items()}
        return torch.cat([found[image.sha256] for image in images])

    @contextmanager
    def update(self, images_of_microbatches: Sequence[Sequence[EncodedImage]]) -> Iterator[None]:
        """One optimiser update, whose microbatches will show these pictures."""
        self._uses = Counter(key for images in images_of_microbatches for key in {image.sha256 for image in images})
        try:
            yield
        finally:
            self._uses.clear()
            self._gathering.clear()

    def backward(self) -> None:
        """Carry the gradients gathered over the update's microbatches through a trained tower."""
        pairs = [(output, leaf.grad) for output, leaf in self._gathering.values() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def held(self, images: Sequence[EncodedImage]) -> dict[str, Tensor]:
        """Features that are there already, by content hash, for another rank to adopt; none of a trained tower, which
        is asked again at each update in any case."""
        keys = {image.sha256 for image in images} if self.is_frozen else set()
        return {key: self._features[key, False].cpu() for key in sorted(keys) if (key, False) in self._features}

    def adopt(self, features: Mapping[str, Tensor]) -> None:
        """Take over features that another rank computed."""
        for key, value_KH in features.items():
            self._features.setdefault((key, False), value_KH.to(self.policy.device))

    def end_step(self) -> None:
        """Drop what does not fit the budget; everything, once a trained tower has moved."""
        if not self.is_frozen:
            self._features.clear()
        held = sum(value.nbytes for value in self._features.values())
        while self._features and held > self.cache_bytes:
            _, value = self._features.popitem(last=False)
            held -= value.nbytes
