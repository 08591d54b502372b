"""Hold the draft of a recipe. Every flag and variable of the command ends up in it, either at a key or in a note."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tiercel.config.keys import allowed_words, keys_of
from tiercel.config.suggestions import nearest_key
from tiercel.config.synonyms import word_synonyms
from tiercel.convert.launches import Launch
from tiercel.convert.table import TableRow, words_of
from tiercel.convert.values import mapping_in, number_of, whole_number_of
from tiercel.reliability.redaction import redact
from tiercel.secret_names import is_secret_name

_COUNT = re.compile(r"\d{1,7}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a value comes from: the labels of the flags and variables, and a remark."""

    labels: tuple[str, ...]
    remark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A note on a flag or variable."""

    labels: tuple[str, ...]
    subject: str
    text: str
    is_change: bool  # whether the user should look at it


@dataclass(slots=True)
class RecipeDraft:
    """The values by key, where each comes from, the notes, and what is left to do in addition to what `tiercel check`
    refuses."""

    launch: Launch
    given: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    peer_updates: float | None = None  # the peer's updates of a rollout; None if it samples none

    def set(self, key: str, value: Any, *names: str, remark: str = "") -> None:
        """Set a key. `names` are the flags and variables that the value depends on. A default is only set if there is a
        remark, or the command gives one of these."""
        known = keys_of(self.launch.kind).get(key)
        given = self._labels(names)
        if known is not None and (given or remark or known.field.default != value):
            self.values[key] = value
            self.origins[key] = Origin(labels=given, remark=remark)

    def put(self, key: str, value: Any, *flags: str, remark: str = "") -> None:
        """Set a key. The remark says that the value is the peer's default if the command gives none of these flags."""
        self.set(key, value, *flags, remark="; ".join(filter(None, (self.launch.default_remark(*flags), remark))))

    def drop(self, *starts: str) -> tuple[str, ...]:
        """Remove the keys that start with one of these texts (`lora.` removes the whole section), and return the labels
        of what they came from."""
        removed = [key for key in self.values if key.startswith(starts)]
        labels = dict.fromkeys(label for key in removed for label in self.origins[key].labels)
        for key in removed:
            del self.values[key], self.origins[key]
        return tuple(labels)

    @property
    def updates_per_step(self) -> int:
        """Return the number of updates in one step: a step is a rollout in tiercel, but an update in the peers."""
        return int(self.values.get("optim.minibatches", 1)) * int(self.values.get("optim.rollout_epochs", 1))

    @property
    def peer_updates_per_step(self) -> float:
        """Return how many of the peer's updates a step stands for, by which its lengths and intervals are divided."""
        if self.peer_updates is None:
            return self.updates_per_step
        return self.peer_updates * int(self.values.get("optim.rollout_epochs", 1))

    @property
    def tree(self) -> dict[str, Any]:
        """Return the values as a recipe's sections, in the order of the schema."""
        tree: dict[str, Any] = {}
        for key in keys_of(self.launch.kind):
            if key in self.values:
                branch = tree
                *sections, leaf = key.split(".")
                for name in sections:
                    branch = branch.setdefault(name, {})
                branch[leaf] = self.values[key]
        return tree

    @property
    def model_name(self) -> str:
        """Return the checkpoint's path or id in lower case."""
        return str(self.values.get("model.path", "")).lower()

    def note(self, text: str, *names: str, subject: str = "", otherwise: str = "", is_change: bool = True) -> None:
        """Add a note on a subject, and on those of the flags and variables that the command gives; if there is neither,
        on `otherwise`. Without any of these, add nothing."""
        given = self._labels(names)
        unsaid = [self.shown(label) for label in given if label.rpartition(" ")[2] not in subject]
        if shown := ", ".join(filter(None, (subject, *unsaid))) or otherwise:
            self.notes.append(Note(labels=given, subject=shown, text=text, is_change=is_change))

    def _labels(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the labels of what the command gives. A variable's name is in capitals and is its label."""
        labels = (name if name.isupper() or name.startswith("--") or " " in name else f"--{name}" for name in names)
        return tuple(label for label in labels if label in self.given)

    def shown(self, label: str) -> str:
        """Return what was given as it is written, but a secret without its value and an address without its
        credentials."""
        return label.replace("launcher ", "the launcher's ") if self.is_secret(label) else redact(self.given[label])

    def is_secret(self, label: str) -> bool:
        """Return whether the name looks like that of a secret and the tables do not list it; a number of tokens is not
        a secret."""
        name = label.rpartition("--")[2]
        known = self.launch.row_of(label)
        value = self.given[label].partition(" " if "--" in self.given[label] else "=")[2]
        is_named = known is not None and "*" not in known.name
        is_count = "token" in name.lower() and _COUNT.fullmatch(value) is not None
        return is_secret_name(name) and not is_named and not is_count

    def account(self) -> None:
        """Add a note for everything given that has no key and no note yet, and for what only the shell knows."""
        set_by = {label for origin in self.origins.values() for label in origin.labels}
        spoken = set_by | {label for note in self.notes for label in note.labels}
        for label in [label for label in self.given if label not in spoken]:
            self._note_label(label, *self._told(label))
        used = set_by | {label for note in self.notes if note.is_change for label in note.labels}
        used |= {"CUDA_VISIBLE_DEVICES", "launcher --gpu_ids"} if self.launch.counts_gpus else set()
        for label, text in self.given.items():
            is_told = label in self.launch.unknown_process_labels or self.is_secret(label)
            if re.search(r"[$`]", text) and label in used and not is_told:
                what = "script" if self.launch.is_code else "shell"
                self._note_label(label, f"holds what only the {what} knows; write its value", True)

    def _note_label(self, label: str, text: str, is_change: bool) -> None:
        self.notes.append(Note(labels=(label,), subject=self.shown(label), text=text, is_change=is_change))

    def _told(self, label: str) -> tuple[str, bool]:
        """Return the note on what sets no key, and whether the user should look at it."""
        name = label.rpartition("--")[2]
        is_flag = label.startswith("--")
        row = self.launch.row_of(label)
        if self.is_secret(label):
            return "a secret stays out of the recipe; export it as an environment variable", False
        if row is not None:
            is_default = is_flag and _same(self.launch.flags[name], row.default)
            return row.told(), row.treatment in ("nearest", "none") and not is_default
        if is_flag:
            return f"is not known; {self._nearest(name)}", True
        if "launcher" in label:
            return "is not a known flag", True
        return "tiercel does not read it; export it if your own code reads it", False

    def _nearest(self, name: str) -> str:
        """Return a hint at the nearest of the peer's flags, or else of the keys."""
        flags = get_close_matches(name, list(self.launch.rows), n=1, cutoff=0.8)
        if flags:
            return f"{self.launch.spelt(flags[0])} was perhaps meant"
        near = nearest_key(name)
        return f"nearest is {near.key}" if near.key else "has no equivalent"


def _same(given: tuple[str, ...], default: tuple[str, ...]) -> bool:
    """Return whether words mean the same: true is equal to True, and 1 to 1.0."""
    return tuple(map(_plain, given or ("true",))) == tuple(map(_plain, default))


def _plain(word: str) -> str:
    try:
        return repr(float(word))
    except ValueError:
        return {"none": "", "null": ""}.get(word.lower(), word.lower())


def set_by_rows(draft: RecipeDraft) -> None:
    """Set the keys that take the value of a flag or variable unchanged."""
    flags = {f"--{name}": words for name, words in draft.launch.flags.items()}
    variables = {name: (value,) for name, value in draft.launch.environment.items()}
    for label, words in {**flags, **variables}.items():
        row = draft.launch.row_of(label)
        if row is not None and row.treatment == "set":
            _set_by_row(draft, row, label, words)


def defaults_by_rows(draft: RecipeDraft) -> None:
    """Set the keys that take a flag's value unchanged, and are not set, to the peer's defaults if the recipe's own
    defaults differ."""
    launch, known = draft.launch, keys_of(draft.launch.kind)
    for name, row in launch.rows.items():
        key = row.key if row.treatment == "set" and row.default else None
        if key is not None and key in known and key not in draft.values:
            value = _value(known[key].field.annotation, name, row.default)
            if value not in (None, known[key].field.default):
                draft.set(key, value, remark=f"{launch.framework}'s default of {launch.spelt(name)}")


def _set_by_row(draft: RecipeDraft, row: TableRow, label: str, words: tuple[str, ...]) -> None:
    known, key = keys_of(draft.launch.kind), row.key
    if key is None or key not in known:
        return
    name, annotation = label.removeprefix("--"), known[key].field.annotation
    own = words_of(name)
    if not words and "true or false" not in _type(annotation) and "true" not in own:
        draft.note("is given without a value", name)
        return
    value = _value(annotation, label, words or ("true",))
    if value is None:
        if row.default:
            draft.note(f"{draft.launch.framework}'s default; {key} keeps its own", name, is_change=False)
        return
    word: Any = value
    if isinstance(value, str):
        word = word_synonyms().get(key, {}).get(value.lower(), value) if not own or value in own.values() else None
    draft.set(key, value if word is None else word, name, remark=row.remark)
    if word is None:
        draft.note(f"is not in this version; {key} is one of {', '.join(allowed_words(annotation))}", name)


def _type(annotation: Any) -> str:
    is_switch = annotation is bool or "false" in allowed_words(annotation)
    return "true or false" if is_switch else str(annotation)


def _value(annotation: Any, label: str, words: tuple[str, ...]) -> Any:
    """Convert a flag's words to a key's type; None for "none" and "null". Raises ValueError if the key needs a
    number, true or false, or values by name, and the word is none of these."""
    kind = _type(annotation)
    if len(words) == 1 and words[0].lower() in ("none", "null"):
        return None
    if own := words_of(label.removeprefix("--")):
        words = tuple(own.get(word.lower(), word) for word in words)
        if words == ("-",):
            return None
    if kind.startswith("tuple"):
        return [number_of(label, word) if "float" in kind else word for word in words]
    if kind == "true or false":
        if words[0].lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{label} {words[0]} is neither true nor false; use one of these instead")
        return words[0].lower() in ("true", "1")
    if "Mapping" in kind:
        text = " ".join(words)
        if (values := mapping_in(text)) is None:
            raise ValueError(f"{label} {text} is not a mapping; write it as {{name: value}}")
        return values
    if re.search(r"\bfloat\b", kind):
        return number_of(label, words[0])
    if re.search(r"\bint\b|Literal\[\d", kind):
        return whole_number_of(label, words[0])
    return " ".join(words)
