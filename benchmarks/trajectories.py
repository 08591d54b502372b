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
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

from benchmarks.float64 import in_float64
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.packing.test_trajectories import PLAIN, Difference, differences
from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint, tiny_policy

PER_SEED = 6  # trajectories
LOGPROB_LIMIT = 1e-4  # nats
GRADIENT_LIMIT = 1e-5  # relative
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
    worst = {name: largest(name, arguments.seeds) for name in arguments.families}
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
    return int(
        any(
            each.logprob > LOGPROB_LIMIT or each.gradient > max(GRADIENT_LIMIT, BESIDE_PLAIN * forms[PLAIN].gradient)
            for forms in worst.values()
            for each in forms.values()
        )
    )


def largest(name: str, seeds: int) -> dict[str, Difference]:
    """Return the largest differences of a family's forms."""
    worst: dict[str, Difference] = {}
    for seed in range(seeds):
        with TemporaryDirectory() as directory:
            checkpoint = save_tiny_checkpoint(name, Path(directory), seed)
            policy = tiny_policy(checkpoint, noise=0.1)
            found = differences(policy, seed, in_float64(policy, checkpoint))
        for form, each in found.items():
            before = worst.get(form, each)
            worst[form] = Difference(
                logprob=max(each.logprob, before.logprob), gradient=max(each.gradient, before.gradient)
            )
    print(name, worst, flush=True)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
