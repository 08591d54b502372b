"""Try `tiercel import-command` on the peers' own example commands, and count the outcomes.

    python -m benchmarks.coming_from --swift DIR --vlm-r1 DIR --trl DIR --llama-factory DIR --easyr1 DIR --verl DIR

Each DIR is a checkout. Writes benchmarks/results/coming_from.json and the table in docs/coming-from.md, which have only
counts.
"""

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tables import RESULTS, markdown_table
from tiercel.cli.import_command import first_launch
from tiercel.config.loading import problems_of_text
from tiercel.convert.conversion import draft_of, refusals
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch, launch_of
from tiercel.convert.preferences import needs_reference
from tiercel.convert.shell import commands
from tiercel.convert.table import OVERRIDING
from tiercel.convert.text import recipe_text
from tiercel.convert.tuning import tuner_of
from tiercel.errors import RecipeError
from tools.docs.tables import write_table

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from.md"
VISION = re.compile(r"VL|-vl|Omni|OCR|MAX_PIXELS|MAX_TOKEN_NUM|freeze_vit|Ovis|MiniCPM-V|Keye|[Gg]emma-?4|GLM-4\.\dV")
PREFERENCES = "preferences, teachers, reward models"
PATHS = re.compile(
    r"(rewards(\.|:)|(model|teacher|rewards\.\d+\.model)\.path|data\.(train|eval|image_root|template|mix\.\d+\.(path|image_root))|lora\.init|rollout\.urls)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A command of a peer."""

    peer: str
    name: str
    script: str
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one command. `problems` are those of the recipe that are neither about a path nor about a reward.
    `silent` is what was given and is neither a value of the recipe, nor in a comment, nor reported."""

    peer: str
    name: str
    state: str  # recipe, refused, no command, fault
    told: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def swift_examples(root: Path) -> Iterator[Example]:
    """Yield the scripts of reinforcement learning, preferences and teachers, and the SFT scripts of models that see."""
    for file in sorted((root / "examples").rglob("*.sh")):
        text = file.read_text(encoding="utf-8")
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        name = str(file.relative_to(root))
        if re.search(r"rlhf_type[ =]+grpo", code):
            yield Example(peer="ms-swift, GRPO", name=name, script=text, file=file)
        elif re.search(r"rlhf_type[ =]+\w", code):
            yield Example(peer=f"ms-swift, {PREFERENCES}", name=name, script=text, file=file)
        elif re.search(r"swift sft|cli/sft\.py", code) and VISION.search(code):
            yield Example(peer="ms-swift, SFT with pictures", name=name, script=text, file=file)


def vlm_r1_examples(root: Path) -> Iterator[Example]:
    for folder in ("run_scripts", "src/open-r1-multimodal/run_scripts", "src/open-r1-multimodal/local_scripts"):
        for file in sorted((root / folder).glob("*.sh")):
            name = str(file.relative_to(root))
            yield Example(peer="VLM-R1", name=name, script=file.read_text(encoding="utf-8"), file=file)


def trl_examples(root: Path) -> Iterator[Example]:
    """Yield the commands in the docstrings of TRL's scripts for models that see, and of those for preferences and
    teachers."""
    scripts = root / "examples" / "scripts"
    others = ("dpo", "kto", "orpo", "cpo", "gkd", "reward", "reward_modeling", "bco", "online_dpo", "prm")
    more = [
        file for name in others for folder in (scripts, root / "trl" / "scripts") for file in folder.glob(f"{name}.py")
    ]
    seen = sorted(scripts.glob("*_vlm*.py"))
    for peer, files in (("TRL, pictures", seen), (f"TRL, {PREFERENCES}", more)):
        for file in files:
            for number, command in enumerate(_documented(_texts(file))):
                name = f"{file.relative_to(root)}, {number}"
                yield Example(peer=peer, name=name, script=command, file=file.with_suffix(".sh"))


def llama_factory_examples(root: Path) -> Iterator[Example]:
    """Yield LLaMA-Factory's YAML files that name a stage, and its scripts."""
    for file in sorted([*(root / "examples").rglob("*.yaml"), *(root / "examples").rglob("*.sh")]):
        text = file.read_text(encoding="utf-8")
        if re.search(r"^stage:|llamafactory-cli train|src/train\.py", text, re.MULTILINE):
            yield Example(peer="LLaMA-Factory", name=str(file.relative_to(root)), script=text, file=file)


def overriding_examples(root: Path, peer: str, module: str) -> Iterator[Example]:
    """Yield scripts, and files of settings, that start a module with KEY=VALUE."""
    for file in sorted([*(root / "examples").rglob("*.sh"), *(root / "examples").rglob("config.yaml")]):
        text = file.read_text(encoding="utf-8")
        if re.search(module, text, re.MULTILINE):
            yield Example(peer=peer, name=str(file.relative_to(root)), script=text, file=file)


def _texts(file: Path) -> str:
    """Return all top-level strings of a script, because in some the licence comes before the docstring."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    strings = [
        node.value.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return "\n".join(text for text in strings if isinstance(text, str))


def _documented(text: str) -> list[str]:
    joined = re.sub(r"\\\s*\n", " ", text)
    return [line for line in joined.splitlines() if re.match(r"(accelerate launch|python|trl) ", line)]


def outcome_of(example: Example) -> Outcome:
    try:
        found = [
            launch for command in commands(example.script, example.file)
            if (launch := launch_of(command, example.file)) is not None
        ]  # fmt: skip
        if not found:
            return Outcome(peer=example.peer, name=example.name, state="no command")
        launch = first_launch(found)
        if lines := refusals(launch):
            return Outcome(peer=example.peer, name=example.name, state="refused", told=tuple(lines))
        draft = draft_of(launch)
    except RecipeError as error:
        return Outcome(peer=example.peer, name=example.name, state="refused", told=(str(error),))
    except ValueError as error:
        return Outcome(peer=example.peer, name=example.name, state="fault", told=(str(error),))
    draft.values.setdefault("output", "runs/imported")
    text = recipe_text(draft)
    problems = tuple(line for line in problems_of_text(text, launch.kind) if not PATHS.match(line))
    silent = (*unspoken(draft, text), *wrong(draft))
    return Outcome(peer=example.peer, name=example.name, state="recipe", problems=problems, silent=silent)


def unspoken(draft: RecipeDraft, text: str) -> tuple[str, ...]:
    """Return the flags, variables and their words that do not occur in the recipe's text."""
    flat = " ".join((text + " ".join(map(str, draft.values.values()))).split())
    numbers = {float(word) for word in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)}
    missing = []
    for label, given in draft.given.items():
        name = label.replace("launcher ", "the launcher's ")
        name = name if given.startswith(name) or "launcher" in name else name.removeprefix("--")
        words = [] if draft.is_secret(label) else given.removeprefix(name).lstrip(" =").split()
        lost = [word for word in words if word.strip("'\"") not in flat and not _is_number(word, numbers)]
        if name not in flat or lost:
            missing.append(f"{name} {' '.join(lost)}".strip())
    return tuple(missing)


