"""How exact the learner's forms are: log-probabilities and LoRA gradients against transformers' own forward pass.

    make bench-exact
    python -m benchmarks.exact --families qwen2_5_vl --seeds 5

Each seed has a new tiny random checkpoint, with seven groups of ragged completions on prompts without an image, with
one and with two, some of which begin alike. The forms compute them with each prompt by itself, and as a tree. The
reference repeats the prompt: one sample per row, vision tower included, in float64 on the CPU, and in nothing else
(benchmarks/float64.py). The exit code is 1 if a limit is exceeded. No float32 gradient has to be closer to float64 than
that of transformers' own pass over the same checkpoints.

The bfloat16 reference has the same bfloat16 weights, in float64, so that only the computation's error is compared.
Which form errs most in bfloat16 is luck in a single draw, hence a median over seeds.

Shape suffixes: N scored tokens of all completions, T tokens of one sample, V vocabulary.
"""

import argparse
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.float64 import all_in_float64, in_float64
from benchmarks.random_trees import short_pieces_shared, tree_rows
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint, tiny_policy
from tiercel.models.families.base import Family
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.prefix import passes
from tiercel.packing.batch import units_of
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackedTokens, PackItem, pack
from tiercel.types import EncodedPrompt

LORA_NOISE = 0.1  # standard deviation of the adapters' B matrices
TEMPERATURE = 0.7
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
PLAIN = "transformers' own"
REPEATED = "repeated"
FLOAT64_LIMIT = 1e-11  # of a logprob in nats, and of a gradient, relative
FLOAT32_GRADIENT_LIMIT = 1e-5  # relative; the error of transformers' own pass if that is larger
FLOAT32_LOGPROB_LIMIT = 1e-4  # nats
BFLOAT16_RATIO_LIMIT = 1.2  # of the repeated form's own error, median over seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A way to compute the same log-probabilities. `form` is None for transformers' own forward pass."""

    label: str
    form: str | None
    is_tree: bool = False  # groups that begin alike share that, and so do completions
    is_cut: bool = False  # prefixes in passes of their own, completions in several microbatches
    are_together: bool = False  # then all completions of a prompt are in one of them, as a pair's answers
    has_backward: bool = True
    has_float64: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Groups, and the weight of each scored token in the loss, which is the weighted sum of logprobs."""

    items: tuple[PackItem, ...]
    weights_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of a computation, float64 on the CPU."""

    logprobs_N: Tensor
    gradient: Tensor | None  # of all LoRA weights, flat; None if the computation has no backward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """The errors of one computation in one precision on one checkpoint."""

    family: str
    label: str
    precision: str
    seed: int
    logprob: float  # largest absolute difference, nats
    gradient: float | None  # norm of the difference over the norm of the reference


def computations(device: torch.device) -> tuple[Computation, ...]:
    """Return the computations that this device can run. Compiled `flex` has no float64."""
    common = (
        Computation(label=PLAIN, form=None),
        Computation(label=REPEATED, form="repeated"),
        Computation(label="dense", form="dense"),
        Computation(label="dense, a tree", form="dense", is_tree=True),
        Computation(label="dense, a tree cut", form="dense", is_tree=True, is_cut=True),
        Computation(label="dense, examples cut", form="dense", is_tree=True, is_cut=True, are_together=True),
    )
    if device.type == "cpu":
        return (
            *common,
            Computation(label="split", form="split"),
            Computation(label="split, a tree", form="split", is_tree=True),
            Computation(label="split, prompt run apart", form="split", is_cut=True),
            Computation(label="split, a tree cut", form="split", is_tree=True, is_cut=True),
            Computation(label="flex, forward only", form="flex", has_backward=False),
            Computation(label="flex, a tree, forward only", form="flex", is_tree=True, has_backward=False),
        )
    return (
        *common,
        Computation(label="flex", form="flex", has_float64=False),
        Computation(label="flex, a tree", form="flex", is_tree=True, has_float64=False),
        Computation(label="flex, prompt run apart", form="flex", is_cut=True, has_float64=False),
        Computation(label="flex, a tree cut", form="flex", is_tree=True, is_cut=True, has_float64=False),
    )


def make_case(policy: Policy, seed: int) -> Case:
    items = tree_rows(policy.family, seed)
    count = sum(sum(_lengths(item)) for item in items)
    return Case(items=items, weights_N=torch.randn(count, generator=torch.Generator().manual_seed(seed)))


