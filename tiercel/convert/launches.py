"""Recognise which program of a peer a command starts, its flags and its number of processes, and also commands of
methods that tiercel does not have."""

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from tiercel.config.keys import Kind
from tiercel.config.yaml_text import leaves
from tiercel.convert.accelerate import Accelerate, accelerate_of
from tiercel.convert.detect_program import (
    METHODS,
    OTHER_METHODS,
    SETTINGS,
    VERBS,
    Foreign,
    no_method,
    start_of,
    stranger,
)
from tiercel.convert.overrides import override_words
from tiercel.convert.shell import ShellCommand, quoted
from tiercel.convert.table import KINDS, OVERRIDING, Framework, Method, TableRow, environment_row, rows_of
from tiercel.convert.values import file_in, mapping_in, number_of, whole_number_of

# The flag that names the method, and its default.
METHOD_FLAGS: dict[Framework, tuple[str, str]] = {"ms-swift": ("rlhf_type", "dpo"), "LLaMA-Factory": ("stage", "sft")}
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Variables that count processes and machines, and the launcher's flags that take precedence over them.
_COUNTS = {"NPROC_PER_NODE": ("nproc_per_node", "num_gpus"), "NNODES": ("nnodes", "num_nodes")}
_UNKNOWN_COUNT = re.compile(r"\$|\b(gpu|auto)$")
MACHINES = ("trainer.n_gpus_per_node", "trainer.nnodes")  # EasyR1's and verl's numbers of processes
_OF_SWIFT_2 = ("sft_type", "model_id_or_path", "template_type", "custom_train_dataset_path", "batch_size")
CODE = (".py", ".ipynb")  # the suffixes of scripts and notebooks in Python
Flags = dict[str, tuple[str, ...]]  # the words of each
_PARENTS = 8  # folders above a script in which a relative path is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A training command. Flags are named without dashes, with `-` as `_`; if a flag is given twice the last one
    counts, and a flag without values is a switch that is on."""

    framework: Framework
    method: Method
    script: str  # name of the Python file, if there is one
    is_code: bool  # whether the flags are those of a Python script's calls
    starter: str  # the program, if it starts a process for each GPU that it sees; empty for any other
    flags: Flags
    without_value: frozenset[str]  # flags that stand in --config's YAML file as null; they take their defaults
    earlier: Sequence[str]  # flags that were given again later, with their values
    strays: Sequence[str]  # words that belong to no flag
    launcher: Flags
    environment: dict[str, str]
    unexported: tuple[str, ...]  # variables that the script sets for itself, and does not use
    folders: tuple[Path, ...]  # where relative paths are looked for
    accelerate: Accelerate | None

    @property
    def kind(self) -> Kind:
        return KINDS[self.method]

    @property
    def rows(self) -> Mapping[str, TableRow]:
        return rows_of(self.framework, self.method)

    def row_of(self, label: str) -> TableRow | None:
        """Return the table's row for a flag, a variable or a launcher's flag."""
        if label.startswith("--"):
            name = label.removeprefix("--")
            pattern = (row for row in self.rows.values() if "*" in row.name and fnmatchcase(name, row.name))
            return self.rows.get(name) or next(pattern, None)
        return environment_row(label.replace("launcher --", "launcher "))

    def flag_of(self, key: str) -> str:
        """Return the peer's own flag for a key."""
        return next(row.name for row in self.rows.values() if row.key == key and row.treatment in ("set", "together"))

    def spelt(self, name: str) -> str:
        """Return a flag's name as the command writes it."""
        return name if self.framework in OVERRIDING else f"--{name}"

    def words(self, name: str) -> tuple[str, ...]:
        """Return the values of a flag, or its default."""
        if name in self.flags and name not in self.without_value:
            return self.flags[name]
        return self.rows[name].default if name in self.rows else ()

    def text(self, *names: str) -> str | None:
        """Return the first value of the first of these flags that is given, or else of the first that has a default."""
        given = [name for name in names if name in self.flags]
        for name in (*given, *names):
            if words := self.words(name) or (("true",) if self.flags.get(name) == () else ()):
                return words[0]
        return None

    def is_true(self, name: str) -> bool:
        return (self.text(name) or "false").lower() in ("true", "1", "yes")

    def number(self, name: str) -> int | None:
        """Return a flag's whole number above 0; None if none is given. Raises ValueError for any other value."""
        value = self.text(name)
        if value is None or value.lower() == "none":
            return None
        number = whole_number_of(self.spelt(name), value)
        if number < 1:
            raise ValueError(f"{self.spelt(name)} {value} must be above 0")
        return number

    def real(self, name: str) -> float | None:
        """Return a flag's number; None if none is given. Raises ValueError if the value is not a number."""
        value = self.text(name)
        return None if value is None or value.lower() == "none" else float(number_of(self.spelt(name), value))

    def parts(self, between: str, *names: str) -> list[str]:
        """Return the values of flags, split at the separator `between`."""
        words = [word for name in names for word in self.words(name)]
        return [part for word in words for part in re.split(between, word) if part]

    def default_remark(self, *names: str) -> str:
        """Return the remark that a value is the peer's default; empty if one of these flags is given."""
        flag = next((f" of {self.spelt(name)}" for name in names if name in self.rows), "")
        return "" if any(name in self.flags for name in names) else f"{self.framework}'s default{flag}"

    def file(self, path: str) -> Path | None:
        """Find a file by its name in the working directory or in the folders of the script."""
        return file_in(self.folders, path)

    def text_in(self, path: str) -> str | None:
        """Return the text of a file, without white space around it; None if it is not on this machine."""
        file = self.file(path)
        return None if file is None else file.read_text(encoding="utf-8-sig").strip()

    @property
    def process_labels(self) -> tuple[str, ...]:
        """Return the labels that give the number of processes. A launcher's flag takes precedence over a variable."""
        names = ("nproc_per_node", "nnodes", "num_processes", "num_gpus", "num_nodes", "include")
        if self.framework in OVERRIDING:
            return tuple(f"--{name}" for name in MACHINES if name in self.flags)
        flags = [f"launcher --{name}" for name in names if name in self.launcher]
        return (*flags, *(name for name in _COUNTS if name in self.environment and not self._launcher_counts(name)))

    def _launcher_counts(self, variable: str) -> list[str]:
        """Return the launcher's flags that take precedence over a variable."""
        return [name for name in _COUNTS[variable] if name in self.launcher]

    @property
    def unknown_process_labels(self) -> tuple[str, ...]:
        """Return those of `process_labels` whose number only the machine or the shell knows."""
        return tuple(label for label in self.process_labels if _UNKNOWN_COUNT.search(self.given[label]))

    @property
    def processes(self) -> int:
        """Return the number of processes on all machines; 1 if nothing gives it. Raises ValueError if a value is not a
        number."""
        if self.framework in OVERRIDING:
            return math.prod(_count(name, self.text(name) or "1") for name in MACHINES)
        if "num_processes" in self.launcher:
            return _count("--num_processes", self.launcher["num_processes"][0])
        if "include" in self.launcher:  # in the form host:0,1@host:2
            hosts = self.launcher["include"][0].split("@")
            return sum(len(host.partition(":")[2].split(",")) for host in hosts)
        each = self._counted("NPROC_PER_NODE")
        if each is None and self.accelerate is not None and self.accelerate.processes:
            return self.accelerate.processes
        if each is None and self.counts_gpus and self.gpus:
            each = len(self.gpus.split(","))
        return (each or 1) * (self._counted("NNODES") or 1)

    @property
    def counts_gpus(self) -> bool:
        """Return whether the command starts a process for each GPU that it sees: nothing in it gives a number."""
        is_told = {"config_file", "accelerate_config", "cpu"} & {*self.launcher}
        of_a_machine = {*self.process_labels} - {"NNODES", "launcher --nnodes", "launcher --num_nodes"}
        return bool(self.starter) and not is_told and not of_a_machine

    @property
    def gpus(self) -> str | None:
        """Return the list of GPUs that the command sees; None if it does not give one."""
        asked = self.launcher.get("gpu_ids", ())
        seen = asked[0] if asked and asked[0] != "all" else self.environment.get("CUDA_VISIBLE_DEVICES")
        return seen or None

    def _counted(self, variable: str) -> int | None:
        for name in self._launcher_counts(variable):
            if self.launcher[name]:
                return _count(f"--{name}", self.launcher[name][0])
        given = self.environment.get(variable) if self.framework in METHOD_FLAGS else None
        return None if given is None else _count(variable, given)

    @property
    def given(self) -> dict[str, str]:
        """Return everything that the command sets, as written, by label: `--flag`, `launcher --flag`, `VARIABLE`."""
        between = "=" if self.framework in OVERRIDING else " "
        flags = {f"--{name}": f"{self.spelt(name)}{between}{quoted(words)}" for name, words in self.flags.items()}
        launcher = {name: f"--{name} {quoted(words)}".strip() for name, words in self.launcher.items()}
        return {
            **{label: text.strip() for label, text in flags.items()},
            **{f"launcher --{name}": f"the launcher's {text}" for name, text in launcher.items()},
            **{name: f"{name}={value}" for name, value in self.environment.items()},
        }


