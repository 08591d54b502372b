"""The commands and flags of the command line, each with its help."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tiercel import __version__
from tiercel.cli.values import at_least, directory, port, size, words
from tiercel.config import Kind
from tiercel.config.schema import Quantization
from tiercel.planning.devices import DEVICES

SHELLS = ("bash", "zsh", "tcsh")
PAGE = "--view"
OVERRIDES_HELP = "any key of the recipe, as in optim.lr=1e-5 or rewards.0.weight=2"


TRAINING: dict[Kind, str] = {
    "sft": "supervised fine-tuning",
    "dpo": "learn from pairs of a chosen and a rejected answer: DPO, IPO, MPO, ORPO, SimPO, CPO",
    "kto": "learn from answers that are labelled good or bad: KTO",
    "reward": "train a reward model on pairs of a chosen and a rejected answer",
    "distill": "learn what a teacher says of the policy's own answers, or of those in the rows",
    "grpo": "reinforcement by GRPO",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tiercel",
        description="LoRA fine-tuning and GRPO of vision-language models.",
        epilog="example: tiercel grpo recipes/demo-grpo.yaml train.steps=20 output=runs/try",
    )
    parser.add_argument("--version", action="version", version=f"tiercel {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help='print what makes the shell complete commands: eval "$(tiercel --print-completion bash)"',
    )
    parser.set_defaults(without_command=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    text = "train a tiny VLM on real handwritten digits, on a CPU, in minutes"
    demo = _command(commands, "demo", text, "tiercel demo")
    demo.add_argument(
        "--pairs",
        action="store_true",
        help="in a checkout: pointing at a digit, learnt from the IoU, from pairs, and from a teacher",
    )
    demo.add_argument(
        "--zoom", action="store_true", help="in a checkout: digits too small to be told, and a tool that enlarges them"
    )
    demo.add_argument(
        "--real", action="store_true", help="SmolLM2-135M and a published data set, both from the package index"
    )

    _init_command(commands)
    for kind, text in TRAINING.items():
        example = f"tiercel {kind} recipes/demo-{kind}.yaml train.steps=20 output=runs/try"
        command = _recipe_command(commands, kind, text, example, takes_ranks=True)
        command.add_argument(
            PAGE, action="store_true", help="serve a page of the run beside it; its address is printed"
        )

    for add in (_check_command, _data_command, _plan_command, _doctor_command, _serve_command, _import_command):
        add(commands)
    _commands_after_a_run(commands)
    return parser


class PrintCompletion(argparse.Action):
    """Prints a shell's completion script for all commands and options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: Any, option: str | None = None):
        import shtab  # needed only here

        for each in _every_action(parser):
            if each.type in (Path, directory) or each.dest in ("target", "model", "given"):
                each.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def _every_action(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _every_action(command)


def _check_command(commands) -> None:
    check = _recipe_command(
        commands, "check", "find everything that can fail, before it costs time", "tiercel check recipes/demo-grpo.yaml"
    )
    check.add_argument("--decode", action="store_true", help="decode every picture; else only headers are read")
    check.add_argument("--fix-report", action="store_true", help="write every rejected row with its reason to a file")
    check.add_argument(
        "--report-file", type=Path, metavar="FILE", help="the file for --fix-report (rejected_rows.jsonl)"
    )


def _init_command(commands) -> None:
    init = _command(
        commands,
        "init",
        "write a recipe from six questions, or from flags",
        "tiercel init --data rows.jsonl --task boxes --gpu 24GB --file boxes.yaml",
    )
    init.add_argument("--model", help="a directory, or a name on the hub")
    init.add_argument("--data", help="the rows: a file or a directory")
    init.add_argument("--method", help="grpo, sft, dpo, kto or reward")
    init.add_argument(
        "--task", help="what the answers are: boxes, points, count, number, choice, math, text, reasoning"
    )
    init.add_argument("--gpu", metavar="MEMORY", help="memory of the GPU, such as 24GB, or none")
    init.add_argument("--output", help="the directory of the run")
    init.add_argument("--file", type=Path, default=Path("recipe.yaml"), help="the recipe to write (recipe.yaml)")


def _data_command(commands) -> None:
    data = commands.add_parser("data", help="look at the rows of a recipe")
    data.set_defaults(without_command=data)
    looks = data.add_subparsers(dest="look", metavar="COMMAND")
    preview = _recipe_command(
        looks,
        "preview",
        "write a page of the first rows as the model will see them",
        "tiercel data preview recipes/demo-grpo.yaml --rows 20 --output preview.html",
    )
    preview.add_argument("--rows", type=at_least(1), default=20, metavar="N", help="how many (20)")
    preview.add_argument(
        "--output", type=Path, default=Path("preview.html"), metavar="FILE", help="where the page goes (preview.html)"
    )
    fetch = _recipe_command(
        looks,
        "fetch",
        "download the pictures that rows name by https URLs, once, and write rows with the names of the files",
        "tiercel data fetch recipe.yaml --to fetched",
    )
    fetch.add_argument(
        "--to", type=Path, default=Path("fetched"), metavar="FOLDER", help="where pictures and rows go (fetched)"
    )
    fetch.add_argument("--parallel", type=at_least(1), default=16, metavar="N", help="downloads at a time (16)")
    text = "make the indexes of large files of rows, before a run does at its first start"
    _recipe_command(looks, "index", text, "tiercel data index recipe.yaml data.cache=/scratch/cache")


def _plan_command(commands) -> None:
    plan = _recipe_command(
        commands,
        "plan",
        "estimate memory and time on each GPU, without weights and without a GPU",
        "tiercel plan recipes/qwen25vl-72b-grpo.yaml --gpus 8 --gpu-memory 80GB",
    )
    plan.add_argument("--gpus", type=at_least(1), default=1, metavar="N", help="ranks (1)")
    plan.add_argument("--gpu-memory", type=size, metavar="SIZE", help="of each, such as 80GB or 24GiB (80GB)")
    plan.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="of each machine, for offloading (this machine's, if it has the GPUs)",
    )
    plan.add_argument("--device", choices=DEVICES, help="the GPU that the seconds are estimated for (h100)")
    plan.add_argument("--prompt-tokens", type=at_least(1), metavar="N", help="of a prompt (data.max_prompt_tokens)")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument(
        "--fit", type=size, metavar="SIZE", help="write the nearest recipe that fits GPUs of this memory, such as 24GB"
    )
    plan.add_argument("--output", type=Path, metavar="FILE", help="for --fit (RECIPE-SIZE.yaml, beside the recipe)")


