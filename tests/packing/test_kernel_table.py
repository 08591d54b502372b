"""The row of a card's compute capability, for heads of its size or the next larger one."""

import json

from tiercel.packing.kernel_table import fit_of, read_fits


def test_heads_between_two_rows_have_the_larger_ones(tmp_path):
    rows = [
        {"card": "a", "capability": [8, 9], "head_size": size, "dtype": "bfloat16", "problem": problem}
        for size, problem in ((64, ""), (128, ""), (512, "no room"))
    ]
    rows[0] |= {"forward": {"stack_bytes": 8}, "backward": {"stack_bytes": 16}}
    (tmp_path / "kernels.json").write_text(json.dumps({"rows": rows}))
    fits = read_fits(tmp_path / "kernels.json")
    assert fits[0].stack_bytes == (8, 16)
    assert [fit_of(fits, (8, 9), size, "bfloat16").head_size for size in (16, 64, 80, 256)] == [64, 64, 128, 512]
    assert fit_of(fits, (8, 9), 256, "bfloat16").problem == "no room"
    assert fit_of(fits, (8, 9), 513, "bfloat16") is None
    assert fit_of(fits, (8, 9), 64, "float16") is None and fit_of(fits, (9, 0), 64, "bfloat16") is None


def test_where_there_is_no_file_nothing_is_known(tmp_path):
    assert read_fits(tmp_path / "kernels.json") == ()