def _count(label: str, text: str) -> int:
    """Read a number of processes; 1 if only the machine knows it, which a note then says."""
    if "$" in text or text in ("gpu", "auto"):
        return 1
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"{label} {text} is not a whole number; use a number instead")
    return int(text)


def launch_of(command: ShellCommand, file: Path | None = None) -> Launch | Foreign | None:
    """Recognise a training command; None if the command does not train. `file` is the script that it comes from. Raises
    ValueError if the file that names the method does not exist."""
    words = list(command.words)
    start = start_of(words)
    if start is None or isinstance(start, Foreign):
        return start
    place, framework, method = start
    rest = words[place:]
    if framework == "LLaMA-Factory" and rest and rest[0].endswith(SETTINGS):  # in the form FILE.yaml key=value
        rest = ["--config", rest[0], *(f"--{word}" for word in rest[1:])]
    if framework in OVERRIDING:
        rest = override_words(rest)
    flags, earlier, strays = parsed_flags(rest)
    folders = (Path.cwd(), *(file.resolve().parents[:_PARENTS] if file else ()))
    # Scripts and variables belong to no flag.
    plain = [word for word in words[:place] if not word.endswith(".py") and not _VARIABLE.fullmatch(word)]
    launcher, _, _ = parsed_flags(plain)
    if framework == "verl" and (own := _own_settings(flags)):
        flags["config"] = (own,)
    in_file = _of_config(flags, folders, is_nested=framework in OVERRIDING)
    without_value = frozenset(name for name, value in in_file.items() if value in (None, {}) and name not in flags)
    if framework in OVERRIDING:  # as in its file
        without_value |= {name for name, given in flags.items() if given in (("null",), ("None",))}
    flags = {**{name: _flag_words(value) for name, value in in_file.items()}, **flags}
    if framework == "TRL" and method is not None:  # `trl` passes these flags on to accelerate, its file's too
        known = {*rows_of(framework, method), *without_value}
        passed = [name for name in flags if name not in known and environment_row(f"launcher {name}")]
        launcher |= {name: flags.pop(name) for name in passed}
    if framework == "ms-swift" and (old := [f"--{name}" for name in flags if name in _OF_SWIFT_2]):
        return Foreign(
            f"{', '.join(old)}: flags of ms-swift 2, whose defaults differ too; write the command for ms-swift 3, "
            "with --model, --train_type, --target_modules and --per_device_train_batch_size"
        )
    if method is None:
        named = _method_by_flag(framework, flags, folders)
        if isinstance(named, Foreign):
            return named
        method = named
    if framework not in OVERRIDING:
        flags = _without_negations(flags, rows_of(framework, method))
    script = next((PurePath(word).name for word in reversed(words[:place]) if word.endswith(".py")), "")
    if script and in_file and framework in ("TRL", "VLM-R1"):
        told = stranger(script, [f"--{name}" for name in in_file], framework, method)
        if told is not None:
            return told
    settings = launcher.get("config_file") or launcher.get("accelerate_config") or ()
    variables = dict(word.split("=", 1) for word in words[:place] if _VARIABLE.fullmatch(word))
    found = file_in(folders, settings[0]) if settings else None
    is_code = file is not None and file.suffix in CODE
    return Launch(
        framework=framework,
        method=method,
        script=script,
        is_code=is_code,
        starter="" if is_code else _starter_of(words[:place]),
        flags=flags,
        without_value=without_value,
        earlier=earlier,
        strays=strays,
        launcher=launcher,
        environment={**command.environment, **variables},
        unexported=tuple(name for name in command.unexported if name not in variables and _counts(name)),
        folders=folders,
        accelerate=accelerate_of(found, folders) if found else None,
    )


