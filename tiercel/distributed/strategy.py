"""Re-export tiercel.distributed.strategies.base under its old name, for one release."""

from warnings import warn

from tiercel.distributed.strategies.base import *  # noqa: F403

warn("tiercel.distributed.strategy has moved to tiercel.distributed.strategies.base", DeprecationWarning, stacklevel=2)
