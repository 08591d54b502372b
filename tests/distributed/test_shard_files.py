"""Files of shards and of a model's parts: what is written, what is read from them, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import FAMILY_NAMES, tiny_policy
from tiercel.distributed.ranks import ALONE
from tiercel.distributed.strategies.replicated import saved_tensors
from tiercel.distributed.strategies.shard_files import SavedTensors, ShardPiece, saved_moments, write_pieces
from tiercel.errors import ModelError, RunError, TrainingError
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import save_model
from tiercel.models.weights.sharded_model import ModelParts, parts_of
from tiercel.training.checkpoints import ShardedSave

ROWS = torch.arange(35.0).reshape(7, 5)
STEP = torch.tensor(3.0)


def in_three(directory: Path) -> list[Path]:
    """Rows 0 to 2 and a number of one rank, 3 to 5 of another, 6 of a third."""
    pieces = (
        {"a.exp_avg": ShardPiece(tensor=ROWS[:3]), "a.step": ShardPiece(tensor=STEP)},
        {"a.exp_avg": ShardPiece(tensor=ROWS[3:6], start=3)},
        {"a.exp_avg": ShardPiece(tensor=ROWS[6:], start=6)},
    )
    return [file for rank, each in enumerate(pieces) for file in write_pieces(directory, rank, each, 1000)]


def test_what_ranks_wrote_is_read_whole_and_by_rows(tmp_path):
    files = in_three(tmp_path)
    assert [file.name for file in files] == [f"rank-0000{rank}-00000.safetensors" for rank in range(3)]
    saved = SavedTensors(files)
    assert set(saved) == {"a.exp_avg", "a.step"}
    assert torch.equal(saved["a.exp_avg"], ROWS) and torch.equal(saved["a.step"], STEP)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(saved.rows("a.exp_avg", start, stop), ROWS[start:stop])


def test_torchs_own_reader_reads_the_shards(tmp_path):
    in_three(tmp_path)
    found = {"a.exp_avg": torch.zeros(7, 5), "a.step": torch.zeros(())}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(found["a.exp_avg"], ROWS) and torch.equal(found["a.step"], STEP)


def test_files_have_at_most_the_bytes_asked_for_and_always_the_same(tmp_path):
    pieces = {name: ShardPiece(tensor=torch.full((10,), float(n))) for n, name in enumerate("abcde")}  # 40 bytes each
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    files = write_pieces(tmp_path / "one", 0, pieces, 80)
    others = write_pieces(tmp_path / "other", 0, pieces, 80)
    assert [sorted(load_file(file)) for file in files] == [["a", "b"], ["c", "d"], ["e"]]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in others]
    assert [sorted(load_file(file)) for file in write_pieces(tmp_path, 1, pieces, 1)] == [[name] for name in "abcde"]
    assert write_pieces(tmp_path, 2, {}, 80) == []


def test_missing_rows_and_files_that_are_none_are_named(tmp_path):
    files = in_three(tmp_path)
    with pytest.raises(ModelError, match=r"no file there has row 3 of a\.exp_avg"):
        SavedTensors([files[0], files[2]])["a.exp_avg"]
    with pytest.raises(ModelError, match=r"no file there has row 6 of a\.exp_avg"):
        SavedTensors(files[:2]).rows("a.exp_avg", 5, 7)
    files[1].write_bytes(b"\x80\x02" * 50)
    with pytest.raises(ModelError, match=r"rank-00001-00000\.safetensors cannot be read as a safetensors file"):
        SavedTensors(files)
    save_file({"a": ROWS}, files[2], metadata={"DCP_SHARDING_INFO": '{"b": {"saved_offsets": [0]}}'})
    with pytest.raises(ModelError, match=r"rank-00002-00000\.safetensors cannot be read"):
        SavedTensors([files[2]])


def test_moments_in_one_file_are_read_as_ever(tmp_path):
    with pytest.raises(ModelError, match=r"optimizer\.safetensors cannot be read as a safetensors file"):
        saved_moments(tmp_path)
    save_file({"a.exp_avg": ROWS}, tmp_path / "optimizer.safetensors")
    assert torch.equal(saved_moments(tmp_path).rows("a.exp_avg", 2, 4), ROWS[2:4])


def test_a_part_is_some_layers_whole():
    names = ("embed.weight", "m.layers.0.q", "m.layers.0.k.bias", "m.layers.1.q", "m.norm.weight", "m.layers.1.buffer")
    assert list(parts_of(dict.fromkeys(names, 10), 20)) == [
        ["embed.weight"],
        ["m.layers.0.q", "m.layers.0.k.bias"],
        ["m.layers.1.q", "m.layers.1.buffer"],
        ["m.norm.weight"],
    ]
    assert list(parts_of(dict.fromkeys(names, 10), 1000)) == [[*names[:4], names[5], names[4]]]
    assert list(parts_of({}, 1)) == []


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_model_written_in_parts_has_the_tensors_of_one_written_whole(tiny_checkpoints, tmp_path, name):
    policy = tiny_policy(tiny_checkpoints[name], None)
    save_model(policy.family, policy.model, tmp_path / "whole")
    parts = ModelParts(policy.family, policy.model, tmp_path / "parts")
    tensors = saved_tensors(policy.model)
    for names in parts_of({name: tensor.nbytes for name, tensor in tensors.items()}, 1):
        parts.add({name: tensors[name] for name in names})
    parts.finish()
    whole = load_file(tmp_path / "whole/model.safetensors")
    files = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and set(found) == set(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    beside = [
        {file.name: file.read_bytes() for file in (tmp_path / place).iterdir() if file.suffix != ".safetensors"}
        for place in ("whole", "parts")
    ]
    assert beside[1].pop("model.safetensors.index.json") and beside[0] == beside[1]
    again = saved_tensors(load_weights(policy.family, torch.float32, policy.device, tmp_path / "parts"))
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


class OneRank:
    """As much of a strategy as a save needs."""

    ranks = ALONE
    policy = SimpleNamespace(family=None, model=None)

    def __init__(self, weight: float = 0.0) -> None:
        self.gathered = 0
        self.weight = weight

    def checkpoint_bytes(self) -> int:
        return 40

    def shares(self) -> dict[str, Tensor]:
        return {"a": torch.tensor([self.weight])}

    def model_parts(self, most_bytes: int) -> Iterator[dict[str, Tensor]]:
        for _ in range(3):
            self.gathered += 1
            yield self.shares()


def save_once(root: Path, strategy: OneRank) -> None:
    ShardedSave(root=root, step=3, strategy=cast(Any, strategy)).save({}, lambda directory: None)


def test_a_disk_that_is_full_in_the_middle_is_said_after_all_ranks_have_gathered(tmp_path, monkeypatch):
    """The others would wait for a rank that stopped."""

    def fail(self: ModelParts, weights: dict[str, Tensor]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ModelParts, "add", fail)
    strategy = OneRank()
    with pytest.raises(RunError, match="the checkpoint of step 3 cannot be written: No space left on device"):
        save_once(tmp_path, strategy)
    assert strategy.gathered == 3
    assert [path.name for path in tmp_path.iterdir()] == [".step-000003.tmp"]


def test_a_save_of_shards_knows_beforehand_how_much_it_needs_and_that_weights_are_finite(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match="the trained weight a is not finite after step 3"):
        save_once(tmp_path, OneRank(float("nan")))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=39))
    with pytest.raises(RunError, match="needs 40 bytes, but the disk has only 39 free;"):
        save_once(tmp_path, OneRank())
    assert list(tmp_path.iterdir()) == []