def _counts(variable: str) -> bool:
    """Return whether a variable of the environment changes what is trained, or how much of it is computed."""
    row = environment_row(variable)
    return row is not None and row.treatment != "nothing to do"


def _method_by_flag(framework: Framework, flags: Flags, folders: Sequence[Path]) -> Method | Foreign:
    """Return the method that a flag names, or its default. Raises ValueError if the file that names it is missing."""
    name, usual = METHOD_FLAGS[framework]
    file = flags.get("config", ())
    if framework == "LLaMA-Factory" and file and file_in(folders, file[0]) is None:
        raise ValueError(f"{file[0]} is not on this machine, but it names the method")
    if framework == "LLaMA-Factory" and flags.get("do_train", ("false",))[:1] not in ((), ("true",), ("True",)):
        return no_method("a command without do_train", "tiercel predict and tiercel eval")
    asked = (flags.get(name) or (usual,))[0]
    return METHODS[asked] if asked in METHODS else no_method(f"--{name} {asked}", OTHER_METHODS.get(asked, VERBS))


def _without_negations(flags: Flags, known: Container[str]) -> Flags:
    """Read --no_NAME and --no-NAME, which transformers makes for each switch that is on by default, as NAME false."""
    found = {}
    for name, words in flags.items():
        switch = name.removeprefix("no_")
        is_negation = switch != name and not words and name not in known and switch in known
        found[switch if is_negation else name] = ("false",) if is_negation else words
    return found


