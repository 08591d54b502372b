"""Location of checkpoints: in a directory, or on a hub, from which they are downloaded."""

from collections.abc import Callable, Sequence
from os.path import expanduser
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from tiercel.config.schema import Source
from tiercel.errors import EnvironmentProblem, ModelError

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
CONFIG = ("config.json",)
_WAYS = {
    "huggingface": "check the connection; or set HF_ENDPOINT to a mirror of Hugging Face; or set hub: modelscope "
    "beside the path; or give the path of a directory",
    "modelscope": "check the connection; or set hub: huggingface beside the path; or give the path of a directory",
}


def resolve(source: Source, key: str = "model.path", files: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Return the checkpoint's local directory. If the path is a model id, `files` are downloaded from its hub. `key` is
    the recipe's key, for messages. Raises ModelError if the hub has no such model, and EnvironmentProblem if it cannot
    be downloaded."""
    path = Path(expanduser(source.path))  # leaves ~NAME of a user that is not there
    if path.is_dir():
        return path
    download = _download(source, key)
    try:
        return Path(download(source.path, revision=source.revision, allow_patterns=list(files)))
    except GatedRepoError as error:
        ways = "accept its terms on the hub's page, and set HF_TOKEN"
        raise EnvironmentProblem(
            f"{key}: {source.path} is available only to users who accepted its terms; {ways}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"{key}: {source.path} is neither a directory nor a model on the hub") from error
    except Exception as error:  # the hubs have errors of many bases, such as httpx's and ModelScope's own
        said = " ".join(str(error).split())
        raise EnvironmentProblem(
            f"{key}: {source.path} is not a directory here, and could not be fetched: {type(error).__name__}: {said}\n"
            f"{_WAYS[source.hub]}"
        ) from error


def _download(source: Source, key: str) -> Callable[..., str]:
    if source.hub != "modelscope":
        return snapshot_download
    try:
        from modelscope import snapshot_download as download
    except ImportError as error:
        section = key.rpartition(".")[0]
        raise EnvironmentProblem(f"{section}.hub: modelscope needs its package: pip install modelscope") from error
    return download