def _doctor_command(commands) -> None:
    doctor = _command(
        commands,
        "doctor",
        "check this machine: versions, devices, known bad pairs, and how to correct each",
        "tiercel doctor",
    )
    doctor.add_argument("--json", action="store_true", help="the verdicts as JSON")


def _serve_command(commands) -> None:
    serve = _recipe_command(
        commands,
        "serve",
        "start a vLLM server with the flags that a recipe needs, on this machine, until Ctrl-C",
        "tiercel serve recipes/qwen25vl-3b-vllm-grpo.yaml --port 8000",
    )
    serve.add_argument("--port", type=port, metavar="N", help="on 127.0.0.1 (the recipe's rollout.urls, else 8000)")
    serve.add_argument(
        "--vllm", type=words, default=[], metavar="WORDS", help='more words for vLLM, as in "--tensor-parallel-size 2"'
    )
    serve.add_argument("--print", action="store_true", help="print the command line, for another machine, and end")


def _import_command(commands) -> None:
    importing = _command(
        commands,
        "import-command",
        "make a recipe from a command of ms-swift, TRL, VLM-R1 or LLaMA-Factory, or from a file with one",
        'tiercel import-command "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct --dataset rows.jsonl"',
    )
    importing.add_argument("given", metavar="COMMAND", help="in quotes, or a file: a script, a YAML of settings")
    importing.add_argument(
        "--output", type=Path, metavar="RECIPE", help="the file to write; without it the recipe is printed"
    )