def _is_number(word: str, numbers: set[float]) -> bool:
    try:
        return float(word) in numbers
    except ValueError:
        return False


def _same_number(flag: str, key: str) -> Callable[[Launch, RecipeDraft], bool]:
    """Return a check that the key has the flag's number if the flag is given."""
    return lambda launch, draft: flag not in launch.flags or draft.values.get(key) == launch.real(flag)


def _offloads(launch: Launch, draft: RecipeDraft) -> bool:
    asked = (launch.words("deepspeed") or ("",))[0]
    if "offload" not in asked or draft.values.get("train.strategy") != "deepspeed":
        return True
    both = bool(draft.values.get("train.deepspeed.offload_parameters")) or "zero2" in asked
    return both and bool(draft.values.get("train.deepspeed.offload_optimizer"))


def _tower_stays(launch: Launch, draft: RecipeDraft) -> bool:
    frozen = (("freeze_vit", "freeze_aligner"), ("freeze_vision_tower", "freeze_multi_modal_projector"))
    is_asked = any(launch.is_true(tower) and launch.is_true(projector) for tower, projector in frozen)
    is_lora = tuner_of(launch) == "lora" and not {"target_regex", "lora_target"} & set(launch.flags)
    return not (is_asked and is_lora) or draft.values.get("lora.targets", "language") == "language"


