"""The weights that an adapter changes: linear layers, and the experts of a mixture if the recipe names them."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from tiercel.config.schema import Lora
from tiercel.config.trained_parts import PARTS
from tiercel.errors import ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.experts import gate_names, mixtures

NAME = r"[\w.]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTargets:
    """The weights that an adapter changes, in PEFT's form."""

    layers: str  # a regular expression for names of linear layers; empty: none
    experts: tuple[str, ...]  # names of parameters

    def names(self, model: HuggingFaceModel) -> set[str]:
        """Return the names of everything that is adapted, given a model without an adapter."""
        matched = {name for name, _ in model.named_modules() if self.layers and re.fullmatch(self.layers, name)}
        return matched | set(self.experts)

    def config(self, lora: Lora) -> LoraConfig:
        """Build PEFT's config for a new adapter."""
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=self.layers or [],
            target_parameters=list(self.experts) or None,
            use_rslora=lora.kind == "rslora",
            use_dora=lora.kind == "dora",
            task_type="CAUSAL_LM",
        )


def adapted_names(model: HuggingFaceModel) -> set[str]:
    """Return the names, without PEFT's layers, of everything that the model's adapters change."""
    names = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            plain = name.replace(".base_layer", "")
            names.add(f"{plain}.{module.parameter_name}" if isinstance(module, ParamWrapper) else plain)
    return names


def adaptable_names(model: HuggingFaceModel) -> set[str]:
    """Return the names of everything that an adapter can change, given a model without one: its linear layers and
    experts. The head is excluded, because the passes read its weight directly, and so are the gates of mixtures."""
    head, gates = model.get_output_embeddings(), gate_names(model)
    layers = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in gates
    }
    return layers | {name for mixture in mixtures(model) for name in mixture.expert_parameters}


def adapter_targets(family: Family, model: HuggingFaceModel, lora: Lora) -> AdapterTargets:
    """Choose what `lora.targets` names: the linear layers of a part without the head and the gates of mixtures, or the
    linear layers and experts that the user's own expression matches. Raises ModelError if nothing matches, if it
    matches the head, a gate or, by name, an embedding, which no adapter changes, or if experts would have dropout."""
    targets, adaptable = lora.targets, adaptable_names(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    possible = [name for name in linear if name in adaptable]
    if targets in (*PARTS, "all"):
        chosen = [name for name in possible if targets == "all" or family.part_of(name + ".") == targets]
        return AdapterTargets(layers=pattern(chosen), experts=()) if chosen else _nothing(targets, possible)
    # An expression such as .* or .*patch_embed.* may match embeddings as well, but does not ask for them.
    words = set(re.findall(r"\w+", re.sub(r"\\.", " ", targets)))
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    named = {name for name in embeddings if name.rpartition(".")[2] in words}
    asked = {*linear, *gate_names(model), *named} - adaptable
    if fixed := sorted(name for name in asked if re.fullmatch(targets, name)):
        raise ModelError(
            f"lora.targets: {targets!r} matches {fixed[0]}, which cannot be adapted here; use an expression that "
            f"leaves it out, such as '(?!{re.escape(fixed[0])}$){targets}'"
        )
    chosen = [name for name in linear if re.fullmatch(targets, name)]
    experts = tuple(
        name for mixture in mixtures(model) for name in mixture.expert_parameters if re.fullmatch(targets, name)
    )
    if not chosen and not experts:
        return _nothing(targets, possible)
    if experts and lora.kind == "dora":
        raise ModelError(
            "lora.kind: is dora, but PEFT does not support it for experts, which lora.targets names; use rslora"
        )
    if experts and lora.dropout:
        raise ModelError(
            f"lora.dropout: is {lora.dropout:g}, but PEFT adapts experts, which lora.targets names, only without "
            "dropout; use 0"
        )
    matched = sum(re.fullmatch(targets, name) is not None for name, _ in model.named_modules())
    # PEFT refuses layers that are not linear.
    layers = targets if matched == len(chosen) else "|".join(map(re.escape, chosen))
    return AdapterTargets(layers=layers if chosen else "", experts=experts)


def pattern(names: Collection[str]) -> str:
    """Build an expression for names that differ only in layer numbers."""
    return "|".join(sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in names}))


def expression_of(names: Collection[str], others: Collection[str]) -> str:
    """Build an expression that matches all of `names` and none of `others`."""
    if not any(re.fullmatch(pattern(names), other) for other in others):
        return pattern(names)
    layers: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names):
        before, *more = re.split(r"(?<=\.)(\d+)(?=\.)", name, maxsplit=1)
        layers.setdefault((before, *more[1:]), []).extend(more[:1])
    return "|".join(
        re.escape(before) + "".join(f"({'|'.join(numbers)}){re.escape(after)}" for after in afters)
        for (before, *afters), numbers in layers.items()
    )


def _nothing(targets: str, linear: list[str]) -> AdapterTargets:
    if targets in PARTS:
        raise ModelError(f"lora.targets: {targets} has no linear layer in this model; use language or all")
    words = re.split(r"[,\s]+", targets.strip())
    wider = f".*({'|'.join(words) if all(re.fullmatch(NAME, word) for word in words) else targets})"
    if meant := next((name for name in linear if re.fullmatch(wider, name)), None):
        raise ModelError(
            f"lora.targets: {targets!r} matches no linear layer, because an expression must match whole names, such "
            f"as {meant}; use '{wider}'"
        )
    ends = sorted({name.rpartition(".")[2] for name in linear if not name.rpartition(".")[2].isdigit()})
    raise ModelError(
        f"lora.targets: {targets!r} matches no linear layer; the names of layers end with {', '.join(ends)}; list "
        f"the ones you want in an expression, such as '.*({'|'.join(ends[:2])})'"
    )
