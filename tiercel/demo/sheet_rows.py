"""Files of rows that show sheets and ask about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercel.demo.handwriting import dialogue, save_picture, write_rows
from tiercel.demo.questions import KINDS, Question, ask
from tiercel.demo.sheets import Sheet, Stationery


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSet:
    """The rows of one file, one for each sheet, with `kinds` of questions in turn. Held-out rows show other
    handwriting."""

    name: str
    count: int
    seed: int
    kinds: Sequence[str] = tuple(KINDS)
    is_held_out: bool = False
    is_answered: bool = True  # False: the assistant's turn ends with the thought
    slips: float = 0.0  # share of the rows in which the assistant answers carelessly; the column `answer` is right


def write_questions(directory: Path, rows: RowSet) -> Path:
    """Write `directory`/NAME.jsonl and its images. For held-out rows, write NAME-swapped.jsonl too, with the same
    sheets and answers but with questions that ask for another digit or ink."""
    stationery, generator = Stationery(is_held_out=rows.is_held_out), np.random.default_rng(rows.seed)
    dice = np.random.default_rng([rows.seed, 1])
    asked, swapped = [], []
    for number in range(rows.count):
        sheet, question = _asked(stationery, rows.kinds[number % len(rows.kinds)], generator)
        file = save_picture(sheet.image, directory, f"{rows.name}-{number:05d}")
        name = f"{rows.name}-{question.kind}-{number}"
        answer = question.solution.answer
        thought = f"<think>{sheet.read_out(question.solution.notes)}</think>"
        said = question.solution.slip if dice.random() < rows.slips else answer
        turns = [f"<image>{question.text}", thought + said if rows.is_answered else thought]
        columns = {"answer": answer, "kind": question.kind}
        asked.append(dialogue(name, [file], turns) | columns)
        swapped.append(dialogue(name, [file], [f"<image>{question.swapped}"]) | columns)
    if rows.is_held_out:
        write_rows(directory / f"{rows.name}-swapped.jsonl", swapped)
    return write_rows(directory / f"{rows.name}.jsonl", asked)


def _asked(stationery: Stationery, kind: str, generator: np.random.Generator) -> tuple[Sheet, Question]:
    while True:
        sheet = stationery.draw(generator)
        question = ask(sheet, kind, generator)
        if question is not None:
            return sheet, question