def _rollout_is_whole(launch: Launch, draft: RecipeDraft) -> bool:
    """Return whether prompts x completions is at least what a rollout, and an update, has in the command."""
    if launch.kind != "grpo":
        return True
    if launch.framework in OVERRIDING:  # there, prompts are counted
        asked = launch.number("data.train_batch_size") or launch.number("data.rollout_batch_size")
        return draft.values.get("optim.prompts_per_step", 16) == asked
    each = (launch.number("per_device_train_batch_size") or 1) * launch.processes
    accumulated = launch.number("gradient_accumulation_steps") or 1
    rollout = launch.number("generation_batch_size") or each * (launch.number("steps_per_generation") or accumulated)
    size, group = max(rollout, each * accumulated), draft.values.get("rollout.group_size", 8)
    return size - group < draft.values.get("optim.prompts_per_step", 16) * group <= size or size < group


def _trackers_are_there(launch: Launch, draft: RecipeDraft) -> bool:
    given = launch.flags.get("trainer.logger" if launch.framework in OVERRIDING else "report_to", ())
    asked = {word for value in given for word in re.split(r"[\s,]+", value)}
    return asked & {"wandb", "tensorboard", "swanlab", "trackio", "mlflow"} == set(draft.values.get("trackers", []))


def _preference_scale(launch: Launch, draft: RecipeDraft) -> bool:
    flag = "pref_beta" if launch.framework == "LLaMA-Factory" else "beta"
    return launch.kind not in ("dpo", "kto") or draft.values.get(f"{launch.kind}.beta", 0.1) == launch.real(flag)


def _recomputes(launch: Launch) -> bool:
    if launch.framework in OVERRIDING:
        part = "actor_rollout_ref" if launch.framework == "verl" else "worker.actor"
        return launch.is_true(f"{part}.model.enable_gradient_checkpointing")
    return launch.is_true("gradient_checkpointing") and not launch.is_true("disable_gradient_checkpointing")


def _overrides_are_there(launch: Launch, draft: RecipeDraft) -> bool:
    """Return whether the most important numbers, given or by default, are those of the recipe."""
    if launch.framework not in OVERRIDING:
        return True
    defaults = {"optim.lr": 1e-5, "rollout.group_size": 8, "rollout.max_new_tokens": 256, "rollout.temperature": 1.0}
    return all(draft.values.get(key, usual) == launch.real(launch.flag_of(key)) for key, usual in defaults.items())


# Mistakes that were found at least once, as predicates; True means correct.
KNOWN: dict[str, Callable[[Launch, RecipeDraft], bool]] = {
    "the learning rate": _same_number("learning_rate", "optim.lr"),
    "the temperature": _same_number("temperature", "rollout.temperature"),
    "the completion's length": _same_number("max_completion_length", "rollout.max_new_tokens"),
    "the KL weight": _same_number("beta", "algorithm.kl.coef"),
    "beta of preferences": _preference_scale,
    "the reference's copy": lambda launch, draft: (
        tuner_of(launch) != "full" or ("model.reference" in draft.values) == needs_reference(draft)
    ),
    "one completion of a prompt for a teacher": lambda launch, draft: (
        launch.kind != "distill" or draft.values.get("rollout.group_size") == 1
    ),
    "the longest row": _same_number("cutoff_len", "data.max_prompt_tokens"),
    "completions of a prompt": _same_number("num_generations", "rollout.group_size"),
    "weight decay": _same_number("weight_decay", "optim.weight_decay"),
    "the size of a rollout": _rollout_is_whole,
    "MAX_PIXELS": lambda launch, draft: (
        "MAX_PIXELS" not in launch.environment or "max_pixels" in launch.flags
        or draft.values.get("model.max_pixels") == int(launch.environment["MAX_PIXELS"])
    ),
    "held-out rows": lambda launch, draft: (
        launch.kind == "distill"  # without rewards, which score them; a note reports it
        or not (share := launch.real("split_dataset_ratio"))
        or draft.values.get("data.eval") == {"fraction": share}
    ),
    "a system message is no file's name": lambda launch, draft: (
        not str(draft.values.get("data.system", "")).endswith((".txt", ".md"))
    ),
    "checkpointing": lambda launch, draft: (
        draft.values.get("learner.gradient_checkpointing", False) == _recomputes(launch)
    ),
    "keys of EasyR1 and verl": _overrides_are_there,
    "workers": lambda launch, draft: (
        launch.framework in OVERRIDING or "dataloader_num_workers" in launch.flags or "data.workers" not in draft.values
    ),
    "trackers": _trackers_are_there,
    "offloads": _offloads,
    "parts that stay": _tower_stays,
}  # fmt: skip


