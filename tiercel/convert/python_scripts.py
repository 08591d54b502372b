"""Read a Python script that trains with TRL: convert the arguments of its configs to flags of `trl`. Nothing is
executed."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from tiercel.convert.arithmetic import evaluated

_METHODS = ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward", "CPO", "ORPO", "GKD", "Distillation")
CONFIGS = {f"{name}Config": name.lower() for name in _METHODS}
# The names of arguments that are given by their places.
_PLACES = {
    "load_dataset": ("path", "name", "data_dir", "data_files"), "train_test_split": ("test_size", "train_size"),
    "from_pretrained": ("model_name",), **dict.fromkeys((*CONFIGS, "TrainingArguments"), ("output_dir",)),
}  # fmt: skip
_FLAGS = {  # of arguments with another name
    "r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type", "pretrained_model_name_or_path": "model_name_or_path",
    "model_name": "model_name_or_path", "revision": "model_revision",
}  # fmt: skip
_READERS = ("json", "parquet")  # of load_dataset: of files that tiercel reads
_MODEL = re.compile(r"Model|(ForConditionalGeneration|ForCausalLM|ForVision2Seq)\.from_pretrained$")
_SIZE = re.compile(r"\d+|0?\.\d+")
_CHANGES = ("map", "filter", "select", "shuffle", "with_transform", "set_transform")  # methods of rows
_NO_ROWS = ("random", "np", "numpy", "pool", "executor")  # which have such methods too
# Arguments of a trainer that are read where they are made, or that make no difference.
_READ_ELSEWHERE = ("args", "train_dataset", "peft_config", "processing_class", "tokenizer")
_PLAIN = "TrainingArguments"  # of transformers, which early trainers of TRL take
_USUAL_OF_PLAIN = {"learning_rate": ["5e-5"], "bf16": ["false"], "gradient_checkpointing": ["false"]}
# Lines for a shell or for IPython, such as `!ls`, `files = %sx ls` and `SFTConfig?`.
_OF_IPYTHON = re.compile(r"^([ \t]*)(?:(?:\w[\w., ]*=[ \t]*)?[!%?](?:.*\\\n)*.*|\w[\w.]*\?+[ \t]*)$", re.MULTILINE)
_LONGEST = 80  # characters of code that are shown
_USUAL_OF_UNSLOTH = {"lora_r": ["16"], "lora_alpha": ["16"], "lora_dropout": ["0.0"]}
_USUAL = {"lora_r": ["8"], "lora_alpha": ["8"], "lora_dropout": ["0.0"]}  # PEFT's defaults, for which `trl` has others

_Flag = tuple[str, list[str]]  # its name without dashes, and its words


def words_of_script(text: str) -> tuple[str, ...] | None:
    """Return the words of the `trl` command that does what the first config of the script says; None if the script
    makes no config. An argument that is computed stays as its code, with a dollar sign before it. Raises ValueError if
    the code is nested too deeply."""
    try:
        return _PythonScript(ast.parse(text)).words()
    except SyntaxError:
        return None
    except (RecursionError, MemoryError) as error:  # the parser's own stack is small
        raise ValueError("its code is nested too deeply") from error


def code_of_notebook(text: str) -> str:
    """Return the code of a notebook's cells. Lines for a shell or for IPython, and cells in another language or
    with wrong syntax, do nothing. Raises ValueError if the text is not a notebook."""
    try:
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError("is not a notebook, whose JSON has cells with a cell_type and a source") from error
    own = [cell for cell in cells if not re.match(r"\s*%%(?!capture|time)", cell)]
    return "\n".join(map(_code_of_cell, own))


def _code_of_cell(cell: str) -> str:
    for code in (cell, _OF_IPYTHON.sub(r"\1pass", cell)):
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        except (RecursionError, MemoryError):  # which `words_of_script` reports
            pass
        return code
    return ""


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """A call: the name that is called, without what stands before it, and the arguments by their names."""

    node: ast.Call
    name: str
    arguments: dict[str, ast.expr]

    @property
    def path(self) -> str:
        """Return the whole name, such as `trl.SFTConfig`."""
        return ast.unparse(self.node.func)

    @property
    def loads_adapter(self) -> bool:
        return self.name == "from_pretrained" and self.path.rpartition(".")[0].endswith("PeftModel")

    @property
    def loads_model(self) -> bool:
        return self.name == "from_pretrained" and not self.loads_adapter and _MODEL.search(self.path) is not None

    @property
    def loads_rows(self) -> bool:
        return self.name == "load_dataset" and "path" in self.arguments


_Source = tuple[_Call, ast.expr | None]  # a call of load_dataset, and the split that is taken


class _PythonScript:
    """The calls of a script in the order in which they end (of `a().b()`, a is first), and the values of its names."""

    def __init__(self, tree: ast.Module):
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        self.calls = {node: _call_of(node) for node in nodes}
        self.values: dict[str, list[ast.expr]] = {}  # all that are assigned to a name, and that a function returns
        for target, value in _assignments(tree):
            if isinstance(target, ast.Name):
                self.values.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Attribute):
                self._set_later(_name(target.value), target.attr, value)
        self.known = {name: values[0] for name, values in self.values.items() if len(values) == 1}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                returned = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
                self.values.setdefault(node.name, []).extend(returned)

    def _set_later(self, name: str, attribute: str, value: ast.expr) -> None:
        """Give an attribute to the config that the name stands for so far."""
        made = [value for value in self.values.get(name, ()) if isinstance(value, ast.Call)]
        config = self.calls[made[-1]] if made else None
        if config is not None and config.name in (*CONFIGS, _PLAIN, "LoraConfig", "BitsAndBytesConfig"):
            config.arguments[attribute] = value
            config.node.keywords.append(ast.keyword(arg=attribute, value=value))  # which notes show

    def words(self) -> tuple[str, ...] | None:
        """Return the words of the command; None without a config. If a flag is said twice, the first counts."""
        calls = list(self.calls.values())
        trainer = next((call for call in calls if call.name.endswith("Trainer")), None)
        given = {} if trainer is None else trainer.arguments
        methods = {**CONFIGS}
        if trainer is not None and (own := f"{trainer.name.removesuffix('Trainer')}Config") in CONFIGS:
            methods[_PLAIN] = CONFIGS[own]
        configs = [call for call in calls if call.name in methods]
        if not configs:
            return None
        models = [call for call in calls if call.loads_model]
        trained = self._model(given.get("model"), set()) or next(iter(models), None)
        if self._constant(given.get("model")) is not None:
            trained = None
        teacher = self._model(given.get("teacher_model"), set())
        beside = [self._beside(call) for call in calls if not call.loads_model or call is trained]
        usual = _USUAL_OF_PLAIN if configs[0].name == _PLAIN else {}
        flags: dict[str, list[str]] = {}
        for name, words in chain(
            self._given(configs[0]).items(), usual.items(), *beside, self._rows(), self._changes()
        ):
            flags.setdefault(name, words)
        if {"train_test_split", "dataset_test_split"} & {*flags}:  # which say it better
            flags.pop("eval_dataset", None)
        others = [call for call in models if call not in (trained, teacher)]
        for name, more in (("later_config", configs[1:]), ("later_model", others)):
            if more:
                flags[name] = [_code(call.node) for call in more]
        own_words = [word for name, words in flags.items() for word in (f"--{name}", *words)]
        return ("trl", methods[configs[0].name], *own_words)

    def _given(self, call: _Call) -> dict[str, list[str]]:
        """Return the arguments of a call as flags."""
        return {_FLAGS.get(name, name): _words_of(value, self.known) for name, value in call.arguments.items()}

    def _model(self, node: ast.expr | None, seen: set[str]) -> _Call | None:
        """Find the call that loads a model, through names and the calls that take it. `seen` are the names that were
        looked up."""
        inner: list[ast.expr] = []
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            inner = self.values.get(node.id, [])
        elif isinstance(node, ast.Call):
            if (call := self.calls[node]).loads_model:
                return call
            inner = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Attribute):
            inner = [node.value]
        return next(filter(None, (self._model(part, seen) for part in inner)), None)

    def _beside(self, call: _Call) -> Iterator[_Flag]:
        """Yield the flags that correspond to a call beside the config."""
        if call.name == "LoraConfig":
            yield from {"use_peft": [], **_USUAL, **self._given(call)}.items()
        elif call.name == "get_peft_model" and call.path.startswith("Fast"):  # Unsloth's
            given = self._given(call)
            if given.get("lora_target_modules", ["all-linear"]) == ["all-linear"]:
                given["lora_target_modules"] = _targets_of_unsloth(call, given)
            yield from {"use_peft": [], **_USUAL_OF_UNSLOTH, **given}.items()
        elif call.name == "BitsAndBytesConfig" or call.loads_model:
            given = self._given(call)
            yield from given.items()
            if given.get("load_in_4bit") == ["true"] and not call.path.startswith("Fast"):
                yield "bnb_4bit_quant_type", ["fp4"]  # the default of transformers; that of `trl` and Unsloth is nf4
        elif call.loads_adapter:
            yield "adapter.from_pretrained", [_code(call.node)]
        elif call.name.endswith("Trainer"):
            for name, value in call.arguments.items():
                yield from self._of_trainer(name, value)

    def _of_trainer(self, name: str, value: ast.expr) -> Iterator[_Flag]:
        """Yield the flags that correspond to an argument of a trainer: what a config could say, or the code itself."""
        constant = self._constant(value)
        if name == "reward_funcs":
            yield name, _words_of(value, self.known)
        elif name == "teacher_model" and constant is None:
            given = {} if (call := self._model(value, set())) is None else self._given(call)
            yield "teacher_model_name_or_path", given.get("model_name_or_path", [_code(value)])
            yield from (("teacher_model_revision", words) for flag, words in given.items() if flag == "model_revision")
        elif constant is not None and constant.value is not None:
            names = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path"}
            yield names.get(name, name), _words_of(constant, self.known)
        elif constant is None and name not in (*_READ_ELSEWHERE, "model"):
            yield name, [_code(value)]

    def _constant(self, node: ast.expr | None) -> ast.Constant | None:
        """Return the constant that a value is, or that its name stands for."""
        node = self.known.get(node.id, node) if isinstance(node, ast.Name) else node
        return node if isinstance(node, ast.Constant) else None

    def _rows(self) -> Iterator[_Flag]:
        """Yield the flags of the training rows: those of the `load_dataset` that `train_dataset` of the trainer comes
        from, else of the first that does not give `eval_dataset`. Every other one is named, as it may load rows to
        train on."""
        loads = [call for call in self.calls.values() if call.loads_rows]
        trainer = next((call.arguments for call in self.calls.values() if call.name.endswith("Trainer")), {})
        trained, held = (self._source(trainer.get(f"{name}_dataset"), set()) for name in ("train", "eval"))
        left = [call for call in loads if held is None or call is not held[0]]
        source = trained or (self._source(left[0].node, set()) if left else None)
        if source is not None:
            yield from self._loaded(*source)
        if trained and held and held[0] is trained[0] and held[1] is not None and held[1] is not trained[1]:
            yield "dataset_test_split", self._literal(held[1])
        if others := [call for call in loads if source is None or call is not source[0]]:
            yield "load_dataset", [_code(call.node) for call in others]

    def _source(self, node: ast.expr | None, seen: set[str]) -> _Source | None:
        """Find the `load_dataset` that rows come from, through names, subscripts, methods and functions. `seen` are the
        names that were looked up, each of them once."""
        inner: list[ast.expr] = []
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            inner = self.values.get(node.id, [])
        elif isinstance(node, ast.Subscript):
            found = self._source(node.value, seen)
            is_split = found is not None and found[1] is None and not isinstance(node.slice, ast.Slice)
            return (found[0], node.slice) if found is not None and is_split else found
        elif isinstance(node, ast.Call):
            if (call := self.calls[node]).loads_rows:
                return call, call.arguments.get("split")
            inner = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Attribute):
            inner = [node.value]
        elif isinstance(node, ast.List | ast.Tuple):
            inner = node.elts
        return next(filter(None, (self._source(part, seen) for part in inner)), None)

    def _loaded(self, call: _Call, split: ast.expr | None) -> Iterator[_Flag]:
        """Yield the flags of one `load_dataset`. If its name is that of a reader of files, such as json, the data set
        is the file."""
        given = call.arguments
        name, files = self._literal(given["path"]), given.get("data_files")
        listed = [] if files is None or isinstance(files, ast.Dict) else self._literal(files)
        if name[0] in _READERS and len(listed) == 1 and not listed[0].startswith("$"):
            name, files = listed, None
        if name[0] not in _READERS:
            yield "dataset_name", name
        for flag, value in (("dataset_config", given.get("name")), ("dataset_train_split", split)):
            if value is not None:
                yield flag, self._literal(value)
        for flag, value in (("data_dir", given.get("data_dir")), ("data_files", files)):
            if value is not None:
                yield flag, [_code(value)]

    def _changes(self) -> Iterator[_Flag]:
        """Yield a flag for each way in which the script changes its rows, its pictures or its batches: the table says
        what to do about it, since none of that code is executed."""
        changed: dict[str, list[str]] = {}
        for node, call in self.calls.items():
            is_method = isinstance(node.func, ast.Attribute) and _name(node.func.value) not in _NO_ROWS
            if call.name == "train_test_split" and is_method:
                yield self._split_off(call)
            elif call.name in _CHANGES and is_method:
                shown = [*node.args, *call.arguments.values()][:1]
                changed.setdefault(f"dataset.{call.name}", []).extend(map(_code, shown))
            elif call.name == "from_pretrained" and "Processor" in call.path:
                sizes = [name for name in ("max_pixels", "min_pixels", "size") if name in call.arguments]
                yield from ((f"processor.{name}", self._pixels(call.arguments[name])) for name in sizes)
        yield from changed.items()

    def _split_off(self, call: _Call) -> _Flag:
        """Return the flag of the rows that are held out: a share or a number; a quarter if no size is given."""
        names = [name for name in ("test_size", "train_size") if name in call.arguments]
        sizes = {name: self._literal(call.arguments[name])[0] for name in names}
        if not sizes:
            return "train_test_split", ["0.25"]
        if _SIZE.fullmatch(sizes.get("test_size", "")):
            return "train_test_split", [sizes["test_size"]]
        if names == ["train_size"] and _SIZE.fullmatch(sizes["train_size"]) and float(sizes["train_size"]) < 1:
            return "train_test_split", [f"{1 - float(sizes['train_size']):g}"]
        return "dataset.train_test_split", [f"{name}={size.lstrip('$')}" for name, size in sizes.items()]

    def _pixels(self, node: ast.expr) -> list[str]:
        """Return a number of pixels, which is often written as a product."""
        names = {name: str(value.value) for name, value in self.known.items() if isinstance(value, ast.Constant)}
        code = ast.unparse(node)
        number = None if "/" in code else evaluated(code, names)
        return self._literal(node) if number is None else [str(number)]

    def _literal(self, node: ast.expr) -> list[str]:
        """Return the words of a value, with a dollar sign before a name that is not assigned one."""
        words = _words_of(node, self.known)
        return [f"${node.id}"] if isinstance(node, ast.Name) and words == [node.id] else words or [""]


def _call_of(node: ast.Call) -> _Call:
    name = _name(node.func)
    places = ("model",) if name.endswith("Trainer") else _PLACES.get(name, ())
    by_place = dict(zip(places, node.args, strict=False))
    by_name = {keyword.arg or "arguments_of_a_mapping": keyword.value for keyword in node.keywords}
    return _Call(node=node, name=name, arguments={**by_place, **by_name})


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what is assigned to what, by lines; one value for several names counts for each of them."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        targets, value = node.targets if isinstance(node, ast.Assign) else [node.target], node.value
        if value is None:
            continue
        for target in targets:
            yield from _unpacked(target, value)


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each name of a target with its part of a value. If a literal cannot be taken apart, yield each name with
    itself, which says nothing; if the value is not a literal, yield each with the whole, which says where it is
    from."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    names = [name.value if isinstance(name, ast.Starred) else name for name in target.elts]
    parts: list[ast.expr] = [value] * len(names)
    if isinstance(value, ast.Tuple | ast.List | ast.Constant):
        parts = [] if isinstance(value, ast.Constant) else list(value.elts)
        star = next((place for place, name in enumerate(target.elts) if isinstance(name, ast.Starred)), None)
        if star is not None and len(parts) >= len(names) - 1:
            end = len(parts) - len(names) + star + 1
            parts[star:end] = [ast.List(elts=parts[star:end], ctx=ast.Load())]
        is_known = not any(isinstance(part, ast.Starred) for part in getattr(value, "elts", ()))
        parts = parts if is_known and len(parts) == len(names) else names
    for name, part in zip(names, parts, strict=True):
        yield from _unpacked(name, part)


def _targets_of_unsloth(call: _Call, given: Mapping[str, list[str]]) -> list[str]:
    """Return the layers with adapters if a call of Unsloth names none: those of the language model, and for its vision
    models those of the tower too, unless a switch turns these off."""
    has_tower = call.path.startswith(("FastVisionModel", "FastModel"))
    if has_tower and given.get("finetune_vision_layers") != ["false"]:
        return ["all-linear"]
    return ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _code(node: ast.expr) -> str:
    """Return the code of what is not converted, cut short."""
    text = " ".join(ast.unparse(node).replace("'", '"').split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _words_of(node: ast.expr, known: Mapping[str, ast.expr]) -> list[str]:
    """Return the words of a value: of a literal, of a name that is assigned one, or of a list of these."""
    if isinstance(node, ast.Name) and isinstance(known.get(node.id), ast.Constant | ast.List | ast.Tuple):
        return _words_of(known[node.id], {})
    if isinstance(node, ast.List | ast.Tuple):
        return [word for item in node.elts for word in _words_of(item, known)]
    if isinstance(node, ast.Name):
        return [node.id]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return [f"${ast.unparse(node)}"]
    return [str(value).lower() if isinstance(value, bool) or value is None else str(value)]
