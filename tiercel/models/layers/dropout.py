"""The dropout that a checkpoint's own config asks for. It is off, because no recipe asks for it; the adapter's own,
lora.dropout, is another one."""

from typing import Any

from torch import nn


def switch_off_dropout(model: nn.Module) -> None:
    """Set every probability of a model without adapters to 0. Its config stays as it is."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def own_dropout(config: Any) -> tuple[str, ...]:
    """Say which dropout the config of a decoder asks for; empty if it asks for none."""
    found = {name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    named = ", ".join(f"{name} {value:g}" for name, value in sorted(found.items()) if value > 0)
    return (f"dropout: off; the model's config has {named}, but only lora.dropout is used",) if named else ()
