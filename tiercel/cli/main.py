"""The command line. Nothing heavy is imported before the recipe is known to be right."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercel import __version__
from tiercel.errors import TiercelError

OVERRIDES_HELP = "any key of the recipe, as in optim.lr=1e-5 or rewards.0.weight=2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 the user's input, 3 the training, 75 stopped and saved."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        COMMANDS[arguments.command](arguments)
    except TiercelError as error:
        print(f"tiercel {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def entry_point() -> None:
    """The `tiercel` script."""
    sys.exit(main())


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
        _recipe_arguments(_command(commands, kind, text, example))

    check = _command(
        commands, "check", "everything that can fail, before it costs time", "tiercel check recipes/demo-grpo.yaml"
    )
    _recipe_arguments(check)

    evaluation = _command(commands, "eval", "held-out score, greedy, same prompt and parser", "tiercel eval runs/demo")
    evaluation.add_argument("target", help="a GRPO recipe, or the directory of a GRPO run")
    evaluation.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    evaluation.add_argument("--adapter", type=Path, help="an adapter directory; without it a run's newest checkpoint")

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

    report = _command(commands, "report", "write a run's report.html anew", "tiercel report runs/demo")
    report.add_argument("run", type=Path, help="a run directory")
    return parser


def _command(commands, name: str, text: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a recipe (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)


def _sft(arguments: argparse.Namespace) -> None:
    from tiercel.config import load_recipe

    recipe = load_recipe("sft", arguments.recipe, arguments.overrides)
    from tiercel.training import sft
    from tiercel.training.ending import run_recipe

    print(run_recipe(sft.train, recipe))


def _grpo(arguments: argparse.Namespace) -> None:
    from tiercel.config import load_recipe

    recipe = load_recipe("grpo", arguments.recipe, arguments.overrides)
    from tiercel.training import grpo
    from tiercel.training.ending import run_recipe

    print(run_recipe(grpo.train, recipe))


def _demo(arguments: argparse.Namespace) -> None:
    from tiercel.demo.command import demo

    demo()


def _check(arguments: argparse.Namespace) -> None:
    from tiercel.cli.check import check

    check(arguments.recipe, arguments.overrides)


def _eval(arguments: argparse.Namespace) -> None:
    from tiercel.cli.evaluate import evaluate_target

    evaluate_target(Path(arguments.target), arguments.overrides, arguments.adapter)


def _predict(arguments: argparse.Namespace) -> None:
    from tiercel.cli.predict import predict

    print(predict(arguments.model, arguments.prompt, arguments.image, arguments.adapter, arguments.max_new_tokens))


def _export(arguments: argparse.Namespace) -> None:
    from tiercel.cli.export import export

    print(export(arguments.run, merge=arguments.merge, output=arguments.output))


def _report(arguments: argparse.Namespace) -> None:
    from tiercel.report import write_report

    print(write_report(arguments.run))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": _demo,
    "sft": _sft,
    "grpo": _grpo,
    "check": _check,
    "eval": _eval,
    "predict": _predict,
    "export": _export,
    "report": _report,
}
