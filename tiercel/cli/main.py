"""The command line. Nothing heavy is imported before the recipe is known to be right."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercel import __version__
from tiercel.distributed.launch import leave, note_code, start_notes
from tiercel.errors import ElsewhereError, RecipeError, TiercelError
from tiercel.reliability.redaction import redact, redact_given
from tiercel.reliability.tracebacks import redact_tracebacks

OVERRIDES_HELP = "any key of the recipe, as in optim.lr=1e-5 or rewards.0.weight=2"

SECONDS_TO_SPEAK = 2.0  # before this rank's end makes the launcher end the one at fault
DEVICE_NAMES = ("h100", "h200", "a100", "l40s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 the user's input, 3 the training, 4 a stall, 75 stopped after
    saving."""
    parser = build_parser()
    arguments = parse(parser, argv)
    if (code := start_notes()) is not None:
        return code
    try:
        COMMANDS[arguments.command](arguments)
    except ElsewhereError as error:  # who failed says so
        note_code(error.exit_code)
        if "RANK" in os.environ:
            time.sleep(SECONDS_TO_SPEAK)
        return error.exit_code
    except TiercelError as error:
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"tiercel {arguments.command}{rank}: {_told(error)}", file=sys.stderr)
        note_code(error.exit_code)
        return error.exit_code
    return 0


