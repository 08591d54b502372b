"""Read data sets of the Hugging Face hub by name. The package datasets downloads and caches them.

No code of a data set is run and nothing is unpickled: datasets 4 does not run scripts, only builders of plain files are
allowed, and rows are read from the Arrow files of the cache, images as bytes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiercel.config.row_sources import HUB, HUB_FORM, RowSource
from tiercel.data.texts import told
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.message_text import brief

OLDEST = 4  # the first major version of datasets that refuses scripts
_INSTALL = f"pip install 'datasets>={OLDEST}'"
# The builders that read plain files. WebDataset's builder is not among them, because it would use torch.load. `cache`
# reads the Arrow files that another builder made.
BUILDERS = frozenset({"arrow", "cache", "csv", "imagefolder", "json", "parquet", "text", "videofolder"})
_LONGEST_REASON = 500  # the most characters in a message


def read_batches(source: RowSource, batch_rows: int) -> Iterator[Any]:
    """Yield the rows as Arrow tables of at most `batch_rows` rows. Raises what `load` raises."""
    rows = load(source).with_format("arrow")
    try:
        yield from rows.iter(batch_size=batch_rows)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise DataError(f"{source.name}: {_reason(error)}") from error


def cached_files(source: RowSource) -> list[Path]:
    """Return the Arrow files that hold the rows, in their order. Raises what `load` raises."""
    return [Path(file["filename"]) for file in load(source).cache_files]


def places_of_files(source: RowSource) -> tuple[str, ...]:
    """Return the directories that may hold a data set's own images, for rows that name files."""
    if Path(source.path).is_dir():
        return (source.path,)
    from huggingface_hub.constants import HF_HUB_CACHE  # imported here because most runs read files

    return HF_HUB_CACHE, str(_datasets(source).config.HF_DATASETS_CACHE)


def load(source: RowSource) -> Any:
    """Load a split as a `datasets.Dataset`. It is downloaded if it is not in the cache.

    Raises DataError if it cannot be loaded, and EnvironmentProblem if the package is missing or too old.
    """
    datasets = _datasets(source)
    from huggingface_hub.errors import HTTPError

    try:
        builder = datasets.load_dataset_builder(source.path, source.config)
        kind = type(builder).__module__.rpartition(".")[2]
        if kind in BUILDERS:
            _require_own_files(source, builder)
            builder.download_and_prepare()
            return builder.as_dataset(split=source.split)
    except (ConnectionError, HTTPError) as error:
        place = datasets.config.HF_DATASETS_CACHE
        raise DataError(told("no cached data set", source.name, place, HUB)) from error
    except (datasets.exceptions.DatasetsError, ImportError, OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{source.name}: {_reason(error)} (the form of a data set is {HUB_FORM})") from error
    raise DataError(told("files of a data set", source.name, kind))


def _require_own_files(source: RowSource, builder: Any) -> None:
    """Raise DataError if the README of a data set names files of this machine, of other data sets, or of the web."""
    named = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
    root = os.path.realpath(source.path) if Path(source.path).is_dir() else None
    for file in named:
        is_on_hub = file.startswith(f"hf://datasets/{builder.repo_id or source.path}@")
        if not (is_on_hub if root is None else Path(os.path.realpath(file)).is_relative_to(root)):
            raise DataError(told("files of others", source.name, file))


def _reason(error: Exception) -> str:
    """Return an error's message and its cause's message, in one line."""
    if "scripts are no longer supported" in str(error):
        return "is a script, and tiercel does not run the code of a data set; save it as Parquet, and name that copy"
    texts = [str(error), *([str(error.__cause__)] if error.__cause__ is not None else [])]
    text = ": ".join(["cannot be read", *(" ".join(text.split()).rstrip(".") for text in texts)])
    return brief(text, _LONGEST_REASON)


def _datasets(source: RowSource) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentProblem(f"{source.name}: this needs a package that is not installed: {_INSTALL}") from error
    if int(datasets.__version__.partition(".")[0]) < OLDEST:
        found = f"datasets {datasets.__version__} may run the code of a data set"
        raise EnvironmentProblem(f"{source.name}: {found}: {_INSTALL}")
    return datasets
