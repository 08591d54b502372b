"""The messages of tiercel to a user, collected from its code: `python -m tools.messages` prints those without Chinese.

A message is a text with a space and a word in one of MODULES. The fields of an f-string are numbered: "{0} given". A
count with its noun (`counted`) gives two messages, "{0} row" and "{0} rows".
"""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from string import Formatter

from tiercel.config.keys import RECIPES, every_key, named
from tiercel.config.synonyms import NOT_YET, key_synonyms
from tiercel.data.formats.registry import FORMATS
from tiercel.messages import LANGUAGES, table
from tiercel.rewards.registry import BY_NAME, lowered
from tiercel.tables import table_rows

PACKAGE = Path(__file__).parents[1] / "tiercel"

# Modules with what `check` and `doctor` print and refuse, the stall report, and the errors that a user meets most. A
# folder means all its modules.
MODULES = (
    "errors.py",
    "config_base.py",
    "user_functions.py",
    "geometry.py",
    "image_decoding.py",
    "processes.py",
    "config",
    "rewards/*.py",
    "doctor",
    "reliability/stall.py",
    "reliability/diagnosis.py",
    "cli/main.py",
    "cli/init.py",
    "cli/check.py",
    "cli/doctor.py",
    "cli/dry_run.py",
    "cli/import_command.py",
    "cli/evaluate.py",
    "cli/predict.py",
    "inference_and_export/generate.py",
    "cli/recipes.py",
    "cli/replay.py",
    "cli/values.py",
    "data",
    "models/families/consistency.py",
    "models/families/loading.py",
    "models/weights/checkpoint_files.py",
    "models/weights/loading.py",
    "models/prompts.py",
    "models/rendering.py",
    "models/turn_texts.py",
    "models/chat.py",
    "models/families/base.py",
    "training/start_checks.py",
    "trackers/opening.py",
    "packing/forward_equivalence_check.py",
    "algorithms/custom_trial.py",
    "algorithms/custom.py",
    "convert/manual_steps.py",
    "distributed/exit_diagnosis.py",
    "convert/shell.py",
    "packing/pass_options.py",
    "models/weights/memory_errors.py",
    "runs/directory.py",
    "runs/identity.py",
    "runs/recipe.py",
    "rewards/runtime/signature_adapters.py",
    "rewards/runtime/metrics.py",
    "sandbox/process.py",
    "rewards/runtime/scorer.py",
    "sandbox/supervisor.py",
    "rewards/runtime/user.py",
    "rewards/runtime/worker.py",
    "training/nonfinite_guard.py",
    "training/replay.py",
    "training/run.py",
    "training/run_content.py",
    "training/rows.py",
    "writing.py",
)
# Only the errors of these are collected: their other texts are for files, pages and the log.
ERRORS_OF = ("algorithms", "api", "cli", "convert", "demo", "distributed", "http_json.py", "models", "packing",
             "planning", "rewards/runtime", "rollout", "runs", "sandbox", "inference_and_export", "training",
             "web/report", "web/view/page_process.py", "web/view/runs.py", "web/view/serving.py")  # fmt: skip
TABLES = tuple(PACKAGE / name for name in ("doctor/advice.json", "doctor/pairs.json", "reliability/card_faults.json"))
WORD = re.compile(r"[A-Za-z]{2,}")
KEPT = Path(__file__).with_name("kept_messages.json")  # commands, keys, patterns: the same in every language

