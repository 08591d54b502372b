"""Plant a fault in each part of tiercel, and show that what .ci/run chooses for its commit fails, and by which test.

    .venv/bin/python -m tools.planted_faults             every fault; minutes
    .venv/bin/python -m tools.planted_faults view data   some of them

Each fault is committed in its own worktree, and tools/ci_plan.py plans the steps for that commit. Of the planned step,
the tests closest to the fault are run until the first that fails. The exit code is 1 if none fails.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.ci_plan import plan_steps

ROOT = Path(__file__).parents[1]
SECONDS = 1200  # for the tests of one fault


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong line, and where it should be noticed."""

    part: str
    says: str  # the resulting mistake
    file: str
    right: str  # a text that occurs once in the file
    wrong: str
    beside: str  # the tests to start with; the step runs more than these
    step: str = "test"


FAULTS = (
    Fault(
        "data",
        "every epoch has the order of the first",
        "tiercel/data/order.py",
        "int(_permutation(row_count, seed, epoch)[place]) if shuffle",
        "int(_permutation(row_count, seed, 0)[place]) if shuffle",
        "tests/data",
    ),
    Fault(
        "models",
        "text after a wide picture begins too early",
        "tiercel/models/families/qwen2_vl.py",
        "position += max(height, width, times[-1] + 1)",
        "position += max(height, times[-1] + 1)",
        "tests/models",
    ),
    Fault(
        "packing",
        "a completion is seen by the completions after it",
        "tiercel/packing/tree.py",
        "stop_T[start:stop] = subtree_stop",
        "stop_T[start:stop] = self.length",
        "tests/packing",
    ),
    Fault(
        "rollout/local",
        "all completions of a prompt are drawn with one seed",
        "tiercel/rollout/local/engine.py",
        "[seed + i for seed in seeds for i in range(size)]\n        with",
        "[seed for seed in seeds for _ in range(size)]\n        with",
        "tests/rollout",
    ),
    Fault(
        "rollout/vllm",
        "every version of the adapter has the first one's number",
        "tiercel/rollout/vllm/colocated.py",
        "LoRARequest(adapter_directory.name, version + 1,",
        "LoRARequest(adapter_directory.name, 1,",
        "tests/vllm/test_runs.py tests/vllm/test_gate.py",
        "test-vllm",
    ),
    Fault(
        "training",
        "the normaliser counts one group of the minibatch",
        "tiercel/training/grpo/minibatches.py",
        "ranks.all_gather(totals_of(groups))",
        "ranks.all_gather(totals_of(groups[:1]))",
        "tests/training/test_step.py tests/training/test_once.py tests/training/test_experts.py tests/training",
    ),
    Fault(
        "distributed",
        "two ranks do not add up their gradients",
        "tiercel/distributed/strategies/replicated.py",
        "if self.ranks.world_size > 1:\n            sum_over_ranks",
        "if self.ranks.world_size > 2:\n            sum_over_ranks",
        "tests/distributed/test_strategies.py",
        "test-scale",
    ),
    Fault(
        "rewards/runtime",
        "weights of rewards are left out of the sum",
        "tiercel/rewards/runtime/scorer.py",
        "[weight * value.value for value, weight",
        "[value.value for value, weight",
        "tests/rewards/runtime",
    ),
    Fault(
        "runs",
        "the manifest leaves out files in folders, the adapter's among them",
        "tiercel/runs/checkpoints.py",
        'sorted(temporary.rglob("*")) if path.is_file()',
        'sorted(temporary.glob("*")) if path.is_file()',
        "tests/runs",
    ),
    Fault(
        "web/view",
        "the last step of a filter is left out",
        "tiercel/web/view/filters.py",
        "columns.steps <= wanted.steps[1]",
        "columns.steps < wanted.steps[1]",
        "tests/web/view",
    ),
    Fault(
        "convert",
        "gradient accumulation does not count in the size of a step",
        "tiercel/convert/sizes.py",
        "update = each * max(1, processes // shared) * accumulated",
        "update = each * max(1, processes // shared)",
        "tests/convert",
    ),
    Fault(
        "config",
        "unknown keys are ignored",
        "tiercel/config_base.py",
        'extra="forbid"',
        'extra="ignore"',
        "tests/config",
    ),
)
ENVIRONMENTS = {"test": ".venv", "test-scale": ".venv-scale", "test-vllm": ".venv-vllm"}
MARKS = {"test-scale": "scale", "test-vllm": "vllm"}


def seen_by(fault: Fault, worktree: Path) -> tuple[str, str | None]:
    """Plant a fault in a worktree and commit it. Returns the planned step, and the test that failed or None."""
    file = worktree / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.right)} times what {fault.part} replaces")
    file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    git = ["git", "-c", "user.name=planted", "-c", "user.email=planted@localhost"]
    subprocess.run([*git, "commit", "-qam", f"Planted: {fault.says}"], cwd=worktree, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=worktree, check=True, capture_output=True, text=True)
    (step,) = (each for each in plan_steps(commit.stdout.strip(), [fault.file]) if each.target == fault.step)
    words = [str(ROOT / ENVIRONMENTS[fault.step] / "bin/python"), "-m", "pytest", "-x", *fault.beside.split()]
    words += ["-m", MARKS[fault.step]] if fault.step in MARKS else []
    words += [] if step.third is None else ["--third", str(step.third)]
    given = {**os.environ, "PYTHONPATH": str(worktree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=worktree, env=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    found = re.search(r"^(?:FAILED|ERROR) (\S+::\S+|\S+)", done.stdout, re.MULTILINE)
    return step.arguments, found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="of " + ", ".join(fault.part for fault in FAULTS))
    chosen = parser.parse_args().parts
    unseen = 0
    for fault in FAULTS:
        if chosen and fault.part not in chosen:
            continue
        started = time.monotonic()
        with TemporaryDirectory(prefix="planted-") as directory:
            worktree = Path(directory) / "tree"
            subprocess.run(["git", "worktree", "add", "-q", "--detach", worktree, "HEAD"], cwd=ROOT, check=True)
            try:
                step, test = seen_by(fault, worktree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", worktree], cwd=ROOT, check=True)
        unseen += test is None
        seconds = round(time.monotonic() - started)
        print(f"| {fault.part} | {fault.says} | {step} | {test or 'NOT SEEN'} | {seconds} s |", flush=True)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
