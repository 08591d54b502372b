"""`tiercel serve`: a vLLM server with the flags that a recipe needs, on this machine."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tiercel.config import GrpoRecipe, detect_kind, load_recipe
from tiercel.data.reading import read_run_rows
from tiercel.errors import RecipeError
from tiercel.models.loading import load_family
from tiercel.reliability.redaction import redact
from tiercel.rollout.serving import (
    arguments_here,
    new_key,
    served,
    server_arguments,
    server_port,
    shell_line,
    watch,
)
from tiercel.rollout.vllm_http import KEY_VARIABLE
from tiercel.runs.stopping import StopRequest
from tiercel.training.sampling import images_per_prompt


def serve_recipe(
    path: Path, overrides: Sequence[str], port: int | None, more: Sequence[str], *, only_print: bool
) -> None:
    """Serve until SIGINT or SIGTERM, with `more` words for vLLM; with `only_print` say the command line for another
    machine and end."""
    recipe = load_recipe(detect_kind(path, overrides), path, overrides)
    if not isinstance(recipe, GrpoRecipe) or recipe.lora is None:
        raise RecipeError([f"{path}: a server samples for GRPO with lora; this recipe has no use for one"])
    family = load_family(recipe.model, recipe.data.template)
    rows = read_run_rows(recipe.data, "grpo").every
    images, port = images_per_prompt(rows), server_port(recipe, port)
    if only_print:
        print(redact(shell_line([*server_arguments(recipe, family, images), *more], port)))
        return
    arguments = [*arguments_here(recipe, family, images), *more]
    key = new_key()
    with StopRequest() as stop:
        started = time.monotonic()
        with served(arguments, port, key, say=print, is_over=lambda: stop.is_set) as process:
            if not stop.is_set:
                seconds = time.monotonic() - started
                address = f"http://127.0.0.1:{port}"
                print(f"vLLM (process {process.pid}) answers on {address} after {seconds:.0f} s; train by")
                if not os.environ.get(KEY_VARIABLE):  # one of the user's own is not shown
                    print(f"  export {KEY_VARIABLE}={key}")
                words = redact(" ".join([str(path), *overrides]))
                print(f"  tiercel grpo {words} rollout.engine=vllm-server 'rollout.urls=[{address}]'", flush=True)
            watch(process, lambda: stop.is_set)