def _commands_after_a_run(commands) -> None:
    text = "score held-out rows with the prompt and parser of training"
    evaluation = _command(commands, "eval", text, "tiercel eval runs/demo", takes_ranks=True)
    evaluation.add_argument("target", help="a recipe, or the directory of a run")
    evaluation.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES_HELP)
    evaluation.add_argument(
        "--adapter", type=directory, help="an adapter directory; without it a run's newest checkpoint"
    )
    text = "write the completions and their rewards, as in evaluations/ of a run; of a run, those after training. The "
    text += "command that was ended goes on from there if you start it again"
    evaluation.add_argument("--output", type=Path, metavar="FILE", help=text)

    predict = _command(
        commands,
        "predict",
        "complete one prompt",
        'tiercel predict runs/demo --image sheet.png "Where is the 7?"',
    )
    predict.add_argument("model", help="a model directory or id, or a run directory")
    predict.add_argument("prompt", help="the user turn; <image> marks an image's place, else images come first")
    predict.add_argument("--image", type=Path, action="append", default=[], help="an image file; may be repeated")
    predict.add_argument("--adapter", type=directory, help="an adapter directory")
    _add_checkpoint(predict)
    predict.add_argument(
        "--quantize", choices=get_args(Quantization), help="as the model.quantize that the adapter was trained with"
    )
    predict.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="at most (256)")
    predict.add_argument("--environment", metavar="NAME", help="which of the recipe's environments answers")

    export = _command(
        commands, "export", "write what a run trained as a Hugging Face directory", "tiercel export runs/demo --merge"
    )
    export.add_argument("run", type=Path, help="a run directory")
    form = export.add_mutually_exclusive_group(required=True)
    form.add_argument("--merge", action="store_true", help="the whole model, adapter merged into the weights")
    form.add_argument("--adapter", action="store_true", help="the adapter alone, in PEFT's format")
    _add_checkpoint(export)
    target = export.add_mutually_exclusive_group()
    target.add_argument("--output", type=Path, help="the directory to write (default: RUN/model or RUN/adapter)")
    target.add_argument("--push", metavar="NAME", help="send it to the Hugging Face hub instead, with a model card")
    export.add_argument("--public", action="store_true", help="make the repository of --push public")

    replay = _command(
        commands,
        "replay",
        "find the row and layer that made an update that was not finite",
        "tiercel replay runs/demo model.dtype=float32",
    )
    replay.add_argument("run", type=Path, help="a run directory")
    replay.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES_HELP)
    replay.add_argument("--step", type=at_least(0), metavar="N", help="the step (the last that was not finite)")

    runs = _command(
        commands, "runs", "list runs: state, step, best and newest score, what stopped each", "tiercel runs runs/"
    )
    runs.add_argument(
        "folders", type=Path, nargs="*", default=[Path("runs")], metavar="FOLDER", help="where to look (runs)"
    )
    text = "instead: the numbers of these runs side by side, and what differs in their recipes"
    runs.add_argument("--compare", type=Path, nargs="+", metavar="RUN", help=text)
    runs.add_argument("--json", action="store_true", help="the list, or the comparison, as JSON")

    view = _command(
        commands, "view", "show runs on a page of this machine that follows them", "tiercel view runs/demo runs/other"
    )
    view.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory, or a folder with several")
    view.add_argument("--port", type=port, metavar="N", help="on 127.0.0.1 (the first free one from 8420)")
    view.add_argument("--beside", type=at_least(1), help=argparse.SUPPRESS)  # pid of the parent, with which it ends

    report = _command(commands, "report", "write a run's report.html again", "tiercel report runs/demo")
    report.add_argument("run", type=Path, help="a run directory")

    text = "print what the policy answered in a step, with rewards and advantages"
    rollouts = _command(commands, "rollouts", text, "tiercel rollouts runs/demo --step 20")
    rollouts.add_argument("run", type=Path, help="a run directory")
    rollouts.add_argument("--step", type=at_least(1), metavar="N", help="of this step (the newest)")
    rollouts.add_argument("--prompts", type=at_least(1), default=4, metavar="N", help="at most this many prompts (4)")


def _command(commands, name: str, text: str, example: str, *, takes_ranks: bool = False) -> argparse.ArgumentParser:
    parents = [rank_options()] if takes_ranks else []
    return commands.add_parser(name, help=text, description=text, epilog=f"example: {example}", parents=parents)


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint of a run other than the newest."""
    which = command.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=at_least(0), metavar="N", help="of a run: the checkpoint of this step")
    text = "of a run: the checkpoint with the best evaluation, by train.keep_best or else by what was recorded"
    which.add_argument("--best", action="store_true", help=text)


def _recipe_command(
    commands, name: str, text: str, example: str, *, takes_ranks: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a command that takes a recipe and overrides."""
    command = _command(commands, name, text, example, takes_ranks=takes_ranks)
    command.add_argument("recipe", type=Path, help="a recipe (YAML)")
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES_HELP)
    return command


def rank_options() -> argparse.ArgumentParser:
    """Return the parser of the options that only the launcher reads. The ranks get all other options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nproc", type=at_least(1), default=1, metavar="N", help="ranks to start on this machine (1)")
    parser.add_argument(
        "--max-restarts",
        type=at_least(0),
        default=0,
        metavar="N",
        help="how often to resume by itself after a rank failed (0)",
    )
    return parser