def _starter_of(before: Sequence[str]) -> str:
    """Return the program that starts a process for each GPU that it sees if nothing gives a number; empty for any
    other. `before` are the words before the flags."""
    names = [PurePath(word).name for word in before]
    if "accelerate" in names and "launch" in names:
        return "accelerate launch"
    program = names[-2] if names[1:] and names[-2] in ("llamafactory-cli", "lmf", "trl") else ""
    return "deepspeed" if "deepspeed" in names else program


def _own_settings(flags: Flags) -> str | None:
    """Return the path of the settings that --config-name gives to verl, if they are not one of its own files."""
    name, folder = ((flags.get(f"config_{part}") or ("",))[0] for part in ("name", "path"))
    stem = name.removesuffix(".yaml")
    return None if not stem or stem.endswith("trainer") else str(PurePath(folder, f"{stem}.yaml"))


def _of_config(flags: Flags, folders: Sequence[Path], *, is_nested: bool) -> dict[str, object]:
    """Read the flags of --config's YAML file with their values; those of the command take precedence over them."""
    tree = mapping_in(file_in(folders, words[0])) if (words := flags.get("config")) else None
    keys = leaves(tree) if is_nested and tree else (tree or {}).items()
    return {str(name): value for name, value in keys if not (is_nested and re.match(r"(hydra|defaults)\b", str(name)))}


def _flag_words(value: object) -> tuple[str, ...]:
    if value is None or value == {}:
        return ("null",)
    if isinstance(value, bool):
        return (str(value).lower(),)
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def parsed_flags(words: Sequence[str]) -> tuple[Flags, list[str], list[str]]:
    """Parse flags and their values from `--name value ...`, `--name=value` and `--name`. Return them, the flags that
    are given again later, and the words that belong to no flag; see Launch."""
    flags: Flags = {}
    earlier: list[str] = []
    strays: list[str] = []
    name: str | None = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in flags:
                earlier.append(f"--{name} {quoted(flags[name])}".strip())
            flags[name] = (value,) if equals else ()
        elif name is not None:
            flags[name] = (*flags[name], word)
        else:
            strays.append(word)
    return flags, earlier, strays
