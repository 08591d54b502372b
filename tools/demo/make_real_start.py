"""Training of what `tiercel demo --real` ships beside SmolLM2: python -m tools.demo.make_real_start, in tiercel's own
directory, in an environment with the demo's packages.

The tower and the projector learn alone, from training pictures, to write a picture's color and shape in the decoder's
own word embeddings: half of the tokens the one, half the other. Two things make this a matter of minutes: the patch
embedding begins with the pictures' principal components, and the tower also learns which pixels belong to the shape.
Then a short SFT teaches the decoder, by an adapter, to answer questions about captions in words. So it has seen no
picture when reinforcement begins, and no part has seen the test split."""

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, cross_entropy, normalize, unfold
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerBase

from tiercel.demo.handwriting import dialogue, write_rows
from tiercel.demo.real import START
from tiercel.demo.real_model import MEAN, OWN_PARTS, PATCH, STD, TOKENS, compose, save
from tiercel.demo.real_parts import COLORS, SHAPES, QuestionSample, VqaQuestion, drawn, picture_file, read_questions
from tiercel.demo.running import run_command

DATA, RUN = Path("runs/real-start-data"), Path("runs/real-start")
SEEN, UNSEEN = range(3_800), range(3_800, 4_000)  # training pictures; the second are watched while the tower learns
LESSONS = QuestionSample(name="lessons", split="train", per_kind=800, seed=31, pictures=SEEN, is_balanced=True)
STEPS, BATCH, RATE = 700, 64, 1.5e-3
SHIFT = 8  # pixels by which a picture is moved at most
OUTLINED, FINE = 2, 8  # after how many layers a patch tells its shape's pixels, and in how many squares a side
SHARPNESS = 16.0  # of the cosines between a token and the words


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Pictures (N, 3, 64, 64) as the processor hands them on, with the numbers of their color and shape (N,)."""

    pixels: Tensor
    colors: Tensor
    shapes: Tensor


def labels(questions: Sequence[VqaQuestion]) -> Mapping[int, Mapping[str, str]]:
    """Return the color and the shape of each picture, as far as questions and answers say them. What an open question
    names is there; a question for yes or no names what is there if the answer says so."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for question in questions:
        words = question.text.rstrip("?").split()
        is_there = question.answer != ("yes" if {"not", "no"} & set(words) else "no")
        for word in (*words, question.answer) if is_there else ():
            for name, values in (("color", COLORS), ("shape", SHAPES)):
                if word in values:
                    found[question.picture][name] = word
    return MappingProxyType(found)


def make_start(steps: int = STEPS) -> None:
    """Teach the tower, then the decoder, and write the shipped files."""
    torch.manual_seed(0)
    if not (DATA / "taught/config.json").exists():
        model, tokenizer = compose()
        teach_tower(model, tokenizer, steps)
        save(model, tokenizer, DATA / "taught")
    write_captions(DATA, LESSONS)
    run_command("sft", "recipes/demo-real-start-sft.yaml")
    ship(max((RUN / "checkpoints").iterdir()))


def teach_tower(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, steps: int) -> None:
    """Train the tower and the projector in place."""
    words = model.get_input_embeddings().weight.detach()
    color_words, shape_words = (_words(names, tokenizer, words) for names in (COLORS, SHAPES))
    seen, unseen = read_pictures(SEEN), read_pictures(UNSEEN)
    outline = torch.nn.Linear(model.model.vision_tower.config.hidden_size, FINE * FINE)  # is not kept
    begin_patches(model, seen.pixels)
    parts = (outline, model.model.vision_tower, model.model.multi_modal_projector)
    trained = [weight for part in parts for weight in part.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(0)
    started = time.monotonic()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(seen.pixels), (BATCH,), generator=generator)
        batch = Pictures(
            pixels=varied(seen.pixels[chosen], generator), colors=seen.colors[chosen], shapes=seen.shapes[chosen]
        )
        loss, _ = lesson(model, outline, batch, color_words, shape_words)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                value, right = lesson(model, outline, unseen, color_words, shape_words)
            spent = f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor"
            said = f"loss {loss:.3f}, held out {value:.3f}; color {right[0]:.3f}, shape {right[1]:.3f}"
            print(f"step {step}: {said}; {spent}", flush=True)


def begin_patches(model: LlavaForConditionalGeneration, pixels: Tensor) -> None:
    """Set the patch embedding to the whitened principal components of patches that show something: a third of them in
    color, the rest of the mean of the channels. It stays as it is; learning from pictures of one shape, it would take
    hundreds of steps to find this."""
    embeddings = model.model.vision_tower.embeddings
    patches = unfold(pixels, PATCH, stride=PATCH).transpose(1, 2).flatten(0, 1)  # (N * 16, 3 * 256)
    patches = patches[patches.unflatten(1, (3, -1)).std(-1).amax(1) > 0.1]
    in_color = embeddings.patch_embedding.out_channels // 3
    gray = patches.unflatten(1, (3, -1)).mean(1)
    gray_filters = whitening(gray, embeddings.patch_embedding.out_channels - in_color).repeat(1, 3) / 3
    filters = torch.cat([whitening(patches, in_color), gray_filters])
    with torch.no_grad():
        embeddings.patch_embedding.weight.copy_(filters.unflatten(1, (3, PATCH, PATCH)))
        embeddings.position_embedding.weight.normal_(std=0.5)
    embeddings.patch_embedding.weight.requires_grad = False


