"""`tiercel serve`: start a vLLM server on this machine with the flags that a recipe needs."""

import os
import time
from argparse import Namespace

from tiercel.config import GrpoRecipe
from tiercel.data.reading import read_run_rows
from tiercel.errors import EnvironmentProblem
from tiercel.log import printed
from tiercel.models.families.loading import family_of
from tiercel.reliability.redaction import redact
from tiercel.rollout.vllm.http import DEV_MODE, KEY_VARIABLE, servers_key
from tiercel.rollout.vllm.serving import (
    arguments_here,
    new_key,
    served,
    server_arguments,
    server_port,
    shell_line,
    watch,
)
from tiercel.runs.ending import StopRequest
from tiercel.training.grpo.policy_sync import visuals_per_completion


def run(recipe: GrpoRecipe, arguments: Namespace) -> None:
    """Serve until SIGINT or SIGTERM, with the additional words of `--vllm`. With `--print`, print the command line for
    another machine and exit."""
    family = family_of(recipe)
    rows = read_run_rows(recipe.data, "grpo").every
    if recipe.lora is None and not arguments.print and os.environ.get(DEV_MODE) != "1":
        raise EnvironmentProblem(
            f"{DEV_MODE}=1 is not set; without lora, a server accepts all weights at a path of vLLM that does not "
            "ask for a key; set it if only you can reach the port, or add the section lora"
        )
    visuals, port = visuals_per_completion(recipe, rows), server_port(recipe, arguments.port)
    if arguments.print:
        print(redact(shell_line([*server_arguments(recipe, family, visuals), *arguments.vllm], port)))
        return
    command = [*arguments_here(recipe, family, visuals), *arguments.vllm]
    key = new_key()
    with StopRequest() as stop:
        started = time.monotonic()
        with printed(), served(command, port, key, is_over=lambda: stop.is_set) as process:
            if not stop.is_set:
                seconds = time.monotonic() - started
                address = f"http://127.0.0.1:{port}"
                print(f"vLLM (process {process.pid}) answers on {address} after {seconds:.0f} s; train by")
                if servers_key() is None:  # a key that the user has set is not shown
                    print(f"  export {KEY_VARIABLE}={key}")
                words = redact(" ".join([str(arguments.recipe), *arguments.overrides]))
                print(f"  tiercel grpo {words} rollout.engine=vllm-server 'rollout.urls=[{address}]'", flush=True)
            watch(process, lambda: stop.is_set)
