"""Read a Python script that trains with TRL: convert the arguments of its configs to flags of `trl`. Nothing is
executed."""

import ast
import re
from collections.abc import Iterator, Mapping

from tiercel.convert.arithmetic import evaluated

CONFIGS = {
    "GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto",
    "RewardConfig": "reward", "CPOConfig": "cpo", "ORPOConfig": "orpo", "GKDConfig": "gkd",
    "DistillationConfig": "distillation",
}  # fmt: skip
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
             "task_type": "lora_task_type"}  # fmt: skip
_ADAPTER_CONFIGS = ("LoraConfig", "BitsAndBytesConfig")
_NAMES_OF_MODELS = ("pretrained_model_name_or_path", "model_name")
_OF_MODEL = {"revision": "model_revision"}
_READERS = ("json", "parquet")  # of load_dataset: of files that tiercel reads
_MODEL = re.compile(r"Model|(ForConditionalGeneration|ForCausalLM|ForVision2Seq)\.from_pretrained$")
_SIZE = re.compile(r"\d+|0?\.\d+")
_CHANGES = ("map", "filter", "select", "shuffle", "with_transform", "set_transform")  # methods of rows
_NO_ROWS = ("random", "np", "numpy", "pool", "executor")  # which have such methods too
_OF_TRAINER = ("eval_dataset", "formatting_func", "data_collator", "compute_metrics", "callbacks")
_LONGEST = 80  # characters of code that are shown
_USUAL_OF_UNSLOTH = {"lora_r": "16", "lora_alpha": "16", "lora_dropout": "0.0"}
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
    _spell_out(tree)
    known, calls = _assigned(tree), _calls(tree)
    configs = [call for call in calls if call[0] in CONFIGS]
    if not configs:
        return None
    config, *later = configs
    other_models = [node for name, node in calls if _loads_model(name, node)][1:]
    calls = [call for call in calls if call[1] not in other_models]
    words = ["trl", CONFIGS[config[0]], *_flags(_keywords(config[1]), known)]
    given = {word for word in words if word.startswith("--")}
    beside = [flag for name, node in calls for flag in _beside(name, node, known)]
    flags = [*beside, *_rows(calls, _bound(tree), known), *_changes(calls, known)]
    flags += [["--later_config", *(_code(node) for _, node in later)]] if later else []
    flags += [["--later_model", *map(_code, other_models)]] if other_models else []
    if {"--train_test_split", "--dataset_test_split"} & {flag[0] for flag in flags}:
        given.add("--eval_dataset")  # which these say better
    for flag in flags:
        if flag[0] not in given:
            given.add(flag[0])
            words += flag
    return tuple(words)


def _spell_out(tree: ast.Module) -> None:
    """Turn what is said otherwise into arguments by name: the first one of a config, which is output_dir; the path of
    load_dataset into its first one; and attributes that are set later."""
    for name, call in _calls(tree):
        if name in CONFIGS and call.args:
            call.keywords.append(ast.keyword(arg="output_dir", value=call.args[0]))
        path = next((keyword for keyword in call.keywords if keyword.arg == "path"), None)
        if name == "load_dataset" and path is not None and not call.args:
            call.keywords.remove(path)
            call.args.append(path.value)
    made: dict[str, ast.Call] = {}
    assigned = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    ]
    for node in sorted(assigned, key=lambda node: node.lineno):
        target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            made[target.id] = value
        elif isinstance(target, ast.Attribute) and value is not None:
            config = made.get(_name(target.value))
            if config is not None and _name(config.func) in (*CONFIGS, *_ADAPTER_CONFIGS):
                config.keywords = [each for each in config.keywords if each.arg != target.attr]
                config.keywords.append(ast.keyword(arg=target.attr, value=value))


def _loads_model(name: str, node: ast.Call) -> bool:
    return name == "from_pretrained" and _MODEL.search(ast.unparse(node.func)) is not None


