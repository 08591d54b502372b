"""The plan's bytes against those of PyTorch's own allocator, for published models at full size on null GPUs.

    python -m benchmarks.gpu_memory [--plan] [CASE..]

Each case is a GRPO run of two steps: 8 prompts of 1,180 tokens with a large picture, 8 completions of 200 tokens, LoRA
of rank 64 or all weights of the decoder. The second step is measured. Rows are written as they come; an existing row is
not made again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.nullgpu.card import on_card
from tests.nullgpu.full_size import save_checkpoint, write_rows
from tests.training.test_loops import merged
from tiercel.config.schema import GrpoRecipe
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.memory import FRAGMENTS
from tiercel.planning.options import measure, memory_of, study

FILE = RESULTS / "gpu_memory.json"
DEVICE_OF = {"h100": "h100", "h200": "h200", "b200": "b200", "4090": "rtx4090"}  # of the plan, by null card
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE, PROMPTS = 1180, 200, 8, 8
GROUP_TOKENS = PROMPT_TOKENS + GROUP_SIZE * COMPLETION_TOKENS
PHASES = ("rollout", "learn", "update")
LIMIT = 0.05  # of the difference
FULL = {"gradient_checkpointing": "full"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model with settings on a card."""

    model: str
    card: str
    learner: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 2  # of a microbatch
    prompts: int = PROMPTS  # of each rank
    quantize: str | None = None
    lora: bool = True  # False: full fine-tuning
    strategy: str = "single"
    ranks: int = 1


CASES = {
    "3B": Case(model="qwen2_5_vl_3b", card="h100"),
    "3B, full checkpointing": Case(model="qwen2_5_vl_3b", card="h100", learner=FULL),
    "7B": Case(model="qwen2_5_vl_7b", card="h100"),
    "7B, full checkpointing": Case(model="qwen2_5_vl_7b", card="h100", learner=FULL),
    "7B, not compiled": Case(model="qwen2_5_vl_7b", card="h100", learner={"compile": False}),
    "7B, nf4, full checkpointing": Case(model="qwen2_5_vl_7b", card="4090", learner=FULL, quantize="nf4"),
    "7B, all weights, fsdp2 on 8 ranks": Case(
        model="qwen2_5_vl_7b", card="h100", lora=False, prompts=4, strategy="fsdp2", ranks=8
    ),
    "7B, all weights, fsdp2 on 8 ranks, full checkpointing": Case(
        model="qwen2_5_vl_7b", card="h100", learner=FULL, lora=False, prompts=4, strategy="fsdp2", ranks=8
    ),
    "Gemma 3 12B, full checkpointing": Case(model="gemma3_12b", card="h100", learner=FULL),
    "Gemma 3 12B": Case(model="gemma3_12b", card="h100", groups=1),
    "Qwen3-VL-30B-A3B, full checkpointing": Case(model="qwen3_vl_30b_a3b", card="h200", learner=FULL),
    "Qwen3-VL-30B-A3B": Case(model="qwen3_vl_30b_a3b", card="h200", groups=1),
    "Qwen3.5-27B, full checkpointing": Case(model="qwen3_5_27b", card="h200", learner=FULL),
    "Qwen3.5-35B-A3B, full checkpointing": Case(model="qwen3_5_35b_a3b", card="h200", learner=FULL),
    "72B, fsdp2 on 8 ranks, full checkpointing": Case(
        model="qwen2_5_vl_72b", card="b200", learner=FULL, prompts=2, strategy="fsdp2", ranks=8
    ),
}
Row = Mapping[str, Any]


def recipe_of(case: Case, directory: Path) -> GrpoRecipe:
    """Write the checkpoint and the rows of a case, and return its recipe."""
    checkpoint = save_checkpoint(case.model, directory / "model")
    tree = {
        "model": {"path": str(checkpoint), "dtype": "bfloat16", "quantize": case.quantize},
        "lora": {"rank": 64, "alpha": 128} if case.lora else None,
        "data": {
            "train": str(write_rows(checkpoint, directory, PROMPT_TOKENS, case.prompts * case.ranks)),
            "workers": 0,
            "max_prompt_tokens": PROMPT_TOKENS,
        },
        "rewards": [{"name": "exact"}],
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": COMPLETION_TOKENS, "parity_action": "warn"},
        "learner": {"max_tokens_per_microbatch": case.groups * GROUP_TOKENS, "skip_zero_advantage": False},
        "optim": {"prompts_per_step": case.prompts * case.ranks},
        "train": {"steps": 2, "threads": 1, "strategy": case.strategy},
        "output": str(directory / "run"),
    }
    return GrpoRecipe.model_validate(merged(tree, {"learner": case.learner}))


def allocated(case: Case, recipe: GrpoRecipe) -> Row:
    """Run a recipe on a null card, and return the bytes by phase."""
    file = Path(recipe.output).parent / "recipe.json"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    (found,) = on_card(case.card, "memory", str(file), str(case.ranks), cards=case.ranks)
    return found


def planned(case: Case, recipe: GrpoRecipe) -> Row:
    """Plan a recipe, and return the bytes of tensors by phase and purpose."""
    subject = study(recipe, None)
    machine = Machine(ranks=case.ranks, memory_bytes=10**12, device=DEVICES[DEVICE_OF[case.card]])
    memory = memory_of(subject, measure(subject), machine, case.strategy)(case.groups * GROUP_TOKENS)
    return {
        phase: {name: size for name, size in parts.items() if name not in ("CUDA and NCCL", FRAGMENTS)}
        for phase, parts in memory.parts.items()
    }


def compared(name: str, known: Row) -> Row:
    """Make the row of a case. What is known of the allocator is not measured again."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        recipe = recipe_of(case, Path(scratch))
        found = known.get("allocator") or allocated(case, recipe)
        return {"case": name, "card": case.card, "allocator": found, "plan": planned(case, recipe)}


def difference(row: Row, phase: str) -> float:
    """Return how far the plan of a phase is from the allocator, as a share."""
    return sum(row["plan"][phase].values()) / row["allocator"][phase]["allocated"] - 1


def markdown(rows: Iterable[Row]) -> str:
    """Return the allocator's GB and the plan's difference, by phase."""
    cells = [[row["case"], row["card"], *(each for phase in PHASES for each in _cells(row, phase))] for row in rows]
    header = [cell for phase in PHASES for cell in (f"{phase}, GB", "plan")]
    return markdown_table(["model", "card", *header], cells)


def _cells(row: Row, phase: str) -> tuple[str, str]:
    return f"{row['allocator'][phase]['allocated'] / 1e9:.2f}", f"{difference(row, phase):+.1%}"


def main(arguments: Sequence[str]) -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description="compare the plan with PyTorch's allocator on null cards")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--plan", action="store_true", help="make the plans of rows that exist again")
    asked = parser.parse_args(arguments)
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else []
    by_name = {row["case"]: row for row in rows}
    for name in asked.cases:
        if (name in by_name) == asked.plan:
            try:
                by_name[name] = row = compared(name, by_name.get(name, {}))
            except AssertionError as error:  # from the run
                print(name, error, flush=True)
                continue
            rows = [by_name[each] for each in CASES if each in by_name]
            write_results(FILE, {"versions": versions(), "rows": rows}, markdown(rows))
            print(name, *(f"{phase} {difference(row, phase):+.1%}" for phase in PHASES), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