def outcome(policy: Policy, case: Case, computation: Computation) -> Outcome:
    """Run the forward pass and, if there is one, the backward pass."""
    policy.model.zero_grad()
    with torch.set_grad_enabled(computation.has_backward):
        if computation.form is None:
            logprobs_N = _plain_logprobs(policy, case)
            if computation.has_backward:
                (logprobs_N * case.weights_N.to(logprobs_N)).sum().backward()
        else:
            logprobs_N = _form_logprobs(policy, case, computation)
    gradient = None
    if computation.has_backward:
        parameters = policy.trained_parameters().values()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters]).double().cpu()
    return Outcome(logprobs_N=logprobs_N.detach().double().cpu(), gradient=gradient)


def _plain_logprobs(policy: Policy, case: Case) -> Tensor:
    """Compute logprobs with one forward pass of the Hugging Face model for each sample."""
    excluded = torch.tensor(policy.family.placeholder_ids, device=policy.device)
    pieces = []
    for item in case.items:
        start = len(item.prompt.token_ids_P) - 1
        for continuation in item.continuations:
            ids_T = torch.cat([item.prompt.token_ids_P, continuation.token_ids_L])
            with policy.autocast():
                logits_TV = policy.model(**_model_inputs(policy, item.prompt, ids_T)).logits[0]
            logprobs_TV = (logits_TV / TEMPERATURE).index_fill(1, excluded, -torch.inf)[start:-1]
            if logprobs_TV.dtype != torch.float64:
                logprobs_TV = logprobs_TV.float()
            targets_T = continuation.token_ids_L.to(policy.device)
            pieces.append(logprobs_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0])
    return torch.cat(pieces)


def _model_inputs(policy: Policy, prompt: EncodedPrompt, token_ids_T: Tensor) -> dict[str, Any]:
    """Return the inputs of the model's own forward pass for one sample, with pixels from its own image processor."""
    inputs = huggingface_inputs(policy.family, prompt, token_ids_T)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(policy.compute_dtype)
    return {name: value.to(policy.device) for name, value in inputs.items()}


def _form_logprobs(policy: Policy, case: Case, computation: Computation) -> Tensor:
    """Compute logprobs with the learner. Gradients are left in the parameters."""
    assert computation.form is not None
    learner = PackedPolicy(policy, computation.form, checkpointing=False)
    vision = VisionStore(policy, cache_bytes=0)
    if computation.is_cut:
        weights, family = case.weights_N.split([sum(_lengths(item)) for item in case.items]), None
        cases = [Case(items=(item,), weights_N=own_N) for item, own_N in zip(case.items, weights, strict=True)]
        if computation.is_tree:
            cases, family = [case], policy.family
        with short_pieces_shared():
            together = computation.are_together
            return torch.cat([_logprobs_cut(learner, vision, each, family, together) for each in cases])
    with short_pieces_shared():
        packed = pack(case.items, policy.family if computation.is_tree else None)
    logprobs_N = learner(packed, vision.features(packed.images), TEMPERATURE).logprobs_N
    if computation.has_backward:
        (logprobs_N * case.weights_N.to(logprobs_N)).sum().backward()
    return logprobs_N


def _logprobs_cut(
    learner: PackedPolicy, vision: VisionStore, case: Case, family: Family | None, are_together: bool
) -> Tensor:
    """Compute logprobs with microbatches of about one completion, or of all completions of a prompt, as for trees that
    are larger than `learner.max_tokens_per_microbatch`: prefixes in passes of their own."""
    lengths = [length for item in case.items for length in _lengths(item)]
    weights, rows = case.weights_N.split(lengths), iter(range(len(lengths)))
    entries = [("", [next(rows) for _ in item.continuations]) for item in case.items]
    budget = max(item.shared_length for item in case.items)
    if not are_together:
        entries = [("", [row]) for _, of_item in entries for row in of_item]
        budget = max(len(item.prompt.token_ids_P) + max(_lengths(item)) for item in case.items)
    found: dict[int, Tensor] = {}

    def batch_of(packed: PackedTokens, chosen: Sequence[int]) -> SimpleNamespace:
        return SimpleNamespace(packed=packed, rows=[row for number in chosen for row in entries[number][1]])

    for unit in units_of(pack(case.items, family), entries, learner.form, budget, True, batch_of):
        for batch, features_KH, prefix in passes(unit, learner.run_prefix, vision.features):
            packed = batch.packed
            logprobs_N = learner(packed, features_KH, TEMPERATURE, prefix).logprobs_N
            own_N = torch.cat([weights[row] for row in batch.rows])
            (logprobs_N * own_N.to(logprobs_N)).sum().backward()
            found |= dict(zip(batch.rows, logprobs_N.detach().split(packed.scored_lengths), strict=True))
    return torch.cat([found[row] for row in range(len(lengths))])


