"""docs/algorithms.md, made from the dicts: `python -m tiercel.algorithms.catalogue > docs/algorithms.md`."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tiercel.algorithms.advantages import ADVANTAGES
from tiercel.algorithms.kl import KL_ESTIMATORS
from tiercel.algorithms.losses import LOSSES
from tiercel.config.schema import Algorithm, Correction, Kl, Optim, Rollout, Section

HEADER = """\
# Algorithms

What `algorithm` in a recipe can name, with its formula, its source and when to use it. Each is a pure function in
`tiercel/algorithms/`, tested against numbers worked by hand and, for losses, against the formula written out again.
Combinations that make no sense are refused by `tiercel check` with the reason.

r is the ratio of the policy's probability of a token to the old policy's (1 where a rollout feeds one update), A the
completion's advantage, p and q the logprobs of the policy and of the reference. Every mean is over the minibatch on
all ranks: neither the number of ranks nor `learner.max_tokens_per_microbatch` changes a result.
"""

LOSSES_NOTE = """\
`clip(r)` lies between 1 - `clip_low` and 1 + `clip_high`; `null` takes a bound away; `delta` bounds r also where A is
negative. `normalise` gives any loss another mean: `sequence`, `token` or `constant`."""

ADVANTAGES_NOTE = """\
`scale` divides by another deviation (`group`, `batch`, or `none`) where the advantage has none of its own; standard
deviations are over n - 1. "The step" is every scorable completion of the step on all ranks."""

KL_NOTE = """\
`kl.coef` 0 computes no reference. `kl.place: loss` adds coef x estimate at each token; `kl.place: reward` takes
coef x the sum over a completion's tokens off its reward, before the advantage, at the price of a pass before the
update. The reference is the policy that the run started from; with `kl.sync_every` it is an adapter of its own, kept
in checkpoints, that moves towards the policy by `kl.sync_mix`."""

AROUND: dict[str, tuple[str, type[Section]]] = {
    "optim.minibatches": ("several updates of a rollout", Optim),
    "optim.rollout_epochs": ("several updates of a rollout", Optim),
    "algorithm.correction.level": ("engine and learner differ", Correction),
    "algorithm.correction.mode": ("engine and learner differ", Correction),
    "algorithm.correction.cap": ("engine and learner differ", Correction),
    "algorithm.off_policy_delta": ("completions of an older policy", Algorithm),
    "rollout.resample_tries": ("many groups of equal rewards", Rollout),
    "algorithm.overlong": ("truncated completions", Algorithm),
    "algorithm.entropy_coef": ("the entropy collapses", Algorithm),
    "algorithm.top_entropy": ("long chains of thought", Algorithm),
    "algorithm.advantage_clip": ("rewards with outliers", Algorithm),
    "algorithm.kl.sync_every": ("long runs with a penalty", Kl),
}

METRICS = """\
## Metrics of drift

| key | formula over the learnt completions | meaning |
|---|---|---|
| `sampler/logprob_gap_mean`, `_max` | \\|log learner - log engine\\| | how far engine and learner round apart |
| `sampler/gap_far_fraction` | tokens whose gap is over four tolerances | 0; over 5 % the engine is another one |
| `off_policy/kl` | mean over tokens of log engine - log learner | 0 on policy |
| `off_policy/chi2` | mean over tokens of ratio², less 1 | large where single tokens weigh too much |
| `off_policy/ess` | (sum w)² / (n x sum w²), w the completions' ratios | effective share of completions, 1 on policy |
"""


def render() -> str:
    """The text of docs/algorithms.md."""
    around = [(f"`{key}`", section.meanings()[key.rpartition(".")[2]], use) for key, (use, section) in AROUND.items()]
    return "\n".join(
        [
            HEADER,
            f"## Losses: `algorithm.loss`\n\n{LOSSES_NOTE}\n",
            _catalogue(LOSSES),
            f"## Advantages: `algorithm.advantage`\n\n{ADVANTAGES_NOTE}\n",
            _catalogue(ADVANTAGES),
            f"## Divergence from the reference: `algorithm.kl.estimator`\n\n{KL_NOTE}\n",
            _catalogue(KL_ESTIMATORS),
            "## Around the loss\n",
            _table(("key", "what it does", "when"), around),
            METRICS,
        ]
    )


def _catalogue(entries: Mapping[str, Any]) -> str:
    rows = [(f"`{name}`", each.formula, each.source, each.use) for name, each in entries.items()]
    return _table(("name", "formula", "source", "when to use"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
