"""All kinds of reward, by the names that recipes give them; docs/rewards.md has a table of the built-in ones."""

from tiercel.rewards.entry import Entry
from tiercel.rewards.environment import OfEnvironment
from tiercel.rewards.grounding import GROUNDING
from tiercel.rewards.shape import SHAPE
from tiercel.rewards.started import STARTED, ByCall
from tiercel.rewards.wording import WORDING

KINDS: tuple[type[Entry], ...] = (*WORDING, *GROUNDING, *SHAPE, OfEnvironment, *STARTED)
CALL = "call"
BY_NAME: dict[str, type[Entry]] = {kind.model_fields["name"].default or CALL: kind for kind in KINDS}
BUILTIN = {name: kind for name, kind in BY_NAME.items() if kind is not ByCall}
TELLS_RIGHT = tuple(name for name, kind in BUILTIN.items() if kind.own_right_from is not None)
OF_EVERY_REWARD = tuple(Entry.model_fields)
OPTIONS = tuple(dict.fromkeys(key for kind in KINDS for key in kind.model_fields if key not in OF_EVERY_REWARD))


def takers(option: str) -> tuple[str, ...]:
    """List the rewards that take a key."""
    return tuple(name for name, kind in BY_NAME.items() if option in kind.model_fields)
