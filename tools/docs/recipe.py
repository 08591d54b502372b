"""Generate docs/recipe.md from the schema: `python -m tools.docs.recipe > docs/recipe.md`."""

import inspect
import sys
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from tiercel.config.keys import ENTRY, RECIPES, Key, every_key, type_in_words
from tiercel.config_base import shown
from tiercel.rewards.registry import BY_NAME, CALL, OPTIONS

Say = Callable[[str], str]  # returns a text in the language of the page

HEADER = """\
# The recipe

A recipe is one YAML file with all that a run depends on, except its data and the machine.

    tiercel sft     RECIPE.yaml [key=value ...]
    tiercel dpo     RECIPE.yaml [key=value ...]
    tiercel kto     RECIPE.yaml [key=value ...]
    tiercel reward  RECIPE.yaml [key=value ...]
    tiercel distill RECIPE.yaml [key=value ...]
    tiercel grpo    RECIPE.yaml [key=value ...]

The smallest recipes:

```yaml
# sft.yaml
model: {path: Qwen/Qwen2-VL-2B-Instruct}
lora: {rank: 16, alpha: 32}
data: {train: train.jsonl}
train: {epochs: 1}
output: runs/sft
```

```yaml
# grpo.yaml
model: {path: Qwen/Qwen2-VL-2B-Instruct}
lora: {rank: 16, alpha: 32}
data: {train: train.jsonl}
rewards: [{name: exact}, {name: format, weight: 0.2}]
train: {steps: 500}
output: runs/grpo
```

Longer ones, with comments, are in `recipes/`.

**How YAML is read.** By the rules of YAML 1.2: `1e-5`, `1.0e-5` and `1E-5` are numbers; `true` and `false` are the
only words for booleans, so `yes`, `no`, `on` and `off` are plain text (as in `choices: [yes, no]`); dates are text.
Underscores may group digits (`1_003_520`). A quoted number is text and is refused where a number is meant. A key
given twice in one section is refused with its lines. The file is UTF-8.

**Overrides.** Any key can be set on the command line, in order, the last one counting:

    tiercel grpo grpo.yaml optim.lr=1e-5 rewards.0.weight=2 'rollout.stop=["</answer>"]' lora=null

The value is YAML, so quote it for the shell where it holds brackets or spaces. Entries of a list are numbered from
0. A section that is missing is made; a whole section given as a value (`optim={lr: 1e-5}`) replaces the old one,
and null takes it out (`train.deepspeed=null`).

**Problems.** An unknown key is refused and the nearest real one named, also by the names that ms-swift, TRL, VLM-R1,
verl, EasyR1 and the Hugging Face Trainer use (`learning_rate`: write `optim.lr`). All problems of a recipe are reported
at once, one line each: the key, the value given, what is wrong and what to write instead. Nothing is filled in or
corrected. `tiercel check RECIPE.yaml` tells them without starting a run; the exit code is 2.

**Paths** are relative to the working directory, except images: relative ones resolve under `data.image_root`, absolute
ones must lie there or under `data.image_roots`.

The sections of a recipe say which command it is for: `sft`, `dpo`, `kto`, `ranking` (`tiercel reward`), `teacher`
(`tiercel distill`). Otherwise a recipe with `rewards`, `rollout` or `algorithm` is for `tiercel grpo`, and one with
none of these for `tiercel sft`.
"""

KEYS_ACROSS = """\
## Keys that must fit together

- Exactly one of `train.steps` and `train.epochs`; `optim.warmup_steps` is at most `train.steps`.
- `train.eval_every` needs `data.eval`; its section has one of `fraction` and `count`.
- `model.min_pixels` is at most `model.max_pixels`; `rollout.min_new_tokens` is at most `rollout.max_new_tokens`.
- `model.revision` goes with a hub model, not with a local directory.
- `model.vision_cache_bytes` above 0 needs a vision tower and projector that are frozen and have no adapters.
- Without `lora` at least one part is left out of `freeze`.
- No name comes twice in `trackers`.
- `learner.max_tokens_per_microbatch` holds a whole row (`data.max_prompt_tokens`); for DPO, KTO and a reward model
  twice that; for GRPO and distillation that plus `rollout.max_new_tokens`. Larger groups are split by completions.
- GRPO: `rollout.group_size` is 2 or more, because the advantage of a single completion is undefined, except with
  `algorithm.advantage: reinforce_pp`.
- GRPO: `optim.minibatches` divides `optim.prompts_per_step`; several updates per rollout (`optim.minibatches` x
  `optim.rollout_epochs`) go with `rollout.top_p: 1` and `rollout.top_k: 0` only. Steps of other verbs are one update.
- Beside `lora` a vision tower or projector that is not in `freeze` is trained whole, so it is not adapted as well.
- `optim.part_lr` names only parts that are trained.
- With `algorithm.kl.coef` above 0, for KTO, and for a loss of DPO that has a reference and no
  `dpo.precompute_reference`, a copy of what is trained whole is kept as the run started (`model.reference`); then
  `train.strategy` is not `deepspeed`, and `algorithm.kl.sync_every` is null.
- GRPO: an option of `algorithm` that its `loss` or `advantage` does not read is refused (docs/algorithms.md).
- GRPO: `lora.dropout` above 0 needs `learner.form: repeated`, because a shared prompt has one dropout mask.
- GRPO: `rewards.N.model.batch_tokens` is at least its `max_tokens`.
- SFT: `sft.label_smoothing` goes with `sft.loss: nll`; `sft.neftune_alpha` goes without `data.group_by_prefix`.
- DPO: an option of `dpo` that its `loss` does not read is refused.
- `data.group_by_prefix` goes without `data.mix`, and not with KTO; `data.rows_per_prefix` goes with it.
- Distillation without `rewards` measures nothing on held-out rows, so it has no `train.keep_best`.
- Distillation: of `algorithm` only what is no matter of rewards; `teacher.mix` goes with `divergence: jsd`, and
  `teacher.top_k` not with `divergence: token`; `teacher.url` with `teacher.top_k` or `divergence: token`, with
  `rollout.temperature: 1`, and without `teacher.adapter` and `teacher.dtype`.
- Each reward has a `name` or a `call`, and only the options that it takes; none comes twice; not all weights are 0.
"""


