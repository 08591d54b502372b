"""The table of kernels: each row is made once, with the current tiles, and shows the right values."""

import json

import pytest

from benchmarks import kernels
from benchmarks.kernels import RESULTS, Table, families_markdown, markdown, tiles
from tiercel.packing.kernel_table import FILE, KernelFit, known_fits, read_fits

STAMP = {"torch": "1", "tiles": {}}


def row(card: str, size: int, problem: str = "", spilled: int = 0) -> dict:
    parts = {part: {"registers": 9, "stack_bytes": spilled, "shared_bytes": 7} for part in ("forward", "backward")}
    return {"card": card, "head_size": size, "dtype": "float32", "capability": [8, 9], "problem": problem, **parts}


def test_rows_are_kept_in_order_and_dropped_for_another_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "RESULTS", tmp_path)
    file = tmp_path / "kernels.json"
    table = Table.read(file, STAMP)
    for each in (row("4090", 128, problem="too large"), row("h100", 64, spilled=1200)):
        table.put(each)
    assert list(Table.read(file, STAMP).rows) == [("h100", 64, "float32"), ("4090", 128, "float32")]
    assert Table.read(file, {**STAMP, "torch": "2"}).rows == {}
    assert (tmp_path / "kernels.md").read_text() == markdown(read_fits(file))
    assert [line.split(" | ")[1:] for line in markdown(read_fits(file)).splitlines()[2:]] == [
        ["1,200 / 1,200", " |"],
        ["", "refused |"],
    ]


def test_a_row_of_another_mask_is_kept_until_it_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "RESULTS", tmp_path)
    table = Table.read(tmp_path / "kernels.json", STAMP)
    table.put({**row("h100", 64), "mask": "old"})
    assert ("h100", 64, "float32") in table.rows
    assert table.lacks("h100", 64, "float32", "new") and not table.lacks("h100", 64, "float32", "old")
    assert table.lacks("h100", 128, "float32", "old")


def test_the_table_was_made_with_the_kernels_of_now():
    assert json.loads(FILE.read_text(encoding="utf-8"))["made_with"]["tiles"] == tiles()
    assert (RESULTS / "kernels.md").read_text(encoding="utf-8") == markdown(known_fits())
    assert (RESULTS / "kernels_families.md").read_text(encoding="utf-8") == families_markdown(known_fits())


def test_a_family_runs_where_none_of_its_heads_is_refused():
    fits = [
        KernelFit(card=card, capability=(8, 9), head_size=size, dtype="bfloat16", problem=problem, stack_bytes=(0, 0))
        for card, size, problem in (("4090", 128, ""), ("4090", 256, "too much"), ("h100", 256, ""))
    ]
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in families_markdown(fits).splitlines()}
    assert lines["| gemma3"][0] == ""  # heads of 128 were not tried on an h100
    assert lines["| gemma3"][3] == "refused, heads of 256"
    assert lines["| qwen3_5, qwen3_5_moe"][0] == "runs"


@pytest.mark.parametrize("fit", known_fits(), ids=lambda fit: f"{fit.card}, {fit.head_size}, {fit.dtype}")
def test_kernels_fit_and_spill_little(fit):
    """A block of 16 queries and keys is the least of a tensor core, and 512 numbers of 4 bytes fill 99 KB with it."""
    if (fit.head_size, fit.dtype) == (512, "float32"):
        assert ("132,096" in fit.problem) == (fit.capability in {(8, 6), (8, 9), (12, 0)})
    else:
        assert fit.problem == "" and max(fit.stack_bytes) < 512


def test_no_card_refuses_the_decoder():
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    assert {each["decoder"]["refused"] for each in rows} == {0}
    flash = {(each["head_size"], each["dtype"]) for each in rows if each["decoder"]["form"] == "flash"}
    assert flash and all(size <= 256 and dtype != "float32" for size, dtype in flash)
