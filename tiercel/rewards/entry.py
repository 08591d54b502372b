"""Re-export tiercel.rewards.base under its old name, for one release."""

from warnings import warn

from tiercel.rewards.base import *  # noqa: F403
from tiercel.rewards.base import RewardEntry as Entry  # noqa: F401

warn("tiercel.rewards.entry has moved to tiercel.rewards.base", DeprecationWarning, stacklevel=2)