def wrong(draft: RecipeDraft) -> tuple[str, ...]:
    """Return the names of the checks that a recipe fails."""
    launch = draft.launch
    own = {name: holds for name, holds in KNOWN.items() if launch.kind == "grpo" or name not in _OF_GRPO}
    return tuple(f"check: {name}" for name, holds in own.items() if not holds(launch, draft))


_OF_GRPO = (
    "the temperature",
    "the completion's length",
    "the KL weight",
    "completions of a prompt",
    "the size of a rollout",
)


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, or an empty string if it is not one."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def table_of(outcomes: Sequence[Outcome]) -> str:
    header = ("examples of", "tried", "no method of tiercel, told", "nothing to read, told", "a recipe",
              "valid but for paths and rewards", "without a silent change")  # fmt: skip
    rows = []
    for peer in dict.fromkeys(each.peer for each in outcomes):
        own = [each for each in outcomes if each.peer == peer]
        made = [each for each in own if each.state == "recipe"]
        rows.append(
            (
                peer,
                str(len(own)),
                str(sum(each.state == "refused" for each in own)),
                str(sum(each.state in ("no command", "fault") for each in own)),
                str(len(made)),
                str(sum(not each.problems for each in made)),
                str(sum(not each.silent for each in made)),
            )
        )
    total = [str(sum(int(row[column]) for row in rows)) for column in range(1, len(header))]
    return markdown_table(header, [*rows, ("all", *total)])


def quoted(outcomes: Sequence[Outcome], commits: Mapping[str, str]) -> str:
    """Return the text for the document."""
    named = ", ".join(f"{name} at {commit[:7]}" for name, commit in commits.items())
    return f"{table_of(outcomes)}\nTried on {named}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("swift", "vlm-r1", "trl", "llama-factory", "easyr1", "verl"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="a checkout")
        parser.add_argument(f"--{name}-commit", default=None, help="its commit, where the folder is no git checkout")
    asked = parser.parse_args()
    examples = [
        *sorted(swift_examples(asked.swift), key=lambda example: example.peer),
        *vlm_r1_examples(asked.vlm_r1),
        *trl_examples(asked.trl),
        *llama_factory_examples(asked.llama_factory),
        *overriding_examples(asked.easyr1, "EasyR1", r"-m verl\.trainer\.main |^worker:"),
        *overriding_examples(asked.verl, "verl", r"-m verl\.trainer\.\w+"),
    ]
    outcomes = [outcome_of(example) for example in examples]
    commits = {
        "modelscope/ms-swift": asked.swift_commit or commit_of(asked.swift),
        "om-ai-lab/VLM-R1": asked.vlm_r1_commit or commit_of(asked.vlm_r1),
        "huggingface/trl": asked.trl_commit or commit_of(asked.trl),
        "hiyouga/EasyR1": asked.easyr1_commit or commit_of(asked.easyr1),
        "volcengine/verl": asked.verl_commit or commit_of(asked.verl),
        "hiyouga/LLaMA-Factory": asked.llama_factory_commit or commit_of(asked.llama_factory),
    }
    kept = [{**asdict(each), "told": len(each.told)} for each in outcomes]
    (RESULTS / "coming_from.json").write_text(json.dumps({"commits": commits, "examples": kept}, indent=1) + "\n")
    write_table(DOCUMENT, "coverage", quoted(outcomes, commits))
    for each in outcomes:
        if each.state == "fault" or each.problems or each.silent:
            print(each.name, each.state, *each.told, *each.problems, *each.silent, sep="\n    ")
    print(table_of(outcomes))


if __name__ == "__main__":
    main()
