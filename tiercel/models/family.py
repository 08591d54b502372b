"""The former location of tiercel.models.families.base, kept for one release."""

from warnings import warn

from tiercel.models.families.base import *  # noqa: F403

warn("tiercel.models.family has moved to tiercel.models.families.base", DeprecationWarning, stacklevel=2)