def render_reference() -> str:
    """Return the text of docs/recipe.md."""
    return "\n".join([HEADER, render_keys(), KEYS_ACROSS])


def render_keys(say: Say = str, say_type: Say = str) -> str:
    """Return the tables of all keys. `say` translates texts, and `say_type` translates types in words."""
    keys = every_key()
    top = [key for key in keys if not key.parent and _is_value(key)]
    parts = [_table(f"## {say('Top level')}", top, say, say_type)]
    for section in (key for key in keys if key.section is not None):
        own = [key for key in keys if key.parent in (section.path, _entry(section)) and _is_value(key)]
        parts.append(_table(f"## `{section.path}`\n\n{_notes(section, say)}", own, say, say_type))
        if section.path == "rewards":
            parts.append(_reward_options(say))
    return "\n".join(parts)


def _entry(section: Key) -> str:
    return f"{section.path}.{ENTRY}"


def _notes(section: Key, say: Say) -> str:
    """Return what a section is, and which commands have it."""
    assert section.section is not None
    notes = [say((inspect.getdoc(section.section) or "").strip())]
    verbs = {kind: f"`tiercel {kind}`" for kind, recipe in RECIPES.items() if section.path in recipe.model_fields}
    notes += [say("Only {0}.").format(f" {say('and')} ".join(verbs.values()))] if 0 < len(verbs) < len(RECIPES) else []
    if section.is_list_of_sections:
        notes.append(say("A list; each entry has these keys."))
    if section.path == "lora":
        text = "Optional: without the section there are no adapters, and every part not in `freeze` is trained."
        notes.append(say(text))
    elif section.field.default is None:
        notes.append(say("Optional."))
    elif section.field.is_required():
        needing = [verb for kind, verb in verbs.items() if RECIPES[kind].model_fields[section.path].is_required()]
        some = say("Required for {0}.").format(f" {say('and')} ".join(needing))
        notes.append(some if len(needing) < len(verbs) else say("Required."))
    return ("" if say("key") != "key" else " ").join(notes)


def options_of(name: str) -> tuple[str, ...]:
    """Return the keys that a reward takes besides those of every reward, its own first. `name` may be "call"."""
    keys = [key for key in OPTIONS if key in BY_NAME[name].model_fields and key != CALL]
    return tuple(sorted(keys, key=("answer_column", "correct_at").__contains__))


def _is_value(key: Key) -> bool:
    """Return whether the key may hold a plain value; some of these may hold a section too."""
    members = _members(key.field.annotation)
    return key.section is None or str in members or any(get_origin(each) is Literal for each in members)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the annotation itself if it is not a union."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for argument in get_args(annotation) for member in _members(argument))
    return (annotation,)


def _table(title: str, keys: list[Key], say: Say, say_type: Say) -> str:
    head = f"| {' | '.join(map(say, ('key', 'type', 'default', 'meaning')))} |"
    return "\n".join([title, "", head, "|---|---|---|---|", *(_row(key, say, say_type) for key in keys), ""])


def _row(key: Key, say: Say, say_type: Say) -> str:
    meaning = say(" ".join(key.meaning.split())).replace("|", "\\|").replace("<", "&lt;")
    return f"| `{key.leaf}` | {say_type(type_in_words(key.field))} | {_default(key, say)} | {meaning} |"


def _default(key: Key, say: Say) -> str:
    if key.field.default is PydanticUndefined:
        return say("required")
    return f"`{shown(key.field.default)}`"


def _reward_options(say: Say) -> str:
    rows = [
        f"| {'`call`' if name == CALL else f'`name: {name}`'} | {', '.join(map('`{}`'.format, options_of(name)))} |"
        for name in BY_NAME
    ]
    head = f"| {say('reward')} | {say('options it takes, beside `weight`')} |"
    table = "\n".join([head, "|---|---|", *rows])
    return f"{table}\n"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
