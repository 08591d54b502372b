"""Generate docs/algorithms.md from the tables: `python -m tools.docs.algorithms > docs/algorithms.md`."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tiercel.algorithms.advantages import ADVANTAGES
from tiercel.algorithms.correction import Correction
from tiercel.algorithms.f_divergences import F_DIVERGENCES
from tiercel.algorithms.kl import KL_ESTIMATORS, Kl
from tiercel.algorithms.losses import LOSSES, NORMALISERS
from tiercel.algorithms.preference import PAIR_LOSSES
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.sft import TOKEN_LOSSES
from tiercel.algorithms.surrogates import SURROGATES
from tiercel.algorithms.teacher import DIVERGENCES
from tiercel.config.schema import Optim, Rollout
from tiercel.config_base import Section
from tools.docs.recipe import Say

HEADER = """\
# Algorithms

This page lists what `algorithm` in a recipe can name, with its formula, its source and when to use it. Each is a pure
function in `tiercel/algorithms/`, tested against numbers worked by hand and, for losses, against the formula written a
second time. Combinations that make no sense are refused by `tiercel check` with the reason. A loss and an advantage
[of your own](#your-own-loss) need no change of tiercel.

r is the ratio of the policy's probability of a token to the old policy's (1 where a rollout feeds one update), A the
completion's advantage, p and q the logprobs of the policy and of the reference. Every mean is over the minibatch on
all ranks: neither the number of ranks nor `learner.max_tokens_per_microbatch` changes a result.
"""

LOSSES_NOTE = """\
A loss is a ratio, a surrogate of it and a mean over tokens. `ratio`, `surrogate` and `normalise` replace one of the
three: `{loss: dapo, ratio: sequence}` is `dapo` with the ratio of `gspo`. `clip(r)` lies between 1 - `clip_low` and
1 + `clip_high`; `null` takes a bound away; `delta` bounds r also where A is negative."""

PARTS = {
    "Ratios: `algorithm.ratio`": RATIOS,
    "Surrogates: `algorithm.surrogate`": SURROGATES,
    "Means: `algorithm.normalise`": NORMALISERS,
}

ADVANTAGES_NOTE = """\
`scale` divides by another deviation (`group`, `batch`, or `none`) where the advantage has none of its own; standard
deviations are over n - 1. "The step" is every scorable completion of the step on all ranks."""

KL_NOTE = """\
With `kl.coef` 0 no reference is computed. `kl.place: loss` adds coef x estimate at each token. `kl.place: reward`
subtracts coef x the sum over a completion's tokens from its reward, before the advantage; it needs a pass before the
update. The reference is the policy that the run started from; with `kl.sync_every` it is an adapter of its own, kept
in checkpoints, that moves towards the policy by `kl.sync_mix`."""

PAIRS_NOTE = """\
For `tiercel dpo`. w is the chosen answer, l the rejected one; log p is an answer's logprob summed over its n tokens (a
mean with `dpo.length_normalised`), r the reference, beta `dpo.beta`, s the logistic function, e `dpo.label_smoothing`.
SFT is the mean negative logprob of the chosen answers' tokens, times `dpo.sft_coef`, which any loss may have. The
reference is the policy that the run started from: the model without the adapter, or with that of `lora.init`. A pair's
prompt and pictures are computed once for both answers. The loss is a mean over the pairs of the step on all ranks."""

DIVERGENCES_NOTE = """\
The implicit reward of an answer by the divergence from the reference that bounds the policy, not yet times beta; u is
log p/r. The margins of sigmoid, hinge, robust, exo_pair and discopop are of these rewards."""

TEACHERS_NOTE = """\
`tiercel distill` samples from the student and makes its divergence from a teacher smaller at each sampled token: p is
the student's distribution of the next token, q the teacher's, both at `rollout.temperature`. The mean is that of
`algorithm.normalise`. With `teacher.rows_share` a share of the prompts learns from the answer in its row instead. The
teacher has the student's tokenizer, which is checked; its family and pixels may be others. It computes a prompt once
for all completions, as the student does, and full distributions exist in chunks of tokens only. With `teacher.top_k` K
words are compared one by one, and all others count as one: a lower bound of the whole divergence. With `teacher.url` a
[vLLM server](vllm.md#a-teacher-on-a-server) computes it, and no rank holds its weights. In `tiercel grpo`
`algorithm.teacher` adds the same term, times its `coef`, to the loss from rewards. `teacher/kl` in metrics.jsonl is the
mean of the divergence in use; of `token` that of ln p - ln q."""

TOKENS_NOTE = """\
`tiercel sft` learns the assistant turns; the loss is a mean over their tokens in the step on all ranks.
`sft.label_smoothing` e makes log p of `nll` to (1-e) log p plus e times the mean of log p over all words but the
placeholders of pictures. `sft.neftune_alpha` adds noise to the embeddings of a row, which is the same however rows are
packed, on any number of ranks, and in a run that goes on. Held-out rows are judged by `nll` without any of these."""

LABELS_NOTE = """\
`tiercel kto` learns from answers that are labelled good or bad one by one. z is an estimate of the policy's divergence
from the reference: the mean over the step's rows, on all ranks, of log p/r of the answer of the row that comes next, at
least 0."""

LABEL_LOSSES = {
    "kto": (
        "w (1 - s(+-beta (log p/r - z))), + and `kto.desirable_weight` for good answers, - and "
        "`kto.undesirable_weight` for bad ones",
        "KTO: Ethayarajh et al. 2024",
        "thumbs up and down, without pairs",
    ),
    "apo_zero_unpaired": (
        "as kto with z = 0",
        "APO: D'Oosterlinck et al. 2024, equation 7 by answers",
        "good answers that are better than what the model writes; two passes less",
    ),
}

VALUES_NOTE = """\
`tiercel reward` trains a reward model on pairs: the policy's own layers with a value head, one number v for each
answer, at the state that predicts its last token. The head begins at 0. What it saves is read by the reward `model`
([rewards.md](rewards.md)), which then sees a row's pictures too. The margin is `ranking.margin` plus that of
`ranking.margin_column`."""

VALUE_LOSSES = {
    "tiercel reward": (
        "-log s(v_w - v_l - margin) + `ranking.centre_coef` (v_w + v_l)²",
        "Bradley and Terry 1952; Touvron et al. 2023 (margin); Eisenstein et al. 2023 (second term)",
        "a reward learnt from preferences, for GRPO",
    ),
}

TRL_NOTE = """\
Losses, gradients and advantages were compared with TRL 1.16, number by number; they are equal but for these."""

TRL_DIFFERENCES = (
    (
        "warm-up",
        "the first update has the rate `optim.lr` / `optim.warmup_steps`",
        "0",
        "an update of rate 0 would waste the first rollout",
    ),
    (
        "mean of the entropy bonus",
        "that of the loss",
        "over tokens, whatever the loss",
        "`entropy_mean: token` is TRL's; with `top_entropy` TRL's is of the chosen tokens, tiercel's of all",
    ),
    (
        "tokens that `top_entropy` is a share of",
        "those with an advantage",
        "all",
        "an update without an advantage learns nothing, and DAPO has none; `top_entropy_of: all` is TRL's",
    ),
    (
        "completions that `overlong: mask` leaves out",
        "are no part of the mean over completions or tokens",
        "count as 0 in the mean over completions of `grpo`",
        "how many were truncated does not scale what the others teach",
    ),
    (
        "KL term of the loss",
        "the estimate",
        "the estimate times the ratio",
        "`kl.by_ratio: true` is TRL's default, by token even if the loss has one ratio for a completion",
    ),
    (
        "weight decay",
        "matrices only",
        "all but biases and norms",
        "other vectors and scalars scale activations as norms do",
    ),
    (
        "ratio of RLOO with several updates",
        "that of the loss: by token in `grpo`",
        "the product over the completion",
        "`ratio: product` and `normalise: sequence` are TRL's",
    ),
    (
        "`vespo` with a correction for the engine",
        "multiplies the loss by the weights of `correction`",
        "multiplies r by them",
        "every loss takes the correction in the same way",
    ),
    ("`bco_pair` and `mpo`", "rewards less their mean so far", "no mean", "the mean is part of BCO"),
    (
        "`sft.label_smoothing`",
        "the mean is over the words that can be written",
        "placeholders of pictures count too",
        "they never have a probability in tiercel",
    ),
    (
        "`sft.neftune_alpha`",
        "L of the noise is a row's own length",
        "the length of the padded batch",
        "as in the paper; a row's noise must not depend on the others",
    ),
    (
        "held-out loss of `dft`",
        "`nll`",
        "`dft`",
        "-p log p is 0 too where the answers have no probability",
    ),
    ("`orpo`", "the SFT term learns the chosen answers", "prompts too", "as every other SFT term"),
)

OWN_LOSS = """\
## Your own loss

Write a function in a file of your own, anywhere, and name it as `file.py:function`; a relative path starts at the
working directory, as for rewards. `package.module:function` works too.

```python
# research.py
from tiercel.algorithms import LossInput, TokenTerms


def near(batch: LossInput) -> TokenTerms:
    \"\"\"A quadratic penalty for leaving the old policy, instead of a clip.\"\"\"
    log_ratio_N = batch.logprobs_N - batch.old_logprobs_N
    values_N = -log_ratio_N.exp() * batch.advantages_N + 0.5 * log_ratio_N.square()
    return TokenTerms(values_N=values_N, token_sums={"loss/far_fraction": (log_ratio_N.abs() > 0.2).sum()})
```

```yaml
algorithm:
  loss: {call: research.py:near}
  normalise: token
```

It is called once for each microbatch, with N scored tokens of C whole completions:

| field of `batch` | shape | meaning |
|---|---|---|
| `logprobs_N` | N, fp32 | logprobs of the policy, with gradient |
| `old_logprobs_N` | N | logprobs of the policy before the step's updates, detached |
| `advantages_N`, `advantages_C` | N, C | the advantage of each token's completion, and of each completion |
| `completion_of_N` | N, int64 | which completion a token belongs to |
| `kl_N`, `entropy_N`, `teacher_N`, `weights_N` | N or `None` | what tiercel adds to your values: see below |
| `totals` | numbers | tokens, completions and groups of the minibatch on all ranks |
| `longest` | number | `rollout.max_new_tokens` |

It returns the values (N,) to minimise, of the shape, dtype and device of `logprobs_N`, as a tensor or, with sums for
metrics.jsonl, as `TokenTerms`. The names of the sums begin with `loss/`; the row of a step has their means over its
tokens. tiercel does the rest as the recipe says: it multiplies by the importance weights of `correction` and by the
masks, adds the terms of `kl` and `entropy_coef`, and takes the mean that `normalise` names (`sequence` where it names
none). So do not average over tokens. `ratio`, `surrogate`, the clips and the gates are refused beside a loss of your
own, since it does not read them.
"""

OWN_ADVANTAGE = """\
## Your own advantage

```python
# research.py
from torch import Tensor

from tiercel.algorithms import Options, RewardTable


def by_median(table: RewardTable, options: Options) -> Tensor:
    \"\"\"Reward - median of its group, so that one outlier does not move the baseline.\"\"\"
    values_C = table.totals_C.clone()
    for run in table.groups():
        values_C[run] -= table.totals_C[run].median()
    return values_C
```

```yaml
algorithm:
  advantage: {call: research.py:by_median}
  scale: batch
```

It is called once for each step, on every rank with the same numbers, with C scorable completions of all ranks and F
rewards. It must not draw random numbers, which would differ between ranks.

| field of `table` | shape | meaning |
|---|---|---|
| `totals_C` | C, fp32 | weighted sums of the rewards, after a KL penalty with `kl.place: reward` |
| `group_of_C` | C, int64 | which group a completion belongs to, ascending; `table.groups()` gives a slice for each |
| `rewards_CF`, `weights_F` | C x F, F | each reward by itself, NaN if it does not apply, and the recipe's weights |
| `is_correct_C` | C, bool | right by the first reward that tells |

`options` has the recipe's `scale`, `pass_k` and `clip` (`advantage_clip`). It returns finite values (C,), fp32. tiercel
then divides by `scale`, where the recipe names one, and cuts at `advantage_clip`. Groups with fewer than
`advantage.least_group` scorable completions (2) are left out before; write 1 for `rollout.group_size: 1`.

Both run in the trainer's process, not in one of their own as rewards do, so do not run a file that you do not trust.
`tiercel check` calls each on made-up numbers. Where one raises an error, the run stops and names the key, the file and
the line; so it does where one returns anything else than said here. The first values of a loss must be finite. All
ranks must have the same file, and a resumed run must name the same one.
"""

AROUND: dict[str, tuple[str, type[Section]]] = {
    "optim.minibatches": ("several updates of a rollout", Optim),
    "optim.rollout_epochs": ("several updates of a rollout", Optim),
    "algorithm.correction.level": ("engine and learner differ", Correction),
    "algorithm.correction.mode": ("engine and learner differ", Correction),
    "algorithm.correction.cap": ("engine and learner differ", Correction),
    "algorithm.off_policy_delta": ("completions of an older policy", Algorithm),
    "rollout.resample_tries": ("many groups of equal rewards", Rollout),
    "rollout.branches": ("completions whose beginning decides", Rollout),
    "algorithm.overlong": ("truncated completions", Algorithm),
    "algorithm.entropy_coef": ("the entropy falls to 0", Algorithm),
    "algorithm.top_entropy": ("long chains of thought", Algorithm),
    "algorithm.advantage_clip": ("rewards with outliers", Algorithm),
    "algorithm.kl.sync_every": ("long runs with a penalty", Kl),
}

FORKS = """\
## Groups that fork

```yaml
rollout: {group_size: 8, branches: [2, 4], branch_at: "</think>"}
```

makes the eight completions of a prompt of two first thoughts, each with four answers. With tools or an environment the
fork is after the first turn and what came back, and `branch_at` is left out
([environments.md](environments.md#forks)); with `branches: [2, 2, 2]` a second one follows. A first part is sampled
once. Its tokens stand once in the learner's tree if they are at least 64, and count with the advantage of each
completion after them, so loss and gradient are those of the eight completions as sequences by themselves. Advantages
compare the completions of the group as ever. Completions that share a part are less independent than others: a
group has fewer beginnings, and more of what follows each.

A completion that ends, or is truncated, without `branch_at` cannot be continued. It then stands for all of its
continuations, so that each completion of a group is drawn from the policy's own distribution, and log.txt says how many
did. A string of `rollout.stop` ends a completion in any part, and is looked for in each part by itself.

| key | formula | meaning |
|---|---|---|
| `branches/reached_fraction` | completions that go on after every fork | low: the model does not write `branch_at` |
| `branches/between_fraction` | share of the rewards' variance that first parts explain | near 1: first parts decide |
| `tokens/drawn` | sampled tokens, those of a shared part once | `tokens/completion` counts them for each completion |
"""

METRICS = """\
## Metrics of drift

| key | formula over the learnt completions | meaning |
|---|---|---|
| `sampler/logprob_gap_mean`, `_max` | \\|log learner - log engine\\| | how far their rounding differs |
| `sampler/gap_far_fraction` | tokens whose gap is over four tolerances | 0; over 5 % it is another model |
| `off_policy/kl` | mean over tokens of log engine - log learner | 0 on policy |
| `off_policy/chi2` | mean over tokens of ratio², less 1 | large where single tokens weigh too much |
| `off_policy/ess` | (sum w)² / (n x sum w²), w the completions' ratios | effective share of completions, 1 on policy |
"""


HEAD = ("name", "formula", "source", "when to use")


def render() -> str:
    """Return the text of docs/algorithms.md."""
    return "\n".join(
        [
            HEADER,
            f"## Losses: `algorithm.loss`\n\n{LOSSES_NOTE}\n",
            catalogue(LOSSES),
            *(f"### {title}\n\n{catalogue(entries)}" for title, entries in PARTS.items()),
            f"## Advantages: `algorithm.advantage`\n\n{ADVANTAGES_NOTE}\n",
            catalogue(ADVANTAGES),
            f"## Divergence from the reference: `algorithm.kl.estimator`\n\n{KL_NOTE}\n",
            catalogue(KL_ESTIMATORS),
            "## Around the loss\n",
            around_table(),
            FORKS,
            METRICS,
            f"## Pairs: `dpo.loss`\n\n{PAIRS_NOTE}\n",
            catalogue(PAIR_LOSSES),
            f"### Divergences of pairs: `dpo.divergence`\n\n{DIVERGENCES_NOTE}\n",
            catalogue(F_DIVERGENCES),
            f"## Teachers: `teacher.divergence`\n\n{TEACHERS_NOTE}\n",
            catalogue(DIVERGENCES),
            f"## Tokens: `sft.loss`\n\n{TOKENS_NOTE}\n",
            catalogue(TOKEN_LOSSES),
            f"## Labels: `kto.loss`\n\n{LABELS_NOTE}\n",
            losses_table(LABEL_LOSSES),
            f"## Values\n\n{VALUES_NOTE}\n",
            losses_table(VALUE_LOSSES),
            f"## What differs from TRL\n\n{TRL_NOTE}\n",
            differences_table(),
            OWN_LOSS,
            OWN_ADVANTAGE,
        ]
    )


def catalogue(entries: Mapping[str, Any], say: Say = str) -> str:
    """Return the entries of a table of the code as Markdown. `say` translates texts; sources stay."""
    return losses_table({name: (each.formula, each.source, each.use) for name, each in entries.items()}, say)


def losses_table(losses: Mapping[str, tuple[str, str, str]], say: Say = str) -> str:
    """Return a table of losses with the formula, source and use of each."""
    rows = [(f"`{name}`", say(formula), source, say(use)) for name, (formula, source, use) in losses.items()]
    return _table(tuple(map(say, HEAD)), rows)


def around_table(say: Say = str) -> str:
    """Return a table of the keys around the loss."""
    rows = [
        (f"`{key}`", say(" ".join(section.meanings()[key.rpartition(".")[2]].split())), say(use))
        for key, (use, section) in AROUND.items()
    ]
    return _table(tuple(map(say, ("key", "what it does", "when"))), rows)


def differences_table(say: Say = str) -> str:
    """Return a table of the differences from TRL, with the reasons."""
    return _table((say("what"), "tiercel", "TRL", say("why")), (tuple(map(say, row)) for row in TRL_DIFFERENCES))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
