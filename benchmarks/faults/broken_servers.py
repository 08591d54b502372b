"""A vLLM server that fails in the fifth rollout: no traceback, no learning from wrong data, and the server is named.

    python -m benchmarks.faults --only "a broken vLLM server"

Each case is a run of the command line, in a process that was forked after torch was imported, against a server that
really samples, passes the gate, and answers four rollouts well. Then it gives one of the hostile answers of
tests/rollout/hostile_answers.py, or answers that are plausible except for their numbers.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.faults.child import take_own_locks
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import Ended, TinyRuns, run, steps_recorded
from tests.rollout.hostile_answers import HostileAnswer, Tokens, hostile_answers
from tests.rollout.sampling_server import SamplingServer, version_of
from tests.rollout.scripted_server import Answer, Raw, serving
from tiercel.cli.main import main
from tiercel.config import load_recipe
from tiercel.config.schema import GrpoRecipe
from tiercel.training import run as training_run
from tiercel.training.grpo import loop as grpo

IMPORTED = (training_run, grpo)  # imported here, so that forked runs need not import it
GOOD_ROLLOUTS = 4
STEPS = 6
QUICK = ("rollout.patience=3", "rollout.request_timeout=2")  # for requests that are retried until the patience is over
SHORT = 2
SECONDS = 240.0
EXIT_CODES = {"left out": 3, "patience": 3, "at once": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """Answers of the right form with wrong numbers."""

    make: Callable[[Answer], Answer]
    code: int
    says: str
    arguments: tuple[str, ...] = ()
    learnt: int = GOOD_ROLLOUTS  # steps


def broken_servers(size: Size, seed: int, work: Path) -> Figure:
    """Run every hostile answer, or a few drawn ones, then the gaps."""
    started = time.perf_counter()
    runs = TinyRuns(work)
    file = runs.recipe("grpo", "model", train={"steps": STEPS, "save_every": 2})
    recipe = load_recipe("grpo", file, [])
    assert isinstance(recipe, GrpoRecipe)
    family = SamplingServer(recipe).policy.family
    answers = hostile_answers(
        Tokens(
            vocabulary=family.vocabulary_size,
            placeholder=family.placeholder_ids[0],
            end=family.checkpoint.end_token_ids[0],
        )
    )
    names = list(answers) if size == "full" else random.Random(seed).sample(list(answers), SHORT)
    outcomes: list[Outcome] = [(name, _answer_problem(runs, recipe, answers[name], number)) for number, name in
                               enumerate(names)]  # fmt: skip
    gaps = _gaps() if size == "full" else {}
    outcomes += [(name, _gap_problem(runs, recipe, gap, number)) for number, (name, gap) in enumerate(gaps.items())]
    problems = [problem for _, problem in outcomes if problem is not None]
    return figure_of(
        "a broken vLLM server",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "answers": len(names),
            "gaps": len(gaps),
            "tracebacks": sum("traceback" in problem for problem in problems),
            "accepted_wrong": sum("accepted" in problem for problem in problems),
        },
    )


def _answer_problem(runs: TinyRuns, recipe: GrpoRecipe, hostile: HostileAnswer, number: int) -> str | None:
    name = f"answer-{number}"
    file = runs.recipe("grpo", name, train={"steps": STEPS, "save_every": 2})
    with serving(SamplingServer(recipe)) as server:
        if hostile.of_models:
            _lose_once(server, hostile.make)
        else:
            server.tamper = lambda answer: hostile.make(answer) if _is_late(answer) else _good(answer)
        quick = QUICK if hostile.ending == "patience" else ()
        ended = _command(file, *_by(server), *quick)
        url = server.url
    return _problem(ended, runs.work / name, EXIT_CODES[hostile.ending], (url, hostile.says), GOOD_ROLLOUTS)


def _gap_problem(runs: TinyRuns, recipe: GrpoRecipe, gap: _Gap, number: int) -> str | None:
    name = f"gap-{number}"
    file = runs.recipe("grpo", name, train={"steps": STEPS, "save_every": 2})
    with serving(SamplingServer(recipe)) as server:
        server.tamper = lambda answer: _good(gap.make(answer) if _is_late(answer) else answer)
        command = partial(run, "grpo") if "--nproc" in gap.arguments else _command
        ended = command(file, *_by(server), *gap.arguments)
        url = server.url
    if gap.code == 0:
        return ended.problem(0, "warning: step 5", "warning: step 6", url, gap.says)
    return _problem(ended, runs.work / name, gap.code, (url, gap.says), gap.learnt)


def _command(recipe: Path, *arguments: str) -> Ended:
    """Run `tiercel grpo` to its end."""
    said = recipe.with_suffix(".said")
    process = get_context("fork").Process(target=_main, args=(["grpo", str(recipe), *arguments], said))
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    process.join()
    return Ended(
        code=-signal.SIGKILL if code is None else code,
        said=said.read_text(errors="replace"),
        seconds_from_fault=None,
        seconds_to_stalled=None,
        left=(),
    )


def _main(words: list[str], said: Path) -> None:
    for descriptor, file in ((1, os.devnull), (2, said)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)  # pytest's stderr goes elsewhere
    code = 1
    try:
        take_own_locks()
        code = main(words)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _problem(ended: Ended, run_directory: Path, code: int, words: tuple[str, ...], learnt: int) -> str | None:
    if "Traceback" in ended.said:
        return f"a traceback: {ended.said[-500:]}"
    accepted = [step for step in steps_recorded(run_directory) if step > learnt]
    if accepted:
        return f"accepted in step {accepted[0]}: {ended.said[-500:]}"
    if max(steps_recorded(run_directory), default=0) != learnt:
        return f"went wrong before: {ended.said[-500:]}"
    return ended.problem(code, *words)


def _gaps() -> dict[str, _Gap]:
    wrong = "its logprobs are no longer the learner's"

    def shifted(nats: float) -> Callable[[Answer], Answer]:
        def make(answer: Answer) -> Answer:
            for choice in answer["choices"]:
                for entry in choice["logprobs"]["content"]:
                    entry["logprob"] += nats
            return answer

        return make

    def other_ids(answer: Answer) -> Answer:
        for choice in answer["choices"]:
            choice["token_ids"] = [20 + (token + 7) % 30 for token in choice["token_ids"][:-1]] + [
                choice["token_ids"][-1]
            ]
            for entry in choice["logprobs"]["content"]:
                entry["token"] = "x"  # as from a server that does not know the option
        return answer

    low = shifted(-5.0)
    return {
        "logprobs 5 too low": _Gap(make=low, code=3, says=wrong),
        "logprobs 0.1 too low": _Gap(make=shifted(-0.1), code=3, says=wrong),
        "other token ids than were scored": _Gap(make=other_ids, code=3, says=wrong),
        "logprobs 5 too low, two ranks": _Gap(make=low, code=3, says=wrong, arguments=("--nproc", "2")),
        "logprobs 5 too low, an update old": _Gap(
            make=low,
            code=3,
            says=wrong,
            arguments=("rollout.lookahead=1", "algorithm.correction.level=token"),
            learnt=GOOD_ROLLOUTS + 1,
        ),
        "logprobs 5 too low, top_k": _Gap(make=low, code=3, says=wrong, arguments=("rollout.top_k=50",)),
        "logprobs 5 too low, warned of": _Gap(
            make=low, code=0, says=wrong, arguments=("rollout.parity_action=warn",)
        ),
    }  # fmt: skip


def _lose_once(server: SamplingServer, make: Callable[[Answer], Raw]) -> None:
    """Let the server fail once, late. It must be asked what it serves before it is used again."""

    def tamper(answer: Answer) -> Raw:
        if not _is_late(answer):
            return _good(answer)
        server.tamper_models = make
        return Raw(status=500)

    server.tamper = tamper


def _is_late(answer: Answer) -> bool:
    return version_of(answer) >= GOOD_ROLLOUTS


def _good(answer: Answer) -> Raw:
    return Raw(body=json.dumps(answer).encode())


def _by(server: SamplingServer) -> tuple[str, ...]:
    return ("rollout.engine=vllm-server", f"rollout.urls=[{server.url}]")
