"""The GPU benchmark at toy size on a CPU, and its count of operations against hand counts and torch's own counter."""

import json
from importlib.metadata import version

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import (
    Linear,
    decoder_shape,
    linear_update,
    vision_forward,
)
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.learners import PlainLearner, SharedLearner, set_checkpointing
from benchmarks.gpu.models import MODELS, make_config, random_policy
from benchmarks.gpu.parts import all_cells
from benchmarks.gpu.running import ABSENT, DONE
from benchmarks.gpu.steps import TOY_SHAPES, make_groups

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_disable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


def test_operations_of_one_linear_layer_by_hand():
    layer = Linear(inputs=4, outputs=6)
    once = linear_update(10, layer, 2, needs_input_gradient=True)
    assert once.linear == 480 + 480  # 2 x 10 x 4 x 6: forward, and the gradient of the input
    # Forward 2 x 10 x 2 x (4 + 6) = 400; backward the same for the two weights, and the same for the two inputs.
    assert once.lora == 3 * 400
    first = linear_update(10, layer, 2, needs_input_gradient=False)
    assert first.linear == 480
    assert first.lora == 3 * 400 - 160  # 2 x 10 x 4 x 2, the gradient of A's input
    twice = linear_update(10, layer, 2, needs_input_gradient=True, forwards=2)
    assert (twice.linear, twice.lora) == (3 * 480, 4 * 400)


def test_windows_at_the_edges_of_a_picture_are_smaller():
    config = make_config(MODELS["7b"]).vision_config
    # 68 patches per side are 8 windows of 8 and one of 4; 4 blocks of 32 attend to the whole picture.
    pairs = 28 * (8 * 8**2 + 4**2) ** 2 + 4 * (68 * 68) ** 2
    attention = 4 * 1280 * pairs
    linear = 2 * 4624 * (1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420)) + 2 * 1156 * 5120 * (5120 + 3584)
    assert vision_forward(config, (1, 68, 68)).vision == attention + linear


@pytest.mark.skipif(
    transformers.__version__ < "5.23", reason="older ones make rotary angles by a product of matrices, which is counted"
)
@pytest.mark.parametrize("is_checkpointed", (False, True))
@pytest.mark.parametrize("is_shared", (True, False))
def test_operations_of_an_update_are_those_that_torch_counts(is_shared, is_checkpointed):
    policy = random_policy(MODELS["toy"], CPU, torch.float32)
    groups = make_groups(policy, TOY_SHAPES["picture"])
    shape = decoder_shape(policy.family.checkpoint.config.get_text_config(), 4)
    learner = (
        SharedLearner(policy, groups, {"max_tokens_per_microbatch": 64})
        if is_shared
        else PlainLearner(policy, groups, 64)
    )
    set_checkpointing(policy, is_checkpointed)
    with FlopCounterMode(display=False) as counter:
        learner.update()
    flops = learner.flops(shape, is_checkpointed)
    # torch counts no attention on a CPU, and only one of the head's two products, not the one that writes into its
    # argument.
    images = 2 if is_shared else 6
    uncounted = flops.attention + images * 4 * 32 * (16**2 + 16**2)
    if is_shared:
        uncounted += flops.head / 2
    assert counter.get_total_flops() == flops.total - uncounted


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The results file of all parts but b, which starts processes (see test_gpu_runs.py)."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    code = main(["--toy", "--results", str(file), *(word for letter in "acdef" for word in ("--part", letter))])
    return code, file


def rows_of(file, part):
    return [row for row in json.loads(file.read_text())["rows"] if row["part"] == part]


def result_of(file, cell):
    (row,) = [row for row in json.loads(file.read_text())["rows"] if row["cell"] == cell]
    return row["result"]


@pytest.mark.catalogue
def test_every_cell_of_a_toy_run_has_a_row_and_no_check_differs(toy):
    code, file = toy
    assert code == 0
    cells = [(cell.part, cell.name) for cell in all_cells(is_toy=True) if cell.part != "b"]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["cell"]) for row in rows] == cells
    assert {row["state"] for row in rows} <= {DONE, ABSENT}
    assert all(row["card"] == "CPU" and row["versions"]["torch"] == version("torch") for row in rows)
    checks = [row["result"] for row in rows if "verdict" in row.get("result", {})]
    assert {check["verdict"] for check in checks} == {"equal"} and len(checks) > 8
    assert "| toy, picture, plain, full checkpointing |" in file.with_suffix(".md").read_text()


@pytest.mark.catalogue
def test_mfu_is_operations_by_time_and_peak(toy):
    for name in ("tiercel", "plain", "tiercel, full checkpointing"):
        result = result_of(toy[1], f"toy, picture, {name}")
        parts = [value for key, value in result["operations"].items() if key != "total"]
        assert all(value > 0 for value in parts) and result["operations"]["total"] == sum(parts)
        expected = sum(parts) / result["seconds"]["median"] / 1e12
        assert result["mfu"] == pytest.approx(expected, rel=1e-2)
    assert result_of(toy[1], "toy, text only, tiercel")["operations"]["vision"] == 0


@pytest.mark.catalogue
def test_the_floor_of_decoding_is_bytes_by_bandwidth(toy):
    result = result_of(toy[1], "toy, 2 prompts x 3")
    read = result["bytes_of_a_step"]
    # Keys and values of 2 layers, 2 heads of 16, float32: of 2 prompts of 14, and of 6 rows with 24 tokens on average.
    assert read["keys_and_values"] == 2 * 2 * 2 * 16 * 4 * (2 * 14 + 6 * 24)
    assert result["floor_seconds"] == pytest.approx(read["total"] / 1e10, rel=1e-2)


@pytest.mark.catalogue
def test_a_part_of_a_step_is_extrapolated_and_said_so(toy):
    result = result_of(toy[1], "toy")
    assert set(result["seconds"]) == {"vision", "rollout", "learn", "update"}
    assert result["is_extrapolated"] and result["run_groups"] == 2 and result["groups"] == 4
    assert result["extrapolated_seconds"] == pytest.approx(2 * result["total_seconds"], rel=1e-2)
    assert "(extrapolated from 2 prompts)" in toy[1].with_suffix(".md").read_text()


@pytest.mark.catalogue
def test_what_is_there_is_skipped_until_it_is_asked_for_again(toy, capsys):
    words = ["--toy", "--results", str(toy[1]), "--part", "d"]
    before = rows_of(toy[1], "d")
    assert main(words) == 0 and rows_of(toy[1], "d") == before
    assert main([*words, "--again"]) == 0 and rows_of(toy[1], "d") != before


def test_without_a_card_the_real_parts_say_so(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no CUDA GPU here.*--toy"):
        main(["--part", "a", "--results", str(tmp_path / "gpu.json")])
    assert main(["--list"]) == 0