def _told(error: TiercelError) -> str:
    """The error's text without secrets."""
    text = redact(str(error))
    return redact_given(text) if isinstance(error, RecipeError) else text


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand behind options too, where argparse does not look for them."""
    arguments, left = parser.parse_known_args(argv)
    if left and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(redact(f"unrecognized arguments: {' '.join(left)}"))
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def entry_point() -> None:
    """The `tiercel` script."""
    redact_tracebacks()
    leave(main())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tiercel",
        description="LoRA fine-tuning and GRPO of vision-language models.",
        epilog="example: tiercel grpo recipes/demo-grpo.yaml train.steps=20 output=runs/try",
    )
    parser.add_argument("--version", action="version", version=f"tiercel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _command(commands, "demo", "train a tiny VLM on real handwritten digits, on a CPU, in minutes", "tiercel demo")

    for kind, text in (("sft", "supervised fine-tuning"), ("grpo", "reinforcement by GRPO")):
        example = f"tiercel {kind} recipes/demo-{kind}.yaml train.steps=20 output=runs/try"
        command = _command(commands, kind, text, example)
        _recipe_arguments(command)
        _rank_arguments(command)

    _commands_before_a_run(commands)
    _commands_after_a_run(commands)
    return parser


def _commands_before_a_run(commands) -> None:
    check = _command(
        commands, "check", "everything that can fail, before it costs time", "tiercel check recipes/demo-grpo.yaml"
    )
    _recipe_arguments(check)
    check.add_argument("--decode", action="store_true", help="decode every picture; without it headers are read")
    check.add_argument("--fix-report", action="store_true", help="write every rejected row with its reason to a file")
    check.add_argument(
        "--report-file", type=Path, default=Path("rejected_rows.jsonl"), metavar="FILE", help="(rejected_rows.jsonl)"
    )

    data = commands.add_parser("data", help="look at the rows of a recipe")
    looks = data.add_subparsers(dest="look", required=True, metavar="COMMAND")
    preview = _command(
        looks,
        "preview",
        "the first rows as the model will see them, as a page to open",
        "tiercel data preview recipes/demo-grpo.yaml --rows 20 --output preview.html",
    )
    _recipe_arguments(preview)
    preview.add_argument("--rows", type=_count, default=20, metavar="N", help="how many (20)")
    preview.add_argument(
        "--output", type=Path, default=Path("preview.html"), metavar="FILE", help="where the page goes (preview.html)"
    )

    plan = _command(
        commands,
        "plan",
        "memory and time on each GPU, without weights and without a GPU",
        "tiercel plan recipes/qwen25vl-72b-grpo.yaml --gpus 8 --gpu-memory 80GB",
    )
    _recipe_arguments(plan)
    plan.add_argument("--gpus", type=_count, default=1, metavar="N", help="ranks (1)")
    plan.add_argument("--gpu-memory", default="80GB", metavar="SIZE", help="of each, such as 80GB or 24GiB (80GB)")
    plan.add_argument("--device", choices=DEVICE_NAMES, default="h100", help="whose figures the seconds assume (h100)")
    plan.add_argument("--prompt-tokens", type=_count, metavar="N", help="of a prompt (data.max_prompt_tokens)")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")

    doctor = _command(
        commands,
        "doctor",
        "this machine: versions, devices, known bad pairs, and what mends each",
        "tiercel doctor",
    )
    doctor.add_argument("--json", action="store_true", help="the verdicts as JSON")

    serve = _command(
        commands,
        "serve",
        "a vLLM server with the flags that a recipe needs, on this machine, until Ctrl-C",
        "tiercel serve recipes/qwen25vl-3b-vllm-grpo.yaml --port 8000",
    )
    _recipe_arguments(serve)
    serve.add_argument("--port", type=_count, metavar="N", help="on 127.0.0.1 (the recipe's rollout.urls, else 8000)")
    serve.add_argument("--vllm", default="", metavar="WORDS", help='more for vLLM, as in "--tensor-parallel-size 2"')
    serve.add_argument("--print", action="store_true", help="say the command line, for another machine, and end")

    importing = _command(
        commands,
        "import-command",
        "a recipe from a command line of ms-swift, TRL or VLM-R1, or from a shell script that has one",
        'tiercel import-command "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct --dataset rows.jsonl"',
    )
    importing.add_argument("given", metavar="COMMAND", help="in quotes, or the file of a script")
    importing.add_argument("--output", type=Path, metavar="RECIPE", help="where to write it (printed without)")


def _commands_after_a_run(commands) -> None:
    evaluation = _command(
        commands, "eval", "held-out score or loss, by training's own prompt and parser", "tiercel eval runs/demo"
    )
    evaluation.add_argument("target", help="a recipe, or the directory of a run")
    evaluation.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    evaluation.add_argument("--adapter", type=Path, help="an adapter directory; without it a run's newest checkpoint")
    _rank_arguments(evaluation)

    predict = _command(
        commands,
        "predict",
        "complete one prompt",
        'tiercel predict runs/demo --image scene.png "Where is the seven?"',
    )
    predict.add_argument("model", help="a model directory or id, or a run directory")
    predict.add_argument("prompt", help="the user turn; <image> marks an image's place, else images come first")
    predict.add_argument("--image", type=Path, action="append", default=[], help="an image file; may be repeated")
    predict.add_argument("--adapter", type=Path, help="an adapter directory")
    predict.add_argument("--max-new-tokens", type=int, default=256)

    export = _command(
        commands, "export", "a Hugging Face directory of what a run trained", "tiercel export runs/demo --merge"
    )
    export.add_argument("run", type=Path, help="a run directory")
    form = export.add_mutually_exclusive_group(required=True)
    form.add_argument("--merge", action="store_true", help="the whole model, adapter merged into the weights")
    form.add_argument("--adapter", action="store_true", help="the adapter alone, in PEFT's format")
    export.add_argument("--output", type=Path, help="where to (default: RUN/model or RUN/adapter)")

    replay = _command(
        commands,
        "replay",
        "which row and layer made an update that was not finite",
        "tiercel replay runs/demo model.dtype=float32",
    )
    replay.add_argument("run", type=Path, help="a run directory")
    replay.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    replay.add_argument("--step", type=_count, metavar="N", help="the step (the last that was not finite)")

    report = _command(commands, "report", "write a run's report.html anew", "tiercel report runs/demo")
    report.add_argument("run", type=Path, help="a run directory")


def _command(commands, name: str, text: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a recipe (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)


def _rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=_count, default=1, metavar="N", help="ranks to start on this machine (1)")
    parser.add_argument(
        "--max-restarts", type=_count, default=0, metavar="N", help="times to go on by itself after a rank failed (0)"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} given; must be a whole number")
    return int(text)


def _launched(arguments: argparse.Namespace, given: Sequence[str]) -> bool:
    """Whether the command ran as ranks of its own."""
    if arguments.nproc <= 1 and arguments.max_restarts == 0:
        return False
    if "RANK" in os.environ:
        raise RecipeError(["--nproc: a launcher has started this process already as one of its ranks; leave it out"])
    from tiercel.distributed.launch import launch

    launch([arguments.command, *given], max(1, arguments.nproc), arguments.max_restarts)
    return True


def _sft(arguments: argparse.Namespace) -> None:
    from tiercel.config import load_recipe

    recipe = load_recipe("sft", arguments.recipe, arguments.overrides)
    if _launched(arguments, [str(arguments.recipe), *arguments.overrides]):
        return
    from tiercel.training import sft
    from tiercel.training.ending import run_recipe

    if (report := run_recipe(sft.train, recipe)) is not None:
        print(report)


def _grpo(arguments: argparse.Namespace) -> None:
    from tiercel.config import load_recipe

    recipe = load_recipe("grpo", arguments.recipe, arguments.overrides)
    if _launched(arguments, [str(arguments.recipe), *arguments.overrides]):
        return
    from tiercel.training import grpo
    from tiercel.training.ending import run_recipe

    if (report := run_recipe(grpo.train, recipe)) is not None:
        print(report)


def _demo(arguments: argparse.Namespace) -> None:
    from tiercel.demo.command import demo

    demo()


def _check(arguments: argparse.Namespace) -> None:
    from tiercel.cli.check import check

    report = arguments.report_file if arguments.fix_report else None
    check(arguments.recipe, arguments.overrides, report, decodes=arguments.decode)


def _data(arguments: argparse.Namespace) -> None:
    from tiercel.cli.preview import preview

    preview(arguments.recipe, arguments.overrides, arguments.rows, arguments.output)


def _doctor(arguments: argparse.Namespace) -> None:
    from tiercel.cli.doctor import doctor

    doctor(as_json=arguments.json)


def _serve(arguments: argparse.Namespace) -> None:
    from tiercel.cli.serve import serve_recipe

    serve_recipe(
        arguments.recipe,
        arguments.overrides,
        arguments.port,
        shlex.split(arguments.vllm),
        only_print=arguments.print,
    )


def _plan(arguments: argparse.Namespace) -> None:
    from tiercel.cli.plan import plan_recipe

    plan_recipe(
        arguments.recipe,
        arguments.overrides,
        gpus=max(1, arguments.gpus),
        gpu_memory=arguments.gpu_memory,
        device=arguments.device,
        prompt_tokens=arguments.prompt_tokens,
        as_json=arguments.json,
    )


def _eval(arguments: argparse.Namespace) -> None:
    adapter = ["--adapter", str(arguments.adapter)] if arguments.adapter else []
    if _launched(arguments, [arguments.target, *arguments.overrides, *adapter]):
        return
    from tiercel.cli.evaluate import evaluate_target

    evaluate_target(Path(arguments.target), arguments.overrides, arguments.adapter)


def _predict(arguments: argparse.Namespace) -> None:
    from tiercel.cli.predict import predict

    print(predict(arguments.model, arguments.prompt, arguments.image, arguments.adapter, arguments.max_new_tokens))


def _export(arguments: argparse.Namespace) -> None:
    from tiercel.cli.export import export

    print(export(arguments.run, merge=arguments.merge, output=arguments.output))


def _replay(arguments: argparse.Namespace) -> None:
    from tiercel.cli.replay import replay_run

    replay_run(arguments.run, arguments.overrides, arguments.step)


def _import_command(arguments: argparse.Namespace) -> None:
    from tiercel.cli.import_command import import_command

    import_command(arguments.given, arguments.output)


def _report(arguments: argparse.Namespace) -> None:
    from tiercel.report import write_report

    print(write_report(arguments.run))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": _demo,
    "sft": _sft,
    "grpo": _grpo,
    "check": _check,
    "data": _data,
    "plan": _plan,
    "doctor": _doctor,
    "serve": _serve,
    "eval": _eval,
    "predict": _predict,
    "export": _export,
    "replay": _replay,
    "import-command": _import_command,
    "report": _report,
}
