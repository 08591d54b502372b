"""The section `data` of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tiercel.config_base import (
    LIST_FORM,
    SECTION_FORM,
    TEXT_FORM,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    form_of,
    list_or,
)

FormatName = Literal[
    "tiercel", "swift", "vlm_r1", "sharegpt", "alpaca", "openai", "trl", "rlhf_v", "qa", "verl", "refcoco"
]
BoxSpace = Literal["pixels", "thousandths", "unit"]
RowFormat = Literal["auto", FormatName]
_Text = Annotated[str, Tag(TEXT_FORM)]
_Texts = Annotated[tuple[str, ...], Field(min_length=1), Tag(LIST_FORM)]
_Rows = Annotated[_Text | _Texts, Discriminator(list_or(lambda _: TEXT_FORM))]

TemplateValue = bool | int | float | str | None


class MixedFile(Section):
    """Another file of training rows."""

    path: _Rows
    """Rows, named as data.train names them."""
    weight: PositiveFloat = 1.0
    """Its share of the rows, relative to the 1 of data.train."""
    format: RowFormat | None = None
    """Layout of its rows; null takes data.format."""
    image_root: str | None = None
    """Directory of its images; null takes data.image_root, or else its own directory."""
    columns: Mapping[str, str] | None = None
    """Other names of its columns; null takes data.columns."""
    boxes: BoxSpace | None = None
    """What its boxes are in; null takes data.boxes."""


class HeldOut(Section):
    """Rows of data.train and data.mix that are held out: never trained on, and chosen by their ids alone. Exactly one
    key is given. In place of the section data.eval may name a file, as data.train does."""

    fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of the usable training rows, to the nearest row."""
    count: PositiveInt | None = None
    """Number of rows."""


class Video(Section):
    """How videos become frames; families of Qwen read them."""

    fps: PositiveFloat = 2.0
    """Frames taken from each second of a file; also the rate of a list of frames whose row gives none."""
    max_frames: Annotated[int, Field(ge=2, strict=True)] = 32
    """From a longer file fewer frames are taken, evenly spaced; a longer list of frames is rejected."""
    min_pixels: PositiveInt = 128 * 28 * 28
    """A frame with fewer pixels is enlarged to about this many."""
    max_pixels: PositiveInt = 768 * 28 * 28
    """A frame with more pixels is reduced to at most this many."""


class Data(Section):
    """Rows and images."""

    train: _Rows
    """Training rows: a .jsonl (also .gz or .zst), .json, .parquet or .tar file, a pattern of several such as
    rows/*.jsonl, a directory that Hugging Face's datasets saved, hf:ORGANISATION/NAME:SPLIT of the hub, or a URL or
    pattern of fsspec such as s3://BUCKET/rows/*.jsonl; with #N at the end, N of its rows. A list of these is read as
    one file."""
    mix: tuple[MixedFile, ...] = ()
    """More training rows, mixed with data.train by weight in one order. An epoch is as many rows as all files have."""
    eval: Annotated[_Text | _Texts | Annotated[HeldOut, Tag(SECTION_FORM)], Discriminator(list_or(form_of))] | None = (
        None
    )
    """Held-out rows, scored greedily at step 0 and every train.eval_every steps: named as data.train, or
    {fraction: 0.01} or {count: 100} of the training rows."""
    format: RowFormat = "auto"
    """Layout of the rows; auto decides per file from its first rows."""
    columns: Mapping[str, str] = {}
    """Other names of columns: {question: problem, images: image} reads `problem` as `question` and `image` as `images`;
    a dot leads into a column. Each must be there."""
    ids: Literal["own", "line"] = "own"
    """Ids of rows: their own, which differ within a file, or file and line, if several rows share one. The column id
    is then one like others."""
    image_root: str | None = None
    """Images resolve under this directory; null takes the row file's directory."""
    image_roots: tuple[str, ...] = ()
    """More directories in which an image that is named by an absolute path may lie. Any other path is refused;
    symbolic links are followed first."""
    boxes: BoxSpace = "pixels"
    """What boxes, points and right answers of boxes in the rows are in: pixels of the original image, thousandths or
    unit (shares) of its sides. A box outside its image is refused. refcoco and ms-swift's norm1 say it themselves."""
    shuffle: bool = True
    """Order of the rows in an epoch: a function of (seed, epoch, index); false keeps the file's order."""
    max_prompt_tokens: PositiveInt = 4096
    """A longer prompt, image tokens included, is rejected whole, never cut."""
    cache: str | None = None
    """Folder of the indexes of large files of rows, and of copies of files at URLs, which ranks and runs share; null
    takes tiercel/rows and tiercel/files in your cache directory (~/.cache). It may be removed when nothing runs."""
    cache_bytes: PositiveInt = 200_000_000_000
    """The most bytes that copies of files at URLs have in data.cache, least recently used out first. A recipe whose own
    files have more is refused."""
    workers: NonNegativeInt = 2
    """Processes that decode and resize images ahead of time; any number gives the same batches."""
    max_bad_fraction: Fraction = 0.01
    """The run stops when more than this share of the rows was rejected."""
    max_image_pixels: PositiveInt = 100_000_000
    """An image whose header claims more pixels is rejected before it is decoded."""
    video: Video = Video()
    system: str | None = None
    """System message for rows that have none."""
    prompt: str | None = None
    """Text of every row's last user turn: {prompt} is the row's own, {NAME} its column NAME, {{ and }} are braces; null
    keeps the row's own."""
    train_turns: Literal["all", "last"] = "all"
    """SFT: which assistant turns are learnt, of those that the row itself does not leave out."""
    group_by_prefix: bool = False
    """The order keeps rows of the same system turn and pictures together, so that the model computes what they share
    once. Rows of a step are then less independent."""
    rows_per_prefix: PositiveInt | None = None
    """With group_by_prefix: at most so many rows of the same pictures stand together, the others elsewhere in the
    epoch; null keeps all of them together."""
    coordinates: Literal["thousandths", "unit"] | None = None
    """How the model writes boxes, for a model whose family documents none: thousandths or unit of each side; rewards of
    boxes are refused without it."""
    template: str | None = None
    """File with a Jinja chat template; null takes the checkpoint's own."""
    template_arguments: Mapping[str, TemplateValue] = {}
    """Variables of the chat template, such as {enable_thinking: false}; one that the template does not have is refused.
    An exported model has them as the defaults of its template."""
