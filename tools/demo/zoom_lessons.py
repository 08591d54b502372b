"""What the start of the tool demo learns by SFT: to read what the tool shows, to call it, and to find the ring."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from examples.scenes import SIDE
from examples.zoom.scenes import CENTRES, QUESTION, region, scenes, zoomed
from tiercel.demo.handwriting import dialogue, save_picture, write_rows

WHERE = "<image>Where is the ring?"
# In the form that the start's chat template writes.
TOOLS = "Tools: zoom(box, label, image)"
SHOWN = "<tool_response>image 2\n<image></tool_response>"

# Where the start's supervised rows look when they call the tool: seldom at the ring, so that GRPO has to find it.
LOOKS_AT_FIRST, LOOKS_AT_RING = 0.5, 0.3


def write_lessons(directory: Path, name: str, count: int, seed: int, *, use_held_out: bool) -> None:
    """Write `directory`/`name`.jsonl for SFT, and its images as the model sees them. For each scene, nine rows read
    what the tool shows, one answers without tools or tells where the ring is, and one calls the tool."""
    rows = []
    for number, (scene, generator) in enumerate(scenes(count, seed, use_held_out)):
        title = f"{name}-{number:05d}"
        seen = save_picture(scene.image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), directory, title)
        shown = [
            save_picture(zoomed(scene.image, place), directory, f"{title}-{place}") for place in range(len(CENTRES))
        ]
        digits = [str(digit) for digit in scene.digits]
        rows += [dialogue(file, [file], [SHOWN, digit]) for file, digit in zip(shown, digits, strict=True)]
        ring = [WHERE, json.dumps(region(scene.marked))]
        rows.append(dialogue(seen, [seen], ring if number % 2 else [QUESTION, digits[scene.marked]]))
        place = _looked_at(scene.marked, generator)
        call = json.dumps({"name": "zoom", "arguments": {"box": region(place)}})
        turns = [QUESTION, f"<tool_call>{call}</tool_call>", SHOWN, digits[place]]
        row = dialogue(f"{title}-call", [seen, shown[place]], turns)
        rows.append({**row, "messages": [{"role": "system", "content": TOOLS}, *row["messages"]]})
    write_rows(directory / f"{name}.jsonl", rows)


def _looked_at(marked: int, generator: np.random.Generator) -> int:
    draw = generator.random()
    if draw < LOOKS_AT_FIRST:
        return 0
    return marked if draw < LOOKS_AT_FIRST + LOOKS_AT_RING else int(generator.integers(len(CENTRES)))