def _lengths(item: PackItem) -> list[int]:
    return [len(continuation.token_ids_L) for continuation in item.continuations]


def compare(family: str, seed: int, device: torch.device, directory: Path) -> list[Errors]:
    """Return the errors of all computations of a family on one random checkpoint, which is left in `directory`."""
    checkpoint = save_tiny_checkpoint(family, directory / f"{family}-{seed}", seed)
    single, half = (tiny_policy(checkpoint, noise=LORA_NOISE, dtype=dtype) for dtype in ("float32", "bfloat16"))
    case = make_case(single, seed)
    found = []
    for weights, precisions in ((single, ("float64", "float32")), (half, ("bfloat16",))):
        double = in_float64(weights, checkpoint)
        with all_in_float64():
            reference = outcome(double, case, Computation(label=PLAIN, form=None))
        for precision in precisions:
            policy = double if precision == "float64" else weights
            policy = replace(policy, model=policy.model.to(device), device=device)
            for computation in computations(device):
                if precision != "float64" or computation.has_float64:
                    with all_in_float64() if precision == "float64" else nullcontext():
                        result = outcome(policy, case, computation)
                    found.append(_errors(result, reference, family, computation.label, precision, seed))
    return found


def _errors(result: Outcome, reference: Outcome, family: str, label: str, precision: str, seed: int) -> Errors:
    gradient = None
    if result.gradient is not None:
        assert reference.gradient is not None
        gradient = float((result.gradient - reference.gradient).norm() / reference.gradient.norm())
    return Errors(
        family=family,
        label=label,
        precision=precision,
        seed=seed,
        logprob=float((result.logprobs_N - reference.logprobs_N).abs().max()),
        gradient=gradient,
    )


def measure(families: Sequence[str], seeds: Sequence[int], device: torch.device) -> list[Errors]:
    """Return the errors of every computation for every family and seed."""
    with TemporaryDirectory() as directory:
        return [
            errors for family in families for seed in seeds for errors in compare(family, seed, device, Path(directory))
        ]


def summarise(found: Sequence[Errors]) -> list[dict[str, Any]]:
    """Return one row for each family and computation: the largest errors over seeds in float64 and float32; the float32
    gradient errors of all seeds; in bfloat16 all seeds' relative gradient errors, and their ratios to the repeated
    form's."""
    rows = []
    # Every computation has float32, so its results give the order.
    for family, label in dict.fromkeys((e.family, e.label) for e in found if e.precision == "float32"):
        row: dict[str, Any] = {"family": family, "computation": label}
        mine = [errors for errors in found if (errors.family, errors.label) == (family, label)]
        for precision in DTYPES:
            at = [errors for errors in mine if errors.precision == precision]
            gradients = [errors.gradient for errors in at if errors.gradient is not None]
            row[f"{precision}_logprob_error"] = _largest([errors.logprob for errors in at])
            row[f"{precision}_gradient_error"] = _largest(gradients)
            if precision == "float32":
                row["float32_gradient_errors"] = gradients
        half = {errors.seed: errors.gradient for errors in mine if errors.precision == "bfloat16"}
        repeated = {
            errors.seed: errors.gradient
            for errors in found
            if (errors.family, errors.label, errors.precision) == (family, REPEATED, "bfloat16")
        }
        row["bfloat16_gradient_errors"] = [error for error in half.values() if error is not None]
        row["bfloat16_ratios"] = [error / repeated[seed] for seed, error in half.items() if error is not None]
        rows.append(row)
    return rows


