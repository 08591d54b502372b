"""What each strategy of `train.strategy` is. All that treats strategies differently asks here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["single", "ddp", "fsdp2", "deepspeed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyKind:
    """One way in which ranks share the work."""

    name: StrategyName
    package: str | None = None  # that every rank imports, beyond tiercel's own
    is_alone: bool = False  # there is one rank
    shards_model: bool = False  # no rank need hold the whole model
    divides_adapters: bool = False  # ranks hold parts of adapters too, and of their gradients and moments
    loads_in_turns: bool = False  # wrapping asks nothing of other ranks, so one after the other may read the weights
    trains_vision: bool = True
    skips_updates: bool = True  # it can forget the gradients of an update
    own_keys: tuple[str, ...] = ()  # keys of train that it reads and others refuse

    def divides_trained(self, *, has_adapters: bool) -> bool:
        """Say whether each rank has a part of what is trained, of its gradients and of its moments."""
        return self.divides_adapters or (self.shards_model and not has_adapters)


_KINDS = (  # less communication before more, which is the order of preference
    StrategyKind(name="single", is_alone=True),
    StrategyKind(name="ddp"),
    StrategyKind(name="fsdp2", shards_model=True, loads_in_turns=True, own_keys=("shard_size",)),
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
