"""Conversion of measurements to results/peers.json and results/peers.md. Imports no framework.

Ratios are peer / tiercel, of medians: above 1, tiercel takes less.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

NAMES = {"trl": "TRL {}", "trl_compact": "TRL {}, head as on a GPU", "swift": "ms-swift {}"}  # with the version
DISTRIBUTIONS = {"trl": "trl", "trl_compact": "trl", "swift": "ms-swift"}
# The phases that count for the learner. tiercel computes vision features once, for sampling and learning together. The
# peers compute them again in their policy pass, so all of tiercel's vision counts for its learner.
LEARNER_PHASES = {
    "tiercel": ("learn", "vision"),
    "trl": ("learn",),
    "trl_compact": ("learn",),
    "swift": ("learn",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The measurements of one framework in one cell, each from a driver's JSON."""

    framework: str
    answers: Sequence[Mapping[str, Any]]

    @property
    def step_seconds(self) -> list[float]:
        return [second for answer in self.answers for second in answer["step_seconds"]]

    def phase_seconds(self, name: str) -> list[float]:
        """Return the seconds per counted step, or nothing if the framework has no such phase."""
        return [second for answer in self.answers for second in answer["phase_seconds"].get(name, [])]

    def learner_seconds(self) -> list[float]:
        """Return the seconds of the policy pass, forward and backward, per counted step."""
        phases = [self.phase_seconds(name) for name in LEARNER_PHASES[self.framework]]
        return [sum(parts) for parts in zip(*phases, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return medians, spreads, and the largest peak."""
        names = sorted({name for answer in self.answers for name in answer["phase_seconds"]})
        return {
            "versions": dict(self.answers[0]["versions"]),
            "step_seconds": spread(self.step_seconds),
            "phase_seconds": {name: rounded(median(self.phase_seconds(name))) for name in names},
            "learner_seconds": spread(self.learner_seconds()),
            "peak_bytes": max(answer["peak_bytes"] for answer in self.answers),
        }


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, extremes and count."""
    return {
        "median": rounded(median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "count": len(values),
    }


def problems(runs: Runs, completion_tokens: int, count: int, prompt_tokens: int) -> list[str]:
    """Return what would make a comparison worthless: lengths that were not forced, another prompt, no gradient."""
    found = []
    for answer in runs.answers:
        if answer["completion_tokens"] != [completion_tokens] * count:
            odd = sorted(set(answer["completion_tokens"]))
            found.append(f"{runs.framework}: {len(answer['completion_tokens'])} completions of {odd} tokens")
        if abs(answer["prompt_tokens"] - prompt_tokens) > 3:
            found.append(f"{runs.framework}: {answer['prompt_tokens']} prompt tokens, tiercel has {prompt_tokens}")
        if not all(0 < norm < 1e6 for norm in answer["gradient_norms"]):
            found.append(f"{runs.framework}: gradient norms {answer['gradient_norms']}")
    return found


def make_cell(shape: Mapping[str, Any], tiercel: Runs, peer: Runs) -> dict[str, Any]:
    """Return one row of the results. `shape` has name, C, G, questions, vocabulary and layers."""
    ours, theirs = tiercel.summary(), peer.summary()
    both = [tiercel.learner_seconds(), peer.learner_seconds()]
    old_pass = peer.phase_seconds("old")
    passes = [sum(parts) for parts in zip(both[1], old_pass, strict=True)] if old_pass else both[1]
    return {
        "cell": shape["name"],
        "peer": peer.framework,
        "P": tiercel.answers[0]["prompt_tokens"],
        **{key: shape[key] for key in ("C", "G", "questions", "vocabulary", "layers")},
        "step_ratio": rounded(median(peer.step_seconds) / median(tiercel.step_seconds)),
        "learner_ratio": rounded(median(both[1]) / median(both[0])),
        "learner_ratio_with_old_pass": rounded(median(passes) / median(both[0])),
        "peak_memory_ratio": rounded(theirs["peak_bytes"] / ours["peak_bytes"]),
        "tiercel_measured": ours,
        "peer_measured": theirs,
    }


def cell_key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a finished cell."""
    return cell["cell"], cell["peer"], cell["layers"]


def with_cell(cells: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cells with the new one in place of its predecessor or at the end."""
    replaced = [new if cell_key(cell) == cell_key(new) else cell for cell in cells]
    return replaced if new in replaced else [*replaced, new]


def markdown_table(results: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table with a row per cell. Seconds are medians with (min to max)."""
    lines = [
        "| peer | P, C, G, Q | vocabulary | layers | step, tiercel | step, peer | step | learner | peak memory |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in results["cells"]:
        peer = cell["peer_measured"]
        name = NAMES[cell["peer"]].format(peer["versions"][DISTRIBUTIONS[cell["peer"]]])
        learner = f"{cell['learner_ratio']:.1f} x"
        if cell["learner_ratio_with_old_pass"] != cell["learner_ratio"]:
            learner += f" ({cell['learner_ratio_with_old_pass']:.1f} with its old-policy pass)"
        columns = (
            name,
            f"{cell['P']}, {cell['C']}, {cell['G']}, {cell.get('questions', 1)}",
            f"{cell['vocabulary']:,}",
            str(cell["layers"]),
            _seconds(cell["tiercel_measured"]["step_seconds"]),
            _seconds(peer["step_seconds"]),
            f"{cell['step_ratio']:.1f} x",
            learner,
            f"{cell['peak_memory_ratio']:.1f} x",
        )
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def _seconds(value: Mapping[str, Any]) -> str:
    return f"{value['median']:.1f} s ({value['min']:.1f} to {value['max']:.1f})"


def write_results(file: Path, results: Mapping[str, Any]) -> None:
    """Write the JSON file, and next to it the table under the same name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown_table(results), encoding="utf-8")