def _largest(values: Sequence[float]) -> float | None:
    """Return the largest value, None without values, or NaN if any value is NaN."""
    return None if not values else math.nan if any(map(math.isnan, values)) else max(values)


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each limit that is exceeded."""
    own = _own_errors(rows)
    lines = []
    for row in rows:
        limits = (
            ("float64_gradient_error", "relative gradient error in float64", FLOAT64_LIMIT),
            ("float64_logprob_error", "logprob error in float64", FLOAT64_LIMIT),
            ("float32_gradient_error", "relative gradient error in float32", gradient_limit(own[row["family"]])),
            ("float32_logprob_error", "logprob error in float32", FLOAT32_LOGPROB_LIMIT),
        )
        name = f"{row['family']}, {row['computation']}"
        for key, what, limit in limits:
            if row[key] is not None and not row[key] <= limit:
                lines.append(f"{name}: {what} is {row[key]:.2e}, above {limit:.3g}")
        ratios = row["bfloat16_ratios"]
        if ratios and not median(ratios) <= BFLOAT16_RATIO_LIMIT:
            lines.append(
                f"{name}: gradient error in bfloat16 is {median(ratios):.2f} times the repeated form's, above "
                f"{BFLOAT16_RATIO_LIMIT:g}"
            )
    return lines


def gradient_limit(own: Sequence[float]) -> float:
    """Return the limit of the float32 gradient's error beside the errors of transformers' own pass."""
    return max(FLOAT32_GRADIENT_LIMIT, *own)


def _own_errors(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the float32 gradient errors of transformers' own pass, by family."""
    return {row["family"]: row["float32_gradient_errors"] for row in rows if row["computation"] == PLAIN}


def _ratios(errors: Sequence[float], own: Sequence[float]) -> list[float]:
    return [error / of_own for error, of_own in zip(errors, own, strict=False)]  # none for a form without a gradient


def markdown(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """Return two tables: float64 and float32, then bfloat16."""
    own = _own_errors(rows)
    exact = markdown_table(
        (
            *("family, computation", "dlogp, float64", "dgrad, float64", "dlogp, float32", "dgrad, float32"),
            "over transformers' own, median (min to max)",
        ),
        [
            (
                f"{row['family']}, {row['computation']}",
                *(
                    _scientific(row[f"{precision}_{kind}_error"])
                    for precision in ("float64", "float32")
                    for kind in ("logprob", "gradient")
                ),
                _spread(_ratios(row["float32_gradient_errors"], own[row["family"]]), ".2f"),
            )
            for row in rows
        ],
    )
    half = markdown_table(
        ("family, computation", "dlogp", "dgrad, median (min to max)", "over the repeated form's, median (min to max)"),
        [
            (
                f"{row['family']}, {row['computation']}",
                f"{row['bfloat16_logprob_error']:.3f}",
                _spread(row["bfloat16_gradient_errors"], ".4f"),
                _spread(row["bfloat16_ratios"], ".2f"),
            )
            for row in rows
        ],
    )
    return (
        f"Against transformers' own repeated-prompt forward pass in float64, over {seeds} random checkpoints. dlogp: "
        "largest absolute difference of a log-probability, nats; dgrad: norm of the LoRA gradient's difference over "
        "the norm of the reference's. The largest over all checkpoints; then the float32 gradient's error over that of "
        f"transformers' own pass on the same checkpoint:\n\n{exact}\n"
        f"In bfloat16, against float64 with the same bfloat16 weights:\n\n{half}"
    )


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _spread(values: Sequence[float], digits: str) -> str:
    if not values:
        return "-"
    return f"{median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILY_NAMES, default=FAMILY_NAMES)
    parser.add_argument("--seeds", type=int, default=9, help="random checkpoints of each family")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS / "exact.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cudnn.allow_tf32 = False  # on by default for the vision tower's first convolution
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    logging.disable_progress_bar()
    rows = summarise(measure(arguments.families, range(arguments.seeds), device))
    text = markdown(rows, arguments.seeds)
    wrong = failures(rows)
    results = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "seeds": arguments.seeds,
        "limits": {
            "float64_error": FLOAT64_LIMIT,
            "float32_gradient_error": FLOAT32_GRADIENT_LIMIT,
            "float32_logprob_error": FLOAT32_LOGPROB_LIMIT,
            "bfloat16_ratio": BFLOAT16_RATIO_LIMIT,
        },
        "failures": wrong,
        "rows": rows,
    }
    write_results(arguments.results, results, text)
    print(text)
    if wrong:
        raise SystemExit("\n".join(wrong))
    print("all within the limits")


if __name__ == "__main__":
    main()