def whitening(values: Tensor, count: int) -> Tensor:
    """Return the filters (count, D) of the largest principal components of values (N, D), whose outputs have a second
    moment of 1."""
    moments, vectors = torch.linalg.eigh(values.T @ values / len(values))
    return (vectors[:, -count:] / moments[-count:].clamp_min(1e-4).sqrt()).T


def lesson(
    model: LlavaForConditionalGeneration,
    outline: torch.nn.Linear,
    batch: Pictures,
    color_words: Tensor,
    shape_words: Tensor,
) -> tuple[Tensor, tuple[float, float]]:
    """Compare the tokens of pictures with the words as a caption writes them. Returns the loss and the shares of colors
    and shapes that are right."""
    states = model.model.vision_tower(batch.pixels, output_hidden_states=True).hidden_states
    features = model.model.multi_modal_projector(states[-1][:, 1:])  # (N, 16, H)
    loss = binary_cross_entropy_with_logits(outline(states[OUTLINED][:, 1:]), drawn_pixels(batch.pixels))
    right = []
    for tokens, words, truth in (
        (features[:, : TOKENS // 2], color_words, batch.colors),
        (features[:, TOKENS // 2 :], shape_words, batch.shapes),
    ):
        cosines = torch.einsum("nth,wth->ntw", normalize(tokens, dim=-1), normalize(words, dim=-1))
        repeated = truth[:, None].expand(tokens.shape[:2])
        loss = loss + cross_entropy(SHARPNESS * cosines.flatten(0, 1), repeated.flatten())
        loss = loss + (tokens - words[truth]).square().mean() / words.square().mean()
        right.append(float((cosines.mean(1).argmax(-1) == truth).float().mean()))
    return loss, (right[0], right[1])


def drawn_pixels(pixels: Tensor) -> Tensor:
    """Return for each patch which part of its squares belongs to the shape (N, 16, squares)."""
    ground = pixels.flatten(2).median(-1).values[:, :, None, None]
    is_drawn = ((pixels - ground).abs().amax(1, keepdim=True) > 0.1 / STD).float()
    return unfold(avg_pool2d(is_drawn, PATCH // FINE), FINE, stride=FINE).transpose(1, 2)


def read_pictures(numbers: range) -> Pictures:
    """Read those training pictures whose color and shape the questions say."""
    known = labels(read_questions("train"))
    chosen = [number for number in numbers if len(known.get(number, {})) == 2]
    arrays = [np.asarray(Image.open(picture_file("train", number)).convert("RGB")) for number in chosen]
    return Pictures(
        pixels=torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float().div(255).sub(MEAN).div(STD),
        colors=torch.tensor([COLORS.index(known[number]["color"]) for number in chosen]),
        shapes=torch.tensor([SHAPES.index(known[number]["shape"]) for number in chosen]),
    )


def varied(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the pictures and move each by some pixels; what becomes free has the color of the background."""
    side = pixels.shape[-1]
    mirrored = torch.rand(len(pixels), generator=generator) < 0.5
    pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
    ground = pixels.flatten(2).median(-1).values[:, :, None, None].expand(-1, -1, side + 2 * SHIFT, side + 2 * SHIFT)
    larger = ground.clone()
    larger[:, :, SHIFT : SHIFT + side, SHIFT : SHIFT + side] = pixels
    corners = torch.randint(2 * SHIFT + 1, (len(pixels), 2), generator=generator).tolist()
    return torch.stack([each[:, y : y + side, x : x + side] for each, (x, y) in zip(larger, corners, strict=True)])


def write_captions(directory: Path, sample: QuestionSample) -> Path:
    """Write the questions of a sample with a caption in words in place of the picture: as many tokens of its color and
    of its shape as the tower has for each."""
    known, rows = labels(read_questions(sample.split)), []
    for question in drawn(sample):
        said = known.get(question.picture, {})
        if len(said) == 2:
            color, shape = f" {said['color']}", f" {said['shape']}"
            caption = color * (TOKENS // 2 // (2 if said["color"] == "teal" else 1)) + shape * (TOKENS // 2)
            name = f"{sample.name}-{question.kind}-{question.number}"
            row = dialogue(name, [], [f"{caption}\n{question.text}", question.answer])
            rows.append(row | {"answer": question.answer})
    return write_rows(directory / f"{sample.name}.jsonl", rows)


def ship(checkpoint: Path) -> None:
    """Write the tower and the projector that were taught, and a checkpoint's adapter, in bfloat16 to the demo's
    folder."""
    shutil.rmtree(START, ignore_errors=True)
    (START / "adapter").mkdir(parents=True)
    taught = LlavaForConditionalGeneration.from_pretrained(DATA / "taught").state_dict()
    own = {name: value.bfloat16() for name, value in taught.items() if name.startswith(OWN_PARTS)}
    save_file(own, START / "parts.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "base_model_name_or_path": None}, indent=2) + "\n"
    (START / "adapter/adapter_config.json").write_text(text, encoding="utf-8")
    weights = load_file(checkpoint / "adapter/adapter_model.safetensors")
    halved = {name: value.bfloat16() for name, value in weights.items()}
    save_file(halved, START / "adapter/adapter_model.safetensors", {"format": "pt"})


def _words(names: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, embedding: Tensor) -> Tensor:
    """Return the embeddings of words (W, TOKENS / 2, H), each repeated as a caption repeats it: the tokens of a word of
    several take turns."""
    ids = [tokenizer.encode(f" {name}", add_special_tokens=False) for name in names]
    return torch.stack([embedding[torch.tensor(found * TOKENS)[: TOKENS // 2]] for found in ids])


if __name__ == "__main__":
    make_start(*map(int, sys.argv[1:]))
