"""A run directory from Python: its metrics, its rollouts, its weights. Only the functions that need torch import it, so
that a wrong recipe is refused at once."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from tiercel.api.recipe import Recipe
from tiercel.api.running import StepIterator, train
from tiercel.config import Recipe as AnyRecipe
from tiercel.runs.recipe import is_run, load_run_recipe, not_a_run, require_no_redaction
from tiercel.web.report.page import describe, render
from tiercel.web.report.reading import read_run
from tiercel.web.report.rollout_table import StepRollouts, rollouts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The checkpoint with the best evaluation: its step, and the metric and the value that make it the best."""

    step: int
    metric: str
    value: float
    path: Path


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, as returned by `tc.grpo` and the other functions, or `tc.Run("runs/x")` for any run."""

    path: Path

    def __init__(self, path: str | Path):
        object.__setattr__(self, "path", Path(path))

    @property
    def recipe(self) -> AnyRecipe:
        """Return the recipe that the run was made with. Raises RunError if the directory is not a run."""
        return load_run_recipe(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one for each step; `pandas.DataFrame(run.metrics)` is a table. Raises
        RunError if the directory is not a run."""
        from tiercel.runs.directory import read_metrics

        self._require_run()
        return read_metrics(self.path)

    @property
    def steps(self) -> int:
        """Return the number of finished steps."""
        rows = self.metrics
        return rows[-1]["step"] if rows else 0

    def rollouts(self, step: int | None = None) -> StepRollouts:
        """Return a step's prompts with their completions, rewards and advantages, by default the newest step's; they
        print as a table. The result is empty for a method that samples nothing. Raises RunError if the directory is not
        a run."""
        self._require_run()
        return rollouts_of(self.path, step)

    @property
    def best(self) -> Best:
        """Return the checkpoint whose evaluation was best. Raises RunError if none was evaluated."""
        from tiercel.inference_and_export.weights import best_checkpoint

        metric, step, value = best_checkpoint(self.path, self.recipe)
        return Best(step=step, metric=metric, value=value, path=self.path / "checkpoints" / f"step-{step:06d}")

    @overload
    def resume(self, *, iterate: Literal[True], **keys: Any) -> StepIterator: ...
    @overload
    def resume(self, **keys: Any) -> "Run": ...
    def resume(self, **keys: Any) -> "Run | StepIterator":
        """Resume the run, with changed keys such as `steps=400`, in its own directory, also if that was copied or
        moved, with the rows and functions that came from Python. With `iterate=True` you get an iterator over the
        steps."""
        recipe = self.recipe
        require_no_redaction(recipe, self.path)
        given = Recipe(_given(recipe.model_dump(mode="json")))
        made = train(recipe.kind, given, {"output": str(self.path), **keys})
        return self if isinstance(made, Path) else made

    def export(
        self, target: str | Path, *, merge: bool = True, checkpoint: int | None = None, best: bool = False
    ) -> Path:
        """Write the merged model, or only the adapter, to a directory that vLLM and transformers can load. Raises
        RunError if the directory is not empty."""
        from tiercel.inference_and_export.export import export
        from tiercel.inference_and_export.weights import CheckpointChoice

        choice = CheckpointChoice(step=checkpoint, is_best=best)
        return export(self.recipe, self.path, Path(target), merge=merge, choice=choice)

    def push(
        self,
        name: str,
        *,
        merge: bool = True,
        checkpoint: int | None = None,
        best: bool = False,
        public: bool = False,
    ) -> str:
        """Upload the merged model, or only the adapter, to the Hugging Face hub as `name`, such as me/cup, with a model
        card. Returns its address. Raises EnvironmentProblem if the hub refuses."""
        from tiercel.inference_and_export.push import push
        from tiercel.inference_and_export.weights import CheckpointChoice

        choice = CheckpointChoice(step=checkpoint, is_best=best)
        return push(self.recipe, self.path, name, merge=merge, choice=choice, public=public)

    def _require_run(self) -> None:
        if not is_run(self.path):
            raise not_a_run(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {describe(self.path)}"

    def _repr_html_(self) -> str:
        """Show the report, with curves, pictures and completions, in a notebook."""
        page = html.escape(render(read_run(self.path)), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 1px solid #ccc"></iframe>'


def _given(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole recipe without the sections that are null."""
    return {name: value for name, value in tree.items() if value is not None}
