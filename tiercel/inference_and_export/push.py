"""Upload of what a run has trained to the Hugging Face hub, with a model card that is made from the run."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiercel.config import Recipe
from tiercel.config.yaml_text import render
from tiercel.errors import EnvironmentProblem
from tiercel.inference_and_export.export import export
from tiercel.inference_and_export.weights import NEWEST, CheckpointChoice
from tiercel.message_text import first_line
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.directory import read_metrics
from tiercel.web.report.numbers import evenly_spaced
from tiercel.web.report.page import describe
from tiercel.web.report.reading import read_run

TITLES = {"sft": "fine-tuned on answers", "kto": "trained on labelled answers", "reward": "trained as a reward model"}
SHOWN = ("eval/accuracy", "eval/reward/mean", "eval/loss", "reward/mean", "loss")  # of metrics.jsonl, if present
CURVE_ROWS = 12
WEIGHTS = (  # at the top of a repository; a * at the beginning would match those in folders too
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "adapter_model.safetensors", "adapter_config.json",
)  # fmt: skip
VERSIONS = ("tiercel", "torch", "transformers", "peft", "vllm")


def push(
    recipe: Recipe, run: Path, name: str, *, merge: bool, choice: CheckpointChoice = NEWEST, public: bool = False
) -> str:
    """Export a run and upload it to the hub as `name`, such as me/cup. The repository is private unless `public`.
    Returns its address. The token comes from `hf auth login` or HF_TOKEN. Raises the RunErrors of `export`, and
    EnvironmentProblem if the hub refuses."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    with TemporaryDirectory(prefix="tiercel-") as folder:
        made = export(recipe, run, Path(folder) / "model", merge=merge, choice=choice)
        (made / "README.md").write_text(model_card(recipe, run, merge=merge), encoding="utf-8")
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))
        try:
            address = api.create_repo(name, private=not public, exist_ok=True)
            name = address.repo_id  # with the user's name before it
            _require_visibility(name, bool(api.repo_info(name).private), public=public)
            api.upload_folder(
                repo_id=name,
                folder_path=made,
                commit_message=f"Upload of {describe(run)}"[:72],
                delete_patterns=[*WEIGHTS],  # of an earlier upload: they would be loaded beside or in place of these
            )
        except EnvironmentProblem:
            raise
        except (HfHubHTTPError, LocalTokenNotFoundError, HTTPError, OSError, ValueError) as error:
            told = redact(first_line(error))
            remedy = "check the name, and log in with `hf auth login`"
            raise EnvironmentProblem(f"{name} cannot be pushed to the hub: {told}; {remedy}") from error
    return str(address)


def _require_visibility(name: str, is_private: bool, *, public: bool) -> None:
    """Raise EnvironmentProblem for a repository of before that is not as visible as the command wants it."""
    if is_private and public:
        raise EnvironmentProblem(f"{name} exists and is private; make it public on its page, or leave out --public")
    if not is_private and not public:
        raise EnvironmentProblem(f"{name} exists and is public; make it private on its page, or add --public")


def model_card(recipe: Recipe, run: Path, *, merge: bool) -> str:
    """Return the card of a run: what it was made from and how, and with which result. It contains no secret."""
    found = read_run(run)
    what = TITLES.get(recipe.kind, f"trained by {recipe.kind.upper()}")
    is_named = re.fullmatch(r"[\w.-]+/[\w.-]+", recipe.model.path) and not Path(recipe.model.path).exists()
    head = {
        **({"base_model": recipe.model.path} if is_named else {}),
        "library_name": "transformers" if merge else "peft",
        "pipeline_tag": "image-text-to-text",
        "tags": ["tiercel", recipe.kind, *([] if recipe.lora is None else ["lora"])],
    }
    versions = found.environment.get("packages", {})
    lines = [
        f"---\n{render(redact_values(head))}---\n",
        f"# {recipe.model.path.rstrip('/').rpartition('/')[2]}, {what}\n",
        f"{describe(run)}\n",
        *_curve(run),
        "## Recipe\n",
        f"```yaml\n# tiercel {recipe.kind}\n{render(_given(redact_values(recipe.model_dump(mode='json'))))}```\n",
        "## Versions\n",
        ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions) + "\n",
    ]
    return redact("\n".join(lines))


def _curve(run: Path) -> Iterator[str]:
    """Yield a table of the metrics at evenly spaced steps."""
    rows = read_metrics(run)
    shown = [name for name in SHOWN if any(name in row for row in rows)]
    if not shown:
        return
    chosen = evenly_spaced(rows, CURVE_ROWS)
    yield "## Result\n"
    yield f"| step | {' | '.join(shown)} |\n|--:|{'--:|' * len(shown)}"
    yield from (f"| {row['step']} | {' | '.join(_number(row.get(name)) for name in shown)} |" for row in chosen)
    yield ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _given(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without its run directory and without values that are null."""
    return {name: value for name, value in tree.items() if name != "output" and value is not None}
