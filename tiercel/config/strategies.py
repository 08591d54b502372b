"""Describe each strategy of `train.strategy`. All code that treats strategies differently asks here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["single", "ddp", "fsdp2", "deepspeed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyKind:
    """One way for ranks to share the work."""

    name: StrategyName
    package: str | None = None  # a package that every rank imports, in addition to tiercel's own
    is_alone: bool = False  # there is only one rank
    shards_model: bool = False  # no rank needs to hold the whole model
    divides_adapters: bool = False  # ranks also hold parts of adapters, of their gradients and of their moments
    casts_gathered: bool = (
        False  # of full fine-tuning: to the passes' dtype, and gradients leave as soon as they are there
    )
    loads_in_turns: bool = False  # wrapping does not communicate, so ranks may read the weights one after the other
    trains_vision: bool = True
    skips_updates: bool = True  # it can discard the gradients of an update
    own_keys: tuple[str, ...] = ()  # keys of train that it reads and other strategies refuse

    def divides_trained(self, *, has_adapters: bool) -> bool:
        """Return whether each rank holds only a part of what is trained, of its gradients and of its moments."""
        return self.divides_adapters or (self.shards_model and not has_adapters)


_KINDS = (  # from the least communication to the most, which is the order of preference
    StrategyKind(name="single", is_alone=True),
    StrategyKind(name="ddp"),
    StrategyKind(name="fsdp2", shards_model=True, casts_gathered=True, loads_in_turns=True, own_keys=("shard_size",)),
    StrategyKind(
        name="deepspeed",
        package="deepspeed",
        shards_model=True,
        divides_adapters=True,
        trains_vision=False,
        skips_updates=False,
        own_keys=("deepspeed",),
    ),
)
STRATEGY_KINDS: Mapping[str, StrategyKind] = {kind.name: kind for kind in _KINDS}