# Texts that the code puts together from pieces, so that none of its strings contains them whole.
PUT_TOGETHER = (
    "above {0}",
    "below {0}",
    "at least {0}",
    "at most {0}",
    "importing what `tiercel {0}` needs ...",
    "matrix product {0}",
    "attention {0}",
    "text or list: each text",
    "text or texts by name",
    "section with {0} or {1}",
    "{0} or section with {1}",
    "{0} or section with {1} or {2}",
    "one of {0} or section with {1} or {2}",
    "one of {0} or section with {1}",
    "{0} or `auto`",
    "has no value, but {0}",
    "list of {0}: each {1}, such as {2}",
    "least {0}",
    "median {0}",
    "most {0}",
    "rank {0} is in {1}",
    "rank {0} is in {1}; the others wait for it",
    "rank {0} is in a different collective from the others: {1}",
    "rank {0} has entered {1}, but is in other code there, {2}; the others wait for it",
    "rank {0} gives no sign of life: {1}; it was last in {2}",
    "rank {0} waits in {1}",
    "rank {0} works in {1}",
    "ranks {0} wait in {1}",
    "ranks {0} work in {1}",
    "{0} and {1} more",
    "{0} ({1}, process {2})",
    "{0}, before tiercel's own first line",
    "phase {0} of {1}",
    "phase {0} of {1}, rows {2}",
    "{0}, phase {1} of {2}",
    "{0}, phase {1} of {2}, rows {3}",
    *map(named, RECIPES),
    "; ".join(f"{name} ({each.marks})" for name, each in FORMATS.items()),
    "the number of <image> marks is {0}, but the number of images is {1}",
    "the number of <video> marks is {0}, but the number of videos is {1}",
    "the loss is nan",
    "the gradient norm is nan",
    "{0} for rows unknown; no parameter was changed",
    "lower learner.max_tokens_per_microbatch ({0}), or set learner.gradient_checkpointing: full",
    "lower learner.max_tokens_per_microbatch ({0}), or on a CPU, set rollout.prepacked_bytes: 0",
    "lower learner.max_tokens_per_microbatch ({0}), or set learner.gradient_checkpointing: full, or on a CPU, set "
    "rollout.prepacked_bytes: 0",
    "{0} has no function {1}; its functions are: none",
    "{0} is a class that requires {1}; give them in the reward's `arguments`",
    "{0} is a {1}, which cannot be called",
    "freeze: this model has no parameters in {0}; take it out of freeze",
    "freeze: this model has no parameters in {0}; add it to freeze",
    f"{{0}} is {NOT_YET}",
    "rank {0} was killed by {1}: {2}",
    "{0} is not a method of this version; nearest: {1}",
    "{0} does not say by its name what it trains; nearest: {1}",
    "{0} is not a script of {1}, which has no {2}; nearest: the flags of `{3}`",
    "{0}: flags of ms-swift 2, whose defaults differ too; write the command for ms-swift 3, with --model, "
    "--train_type, --target_modules and --per_device_train_batch_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A text of the code, with `{0}`, `{1}` for what is filled in."""

    text: str
    place: str  # file and line


def messages() -> list[Message]:
    """Collect the messages of MODULES in the order of the code, each text once."""
    found = [message for module in MODULES for file in files_of(module) for message in messages_of(file)]
    found += [message for module in ERRORS_OF for file in files_of(module) for message in errors_of(file)]
    found += [Message(text=text, place="tools/messages.py") for text in PUT_TOGETHER]
    found += [Message(text=text, place="tiercel/config/problems.py") for text in _missing_keys()]
    found += [message for table in TABLES for message in _strings(json.loads(table.read_text(encoding="utf-8")), table)]
    hints = [each.hint for each in key_synonyms().values()]
    hints += [reason for _, reason in table_rows("tiercel.config.conflicts", "vllm_options.txt")]
    hints += [text for _, *texts in table_rows("tiercel.config.conflicts", "compiling.txt") for text in texts]
    hints += [text for _, *texts in table_rows("tiercel.reliability", "symptoms.txt") for text in texts]
    hints += [text for _, *texts, _ in table_rows("tiercel.data.formats", "formats.txt") for text in texts]
    hints += [_numbered(text) for _, text in table_rows("tiercel.data", "texts.txt")]
    hints += [meaning for _, meaning in table_rows("tiercel.reliability", "process_states.txt")]
    hints += [question for _, question, *_ in table_rows("tiercel.cli", "questions.txt")]
    hints += [cause for _, cause in table_rows("tiercel.distributed", "causes.txt")]
    hints += [_numbered(text) for _, _, text in table_rows("tiercel.config.conflicts", "conflicts.txt")]
    found += [Message(text=hint, place="tiercel/config/synonyms/keys.txt") for hint in hints if " " in hint]
    return list({message.text: message for message in reversed(found)}.values())[::-1]


def _numbered(text: str) -> str:
    """Number the fields of a text for `str.format` in their order, and write braces of the text itself once."""
    numbers = count()
    parsed = Formatter().parse(text)
    return "".join(words if field is None else f"{words}{{{next(numbers)}}}" for words, field, *_ in parsed)


def _strings(tree: object, file: Path) -> Iterator[Message]:
    """Collect the texts of a table in JSON."""
    own = [each for name, each in tree.items() if name not in ("pattern", "seen")] if isinstance(tree, dict) else tree
    inner = own if isinstance(own, list) else ()
    for each in inner:
        yield from _strings(each, file)
    if isinstance(tree, str) and " " in tree:
        yield Message(text=tree, place=str(_short(file)))


def _missing_keys() -> Iterator[str]:
    """Yield what is said about a required key that is missing: the beginning of its description."""
    required = [key.meaning for key in every_key() if key.section is None and key.field.is_required()]
    for reward in BY_NAME.values():
        fields = reward.model_fields.items()
        required += [
            reward.meanings()[leaf] for leaf, field in fields if field.is_required() and leaf in reward.meanings()
        ]
    for meaning in required:
        yield lowered(" ".join(meaning.split())).partition(";")[0].rstrip(".")


def files_of(module: str) -> list[Path]:
    """Return the files of one of MODULES."""
    path = PACKAGE / module
    return sorted(path.rglob("*.py") if path.is_dir() else PACKAGE.glob(module))


def messages_of(file: Path) -> Iterator[Message]:
    """Collect the messages in a file of code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from _messages_in(tree, set(_no_messages(tree)), file)


def errors_of(file: Path) -> Iterator[Message]:
    """Collect the messages of the errors that a file of code raises, and of what its functions put into them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = set(_no_messages(tree))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        raised = [node for node in ast.walk(function) if _is_error(node)]
        names = {name.id for node in raised for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in [*raised, *_assigned(function, names), *_constants(tree, names)]:
            yield from _messages_in(node, parts, file)


def _constants(tree: ast.Module, names: set[str]) -> Iterator[ast.AST]:
    """Yield the values of the module's constants with these names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and names & {each.id for each in node.targets if isinstance(each, ast.Name)}:
            yield node.value


def _is_error(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith(("Error", "Problem"))
    return isinstance(node, ast.Raise) and node.exc is not None


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> Iterator[ast.AST]:
    """Yield the values that a function assigns to these names."""
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        given = {
            name.id for each in targets if each is not None for name in ast.walk(each) if isinstance(name, ast.Name)
        }
        if given & names and isinstance(node, ast.Assign | ast.For | ast.NamedExpr):
            yield node.iter if isinstance(node, ast.For) else node.value


def _messages_in(within: ast.AST, parts: set[ast.AST], file: Path) -> Iterator[Message]:
    """Collect the messages of a node, except for `parts` of its tree, which contain none."""
    for node in ast.walk(within):
        if node in parts:
            continue
        for text in _texts(node):
            bare = re.sub(r"\{\w+\}", "", text)
            if " " in text.strip() and WORD.search(bare):
                yield Message(text=text, place=f"{_short(file)}:{getattr(node, 'lineno', 0)}")


def _short(file: Path) -> Path:
    return file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield _template(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "counted":
        nouns = [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
        yield from (f"{{0}} {noun}" for noun in (nouns if len(nouns) > 1 else [nouns[0], f"{nouns[0]}s"]))


def _template(node: ast.JoinedStr) -> str:
    number = 0
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value
        else:
            text += f"{{{number}}}"
            number += 1
    return text


def _no_messages(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that contain text but no message: docstrings, annotations, patterns, and the pieces of
    f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield from (part for part in node.values if isinstance(part, ast.Constant))
            yield from (
                part.format_spec for part in node.values if isinstance(part, ast.FormattedValue) and part.format_spec
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("re.compile", "re.fullmatch", "re.search"):
            yield from ast.walk(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("conflict", "described", "told"):
            yield node.args[0]  # a name in a table
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                yield from ast.walk(annotation)


def missing(language: str) -> list[Message]:
    """Return the messages that have no translation."""
    known = {text.strip() for text in table(language)} | set(kept())
    return [message for message in messages() if message.text.strip() not in known]


def kept() -> list[str]:
    """Return the texts that are the same in every language."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def main(languages: Iterable[str] = LANGUAGES) -> None:
    """Print the missing messages as JSON, to be filled in."""
    for language in languages:
        json.dump({message.text: message.place for message in missing(language)}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
