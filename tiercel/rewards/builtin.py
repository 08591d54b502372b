"""The built-in rewards, by the names that recipes give them; docs/rewards.md has this table.

Each is a pure function of a sample and its entry in the recipe. It reads the model's answer with answers.py and the
right answer from the row: `answer`, or the column that `answer_column` names. A row without a right answer gets None:
the reward does not apply. A right answer that cannot be read is a DataError naming row and column.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tiercel.config.schema import Reliability, Reward, RewardName
from tiercel.rewards import grounding, shape, wording
from tiercel.rewards.judge import JudgeReward
from tiercel.rewards.truths import truth_of
from tiercel.rewards.user import UserReward
from tiercel.samples import RewardValue, Sample

ALL_TEXT = "all of the answer, as text"
LAST_NUMBER = "the last number in the answer"
FIRST_BOX = "the first list of four numbers in the answer"
ALL_BOXES = "every list of four numbers in the answer, the first 200"
TOKENS = "the number of tokens, end token included"


class BatchReward(Protocol):
    """A reward with something of its own to start and to end: a process, a connection."""

    def start(self) -> None:
        """Raises RecipeError with the reason where that fails."""

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WithTruth:
    """A reward in a process of its own, which finds the right answer in `answer`, whatever its column."""

    user: UserReward
    reward: Reward

    def start(self) -> None:
        self.user.start()

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        return self.user.score([replace(sample, answer=truth_of(sample, self.reward)) for sample in samples])

    def close(self) -> None:
        self.user.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn:
    """A built-in reward. It has exactly one of `score`, `after` and `batch`."""

    score: Callable[[Sample, Reward], float | None] | None = None
    after: Callable[[Sample, bool | None, Reward], float | None] | None = None  # told whether the completion is right
    batch: Callable[[Reward, Reliability], BatchReward] | None = None  # sees all completions of a step at once
    correct_at: float | None = None  # value from which on the completion is right; None: it does not tell
    needs: str | None = None  # a package beyond tiercel's own
    answer: str  # what it takes as the model's answer
    value: str


def math_reward(reward: Reward, reliability: Reliability) -> BatchReward:
    return WithTruth(UserReward("tiercel.rewards.mathematics:score", reliability), reward)


def model_reward(reward: Reward, reliability: Reliability) -> BatchReward:
    from tiercel.rewards.model import ModelReward  # torch and transformers, which no other reward needs

    return ModelReward(reward)


BUILTIN: dict[RewardName, BuiltIn] = {
    "format": BuiltIn(
        score=shape.format_reward,
        answer="the whole completion",
        value="1 if it matches `pattern` from end to end (a dot matches line ends too), else 0; default: one "
        "`<answer>...</answer>`, before it at most one `<think>...</think>`",
    ),
    "exact": BuiltIn(
        score=wording.exact_reward,
        correct_at=1.0,
        answer=ALL_TEXT,
        value="1 if equal to the row's text, or one of its texts, after stripping and Unicode NFC, else 0; case counts",
    ),
    "normalised": BuiltIn(
        score=wording.normalised_reward,
        correct_at=1.0,
        answer=ALL_TEXT,
        value="as `exact`, but case, punctuation, the articles a, an, the, and widths of spaces do not count",
    ),
    "ocr": BuiltIn(
        score=wording.ocr_reward,
        correct_at=1.0,
        needs="rapidfuzz",
        answer=ALL_TEXT,
        value="1 - edit distance / length of the longer text, against the nearest of the row's texts",
    ),
    "number": BuiltIn(
        score=wording.number_reward,
        correct_at=1.0,
        answer=LAST_NUMBER,
        value="1 if within `tolerance` (0) or `relative_tolerance` x the row's number of the row's number, else 0; "
        "computed exactly",
    ),
    "count": BuiltIn(
        score=wording.count_reward,
        correct_at=1.0,
        answer=LAST_NUMBER,
        value="1 - \\|n - wanted\\| / max(1, wanted), at least 0",
    ),
    "math": BuiltIn(
        batch=math_reward,
        correct_at=1.0,
        needs="math_verify",
        answer="the expression that the answer ends in, LaTeX or plain",
        value="1 if math-verify finds it equal to the row's, else 0; runs under the limits of your own rewards",
    ),
    "choice": BuiltIn(
        score=wording.choice_reward,
        correct_at=1.0,
        answer="the choice the answer settles on",
        value="1 if it is the row's choice, one of `choices` (A to Z), else 0",
    ),
    "json": BuiltIn(
        score=wording.json_reward,
        answer="all of the answer, bare or in a ```json fence",
        value="1 if it is JSON that the schema in the file `json_schema` admits (without: any object or list), else 0",
    ),
    "iou": BuiltIn(
        score=grounding.iou_reward,
        correct_at=0.5,
        answer=FIRST_BOX,
        value="intersection over union with the row's box; 0 if there is no box",
    ),
    "giou": BuiltIn(
        score=grounding.giou_reward,
        answer=FIRST_BOX,
        value="(GIoU + 1) / 2 with the row's box: boxes apart differ too; 0 if there is no box",
    ),
    "ciou": BuiltIn(
        score=grounding.ciou_reward,
        answer=FIRST_BOX,
        value="(CIoU + 1) / 2 with the row's box, at least 0: centres and aspect ratios count; 0 if there is no box",
    ),
    "box_precision": BuiltIn(
        score=grounding.box_precision_reward,
        answer=ALL_BOXES,
        value="of the answer's boxes the share that is paired with one of the row's, one to one, so that most pairs "
        "overlap by `threshold` (0.5)",
    ),
    "box_recall": BuiltIn(
        score=grounding.box_recall_reward, answer=ALL_BOXES, value="of the row's boxes the share that is paired"
    ),
    "box_f1": BuiltIn(
        score=grounding.box_f1_reward,
        correct_at=1.0,
        answer=ALL_BOXES,
        value="2 x pairs / (boxes of the answer + boxes of the row); 1 where both have none",
    ),
    "box_map": BuiltIn(
        score=grounding.box_map_reward,
        answer=f"{ALL_BOXES}, surest first",
        value="mean over the overlaps 0.5, 0.55 .. 0.95 of the average precision",
    ),
    "point_in_box": BuiltIn(
        score=grounding.point_in_box_reward,
        correct_at=1.0,
        answer="the first pair of numbers in the answer, unless a box comes first",
        value="1 if it lies in the row's box, or in one of its boxes, edges included, else 0",
    ),
    "vlm_r1_rec": BuiltIn(
        score=grounding.vlm_r1_reward,
        correct_at=0.5,
        answer="the first `[x1, y1, x2, y2]` of whole numbers in the first `<answer>...</answer>`",
        value="VLM-R1's reward for referring expressions by its own definition: far edges one pixel nearer in the "
        "overlap, whose sides count one more",
    ),
    "length": BuiltIn(
        score=shape.length_reward, answer=TOKENS, value="1 up to `max_tokens`, falling linearly to 0 at twice as many"
    ),
    "cosine": BuiltIn(
        after=shape.cosine_reward,
        answer=TOKENS,
        value="a half cosine up to `max_tokens`: from 1 to 0.5 for a right completion, from -0.5 to 0 for a wrong one, "
        "by the first reward in the list that tells",
    ),
    "soft_overlong": BuiltIn(
        score=shape.soft_overlong_reward,
        answer=TOKENS,
        value="0 up to `max_tokens` - `buffer`, falling linearly to -1 at `max_tokens` (DAPO)",
    ),
    "repetition": BuiltIn(
        score=shape.repetition_reward,
        answer="the words of the whole completion, in lower case",
        value="-(1 - distinct / all) of its runs of `ngram` (3) words",
    ),
    "judge": BuiltIn(
        batch=JudgeReward,
        answer="the whole completion, as another model reads it",
        value="that model's grade / `best` (10); a completion without a grade is unscorable",
    ),
    "model": BuiltIn(
        batch=model_reward,
        answer="the whole completion, after the turns of its prompt without their pictures",
        value="the score that a Hugging Face reward model gives the conversation; one that is too long is unscorable",
    ),
}