def _calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return every call with the name that is called, in the order in which they end: of `a().b()`, a is first."""
    found = [(name, node) for node in ast.walk(tree) if isinstance(node, ast.Call) and (name := _name(node.func))]
    return sorted(found, key=lambda call: (call[1].end_lineno or 0, call[1].end_col_offset or 0))


def _beside(name: str, node: ast.Call, known: Mapping[str, ast.expr]) -> Iterator[list[str]]:
    """Yield the flags that correspond to a call beside the config."""
    keywords = _keywords(node)
    first = node.args[:1]
    if name == "LoraConfig" or (name == "get_peft_model" and ast.unparse(node.func).startswith("Fast")):  # Unsloth's
        yield ["--use_peft"]
        given = {_ADAPTERS.get(key, key): _values(value, known) for key, value in keywords.items()}
        usual = _USUAL if name == "LoraConfig" else _USUAL_OF_UNSLOTH
        given = {key: [word] for key, word in usual.items()} | given
        if name != "LoraConfig" and given.get("lora_target_modules", ["all-linear"]) == ["all-linear"]:
            given["lora_target_modules"] = _targets_of_unsloth(node, given)
        for key, words in given.items():
            yield [f"--{key}", *words]
    elif name == "BitsAndBytesConfig":
        yield from ([f"--{key}", *_values(value, known)] for key, value in keywords.items())
        if "load_in_4bit" in keywords and "bnb_4bit_quant_type" not in keywords:
            yield ["--bnb_4bit_quant_type", "fp4"]  # the default of transformers; `trl` has another
    elif name.endswith("Trainer"):
        for key, flag in (("model", "model_name_or_path"), ("reward_funcs", "reward_funcs")):
            if (value := keywords.get(key)) is not None and (key != "model" or _is_text(value, known)):
                yield [f"--{flag}", *_values(value, known)]
        if first and _is_text(first[0], known):
            yield ["--model_name_or_path", *_values(first[0], known)]
    elif _loads_model(name, node):
        names = [value for key, value in keywords.items() if key in _NAMES_OF_MODELS]
        for value in [*first, *names][:1]:
            yield ["--model_name_or_path", *_values(value, known)]
        for key, value in keywords.items():
            if key not in _NAMES_OF_MODELS:
                yield [f"--{_OF_MODEL.get(key, key)}", *_values(value, known)]
        if _values(keywords.get("load_in_4bit", ast.Constant(False)), known) == ["true"] and not ast.unparse(
            node.func
        ).startswith("Fast"):  # Unsloth's are nf4
            yield ["--bnb_4bit_quant_type", "fp4"]


def _targets_of_unsloth(node: ast.Call, given: Mapping[str, list[str]]) -> list[str]:
    """Return the layers with adapters if a call of Unsloth names none: those of the language model, and for its vision
    models those of the tower too, unless a switch turns these off."""
    has_tower = ast.unparse(node.func).startswith(("FastVisionModel", "FastModel"))
    if has_tower and given.get("finetune_vision_layers") != ["false"]:
        return ["all-linear"]
    return ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _rows(
    calls: list[tuple[str, ast.Call]], bound: Mapping[str, list[ast.expr]], known: Mapping[str, ast.expr]
) -> Iterator[list[str]]:
    """Yield the flags of the training rows: those of the `load_dataset` that `train_dataset` of the trainer comes from,
    else of the first that does not give `eval_dataset`. Every other one is named, as it may load rows to train on."""
    loads = [node for name, node in calls if name == "load_dataset" and node.args]
    trainer = next((_keywords(node) for name, node in calls if name.endswith("Trainer")), {})
    trained, held = (_source(trainer.get(f"{name}_dataset"), bound, set()) for name in ("train", "eval"))
    left = [node for node in loads if held is None or node is not held[0]]
    source = trained or (_source(left[0], bound, set()) if left else None)
    if source is not None:
        yield from _loaded(*source, known)
    if trained and held and held[0] is trained[0] and held[1] is not None and held[1] is not trained[1]:
        yield ["--dataset_test_split", *_literal(held[1], known)]
    if others := [node for node in loads if source is None or node is not source[0]]:
        yield ["--load_dataset", *map(_code, others)]


def _changes(calls: list[tuple[str, ast.Call]], known: Mapping[str, ast.expr]) -> Iterator[list[str]]:
    """Yield a flag for each way in which the script changes its rows, its pictures or its batches: the table says what
    to do about it, since none of that code is executed."""
    changed: dict[str, list[str]] = {}
    for name, node in calls:
        is_method = isinstance(node.func, ast.Attribute) and _name(node.func.value) not in _NO_ROWS
        if name == "train_test_split" and is_method:
            yield _split_off(node, known)
        elif name in _CHANGES and is_method:
            shown = [*node.args, *_keywords(node).values()][:1]
            changed.setdefault(f"--dataset.{name}", []).extend(map(_code, shown))
        elif name == "from_pretrained" and "Processor" in ast.unparse(node.func):
            sizes = {
                key: value for key, value in _keywords(node).items() if key in ("max_pixels", "min_pixels", "size")
            }
            yield from ([f"--processor.{key}", *_pixels(value, known)] for key, value in sizes.items())
        elif name.endswith("Trainer"):
            yield from ([f"--{key}", _code(value)] for key, value in _keywords(node).items() if key in _OF_TRAINER)
    yield from ([flag, *shown] for flag, shown in changed.items())


def _split_off(node: ast.Call, known: Mapping[str, ast.expr]) -> list[str]:
    """Return the flag of the rows that are held out: a share or a number; a quarter if no size is given."""
    given = {**dict(zip(("test_size", "train_size"), node.args, strict=False)), **_keywords(node)}
    sizes = {name: _literal(given[name], known)[0] for name in ("test_size", "train_size") if name in given}
    if not sizes:
        return ["--train_test_split", "0.25"]
    if _SIZE.fullmatch(sizes.get("test_size", "")):
        return ["--train_test_split", sizes["test_size"]]
    if list(sizes) == ["train_size"] and _SIZE.fullmatch(sizes["train_size"]) and float(sizes["train_size"]) < 1:
        return ["--train_test_split", f"{1 - float(sizes['train_size']):g}"]
    return ["--dataset.train_test_split", *(f"{name}={size.lstrip('$')}" for name, size in sizes.items())]


def _pixels(node: ast.expr, known: Mapping[str, ast.expr]) -> list[str]:
    """Return a number of pixels, which is often written as a product."""
    names = {name: str(value.value) for name, value in known.items() if isinstance(value, ast.Constant)}
    code = ast.unparse(node)
    number = None if "/" in code else evaluated(code, names)
    return _literal(node, known) if number is None else [str(number)]


def _loaded(call: ast.Call, split: ast.expr | None, known: Mapping[str, ast.expr]) -> Iterator[list[str]]:
    """Yield the flags of one `load_dataset`. If its name is that of a reader of files, such as json,
    the data set is the file."""
    given = {**dict(zip(("path", "name", "data_dir", "data_files"), call.args, strict=False)), **_keywords(call)}
    name, files = _literal(given["path"], known), given.get("data_files")
    listed = [] if files is None or isinstance(files, ast.Dict) else _literal(files, known)
    if name[0] in _READERS and len(listed) == 1 and not listed[0].startswith("$"):
        name, files = listed, None
    if name[0] not in _READERS:
        yield ["--dataset_name", *name]
    for flag, value in (("dataset_config", given.get("name")), ("dataset_train_split", split)):
        if value is not None:
            yield [f"--{flag}", *_literal(value, known)]
    for flag, value in (("data_dir", given.get("data_dir")), ("data_files", files)):
        if value is not None:
            yield [f"--{flag}", _code(value)]


_Source = tuple[ast.Call, ast.expr | None]  # a call of load_dataset, and the split that is taken


def _source(node: ast.expr | None, bound: Mapping[str, list[ast.expr]], seen: set[str]) -> _Source | None:
    """Find the `load_dataset` that rows come from, through names, subscripts, methods and functions. `seen` are the
    names that were looked up, each of them once."""
    inner: list[ast.expr] = []
    if isinstance(node, ast.Name) and node.id not in seen:
        seen.add(node.id)
        inner = bound.get(node.id, [])
    elif isinstance(node, ast.Subscript):
        found = _source(node.value, bound, seen)
        is_split = found is not None and found[1] is None and not isinstance(node.slice, ast.Slice)
        return (found[0], node.slice) if found is not None and is_split else found
    elif isinstance(node, ast.Call) and _name(node.func) == "load_dataset" and node.args:
        return node, _keywords(node).get("split")
    elif isinstance(node, ast.Call):
        inner = [node.func, *node.args, *_keywords(node).values()]
    elif isinstance(node, ast.Attribute):
        inner = [node.value]
    elif isinstance(node, ast.List | ast.Tuple):
        inner = node.elts
    return next(filter(None, (_source(part, bound, seen) for part in inner)), None)


def _bound(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Return all values that are assigned to each name, also in assignments to several names, and what functions
    return."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            returned = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
            found.setdefault(node.name, []).extend(returned)
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name, value in (pair for target in targets for pair in _pairs(target, node.value)):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return what is assigned to what; one value for several names counts for each of them."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(name, value) for name in target.elts]


def _literal(node: ast.expr, known: Mapping[str, ast.expr]) -> list[str]:
    """Return the words of a value, with a dollar sign before a name that is not assigned one."""
    words = _values(node, known)
    return [f"${node.id}"] if isinstance(node, ast.Name) and words == [node.id] else words or [""]


def _code(node: ast.expr) -> str:
    """Return the code of what is not converted, cut short."""
    text = " ".join(ast.unparse(node).replace("'", '"').split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


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
