"""How exact trajectories are: completions of three turns, with pictures in the prompt and between the turns.

Every form of the learner in float32, and transformers' own forward pass, are compared with transformers' forward pass
of each whole sequence in float64. The rule of delta nets rounds in float32, so if transformers' own gradient errs by
more than the limit, that of a form may err by a tenth more than it.

    make bench-exact
    python -m benchmarks.trajectories --families qwen2_5_vl --seeds 2

A seed is six trajectories on a new random checkpoint, of ragged lengths and with pictures of random sizes. The exit
code is 1 if a limit is exceeded.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

from benchmarks.exact import FLOAT32_GRADIENT_LIMIT, FLOAT32_LOGPROB_LIMIT
from benchmarks.float64 import in_float64
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.packing.test_trajectories import PLAIN, Difference, differences
from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint, tiny_policy

PER_SEED = 6  # trajectories
BESIDE_PLAIN = 1.1  # times the error of transformers' own gradient, if that is larger


def main() -> int:
    """Measure, write results, and return whether all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILY_NAMES, default=FAMILY_NAMES)
    parser.add_argument("--seeds", type=int, default=17)
    parser.add_argument("--output", type=Path, default=RESULTS / "trajectories.json")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = {name: measure(name, arguments.seeds) for name in arguments.families}
    worst = {name: {form: largest(each) for form, each in forms.items()} for name, forms in found.items()}
    cells = [
        [f"{name}, {form}", f"{each.logprob:.1e}", f"{each.gradient:.1e}"]
        for name, forms in worst.items()
        for form, each in forms.items()
    ]
    text = (
        f"The largest differences over {PER_SEED * arguments.seeds} trajectories of three turns, float32 against "
        "float64: dlogp of a logprob, nats; dgrad of the LoRA gradient, relative to its norm.\n\n"
        + markdown_table(["family, form", "dlogp", "dgrad"], cells)
    )
    plain = {name: {form: asdict(each) for form, each in forms.items()} for name, forms in worst.items()}
    write_results(arguments.output, {"versions": versions(), "trajectories": PER_SEED * arguments.seeds, **plain}, text)
    wrong = [
        f"{name}, {form}: {each}"
        for name, forms in worst.items()
        for form, each in forms.items()
        if each.logprob > FLOAT32_LOGPROB_LIMIT
        or each.gradient > max(FLOAT32_GRADIENT_LIMIT, BESIDE_PLAIN * forms[PLAIN].gradient)
    ]
    print("\n".join(wrong or ["all within the limits"]))
    return int(bool(wrong))


def largest(found: Sequence[Difference]) -> Difference:
    """Return the largest of each difference."""
    return Difference(logprob=max(each.logprob for each in found), gradient=max(each.gradient for each in found))


def measure(name: str, seeds: int) -> dict[str, list[Difference]]:
    """Return the differences of each of a family's forms, one for each seed."""
    found: dict[str, list[Difference]] = defaultdict(list)
    for seed in range(seeds):
        with TemporaryDirectory() as directory:
            checkpoint = save_tiny_checkpoint(name, Path(directory), seed)
            policy = tiny_policy(checkpoint, noise=0.1)
            for form, each in differences(policy, seed, in_float64(policy, checkpoint)).items():
                found[form].append(each)
    print(name, {form: largest(each) for form, each in found.items()}, flush=True)
    return dict(found)


if __name__ == "__main__":
    raise SystemExit(main())
