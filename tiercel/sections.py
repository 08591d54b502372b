"""The base of every section of a recipe, the numbers that its keys take, and keys that hold a word or a section."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TEXT_FORM, SECTION_FORM = "(text)", "(section)"  # of a key that may be either; pydantic puts them into its locations


class Section(BaseModel):
    """A frozen section of the recipe; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def form_of(value: Any) -> str:
    """Tell which form a value has whose key takes a text or a section: the tag for pydantic."""
    return SECTION_FORM if isinstance(value, dict | Section) else TEXT_FORM
