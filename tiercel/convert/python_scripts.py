"""Read a Python script that trains with TRL: convert the arguments of its configs to flags of `trl`. Nothing is
executed."""

import ast
from collections.abc import Iterator, Mapping

CONFIGS = {
    "GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto",
    "RewardConfig": "reward", "CPOConfig": "cpo", "ORPOConfig": "orpo", "GKDConfig": "gkd",
    "DistillationConfig": "distillation",
}  # fmt: skip
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
             "task_type": "lora_task_type"}  # fmt: skip
_USUAL = {"lora_r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}  # PEFT's defaults, for which `trl` has others


def words_of_script(text: str) -> tuple[str, ...] | None:
    """Return the words of the `trl` command that does what the first config of the script says; None if the script
    makes no config. An argument that is computed stays as its code, with a dollar sign before it. Raises ValueError if
    the code is nested too deeply."""
    try:
        return _words_of(ast.parse(text))
    except SyntaxError:
        return None
    except (RecursionError, MemoryError) as error:  # the parser's own stack is small
        raise ValueError("its code is nested too deeply") from error


def _words_of(tree: ast.Module) -> tuple[str, ...] | None:
    known = _assigned(tree)
    calls = [(name, node) for node in ast.walk(tree) if isinstance(node, ast.Call) and (name := _name(node.func))]
    config = next(((name, node) for name, node in calls if name in CONFIGS), None)
    if config is None:
        return None
    words = ["trl", CONFIGS[config[0]], *_flags(_keywords(config[1]), known)]
    given = {word for word in words if word.startswith("--")}
    for name, node in calls:
        for flag in _beside(name, node, known):
            if flag[0] not in given:
                given.add(flag[0])
                words += flag
    return tuple(words)


def _beside(name: str, node: ast.Call, known: Mapping[str, ast.expr]) -> Iterator[list[str]]:
    """Yield the flags that correspond to a call beside the config."""
    keywords = _keywords(node)
    first = node.args[:1]
    if name == "LoraConfig":
        yield ["--use_peft"]
        given = {_ADAPTERS.get(key, key): _values(value, known) for key, value in keywords.items()}
        for key, words in ({key: [word] for key, word in _USUAL.items()} | given).items():
            yield [f"--{key}", *words]
    elif name == "BitsAndBytesConfig":
        yield from ([f"--{key}", *_values(value, known)] for key, value in keywords.items())
    elif name == "load_dataset" and first:
        yield ["--dataset_name", *_values(first[0], known)]
        yield from ([f"--{flag}", *_values(value, known)]
                    for key, flag in (("name", "dataset_config"), ("split", "dataset_train_split"))
                    if (value := keywords.get(key)) is not None)  # fmt: skip
    elif name.endswith("Trainer"):
        for key, flag in (("model", "model_name_or_path"), ("reward_funcs", "reward_funcs")):
            if (value := keywords.get(key)) is not None and (key != "model" or _is_text(value, known)):
                yield [f"--{flag}", *_values(value, known)]
    elif name == "from_pretrained" and first and "Model" in ast.unparse(node.func):
        yield ["--model_name_or_path", *_values(first[0], known)]


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of the names that are assigned exactly once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _keywords(node: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg or "arguments_of_a_mapping": keyword.value for keyword in node.keywords}


def _flags(keywords: Mapping[str, ast.expr], known: Mapping[str, ast.expr]) -> Iterator[str]:
    for name, value in keywords.items():
        yield f"--{name}"
        yield from _values(value, known)


def _is_text(node: ast.expr, known: Mapping[str, ast.expr]) -> bool:
    node = known.get(node.id, node) if isinstance(node, ast.Name) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _values(node: ast.expr, known: Mapping[str, ast.expr]) -> list[str]:
    """Return the words of a value: of a literal, of a name that is assigned one, or of a list of these."""
    if isinstance(node, ast.Name) and isinstance(known.get(node.id), ast.Constant | ast.List | ast.Tuple):
        return _values(known[node.id], {})
    if isinstance(node, ast.List | ast.Tuple):
        return [word for item in node.elts for word in _values(item, known)]
    if isinstance(node, ast.Name):
        return [node.id]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return [f"${ast.unparse(node)}"]
    return [str(value).lower() if isinstance(value, bool) or value is None else str(value)]
