"""The time model of a step, with numbers worked by hand for a card of round figures."""

import json
from dataclasses import replace

import pytest

from benchmarks.gpu import roofline
from benchmarks.gpu.roofline import Call, copy_seconds, estimated, expanded, kernel_seconds, product_seconds
from tiercel.planning.devices import DEVICES

CARD = replace(DEVICES["h100"], flops=1e15, bandwidth=1e12, host_link=1e10)


def test_a_large_product_takes_its_operations_and_a_thin_one_its_weights():
    large = Call("gemm", (8192, 8192, 8192, 1), "gemm bf16->bf16 tn compute 68 math 0")
    assert product_seconds(large, CARD) == pytest.approx(2 * 8192**3 / 0.65e15)
    thin = Call("gemm", (8192, 8, 8192, 1), "gemm bf16->bf16 tn compute 68 math 0")
    assert product_seconds(thin, CARD) == pytest.approx(2 * (8200 * 8192 + 8192 * 8) / 0.8e12)
    tiny = Call("gemm", (8, 8, 8, 1), "sgemm f32 tn math 0")
    assert product_seconds(tiny, CARD) == 3e-6


def test_few_tiles_leave_multiprocessors_idle():
    """66 tiles on 132 multiprocessors take twice the time."""
    call, card = Call("gemm", (66 * 128, 128, 4096, 1), "gemm bf16->bf16 tn"), replace(CARD, bandwidth=1e15)
    assert product_seconds(call, card) == pytest.approx(2 * 66 * 128 * 128 * 4096 / (0.65e15 * 0.5))


def test_kernels_and_copies_take_their_bytes():
    """1,000 blocks of 128 threads with 4 numbers of 4 bytes, read twice and written once."""
    assert kernel_seconds(Call("launch", (1000, 128, 0, 0), "add"), CARD) == pytest.approx(3 * 4 * 512_000 / 0.8e12)
    assert kernel_seconds(Call("launch", (1, 128, 0, 0), "add"), CARD) == 1.8e-6
    two = "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl"  # numbers of a thread
    assert kernel_seconds(Call("launch", (1000, 128, 0, 0), two), CARD) == pytest.approx(3 * 4 * 256_000 / 0.8e12)
    fused = (10**6, 128, 0, 0, 8 * 10**9)  # the last are bytes
    assert kernel_seconds(Call("launch", fused, "triton_poi_fused_add"), CARD) == pytest.approx(0.01)
    assert kernel_seconds(Call("launch", (10**6, 128, 0, 0), "flash_fwd_kernel"), CARD) == 1.8e-6
    assert copy_seconds(Call("copy", (10**9, 1, 0, 0), "d2d"), CARD) == pytest.approx(2.5e-3)
    assert copy_seconds(Call("copy", (10**9, 1, 0, 0), "h2d pinned"), CARD) == pytest.approx(0.1)


def test_a_graph_counts_each_time_that_it_is_launched():
    kernel, other = Call("launch", (1, 32, 0, 1), "add"), Call("launch", (1, 32, 0, 0), "mul")
    begin, end, launch = (Call("graph", (7, 0, 0, 0), name) for name in ("begin", "end", "launch"))
    calls = [begin, kernel, kernel, end, other, launch, launch]
    assert list(expanded(calls)) == [other, kernel, kernel, kernel, kernel]
    assert estimated(calls, CARD) == {"other kernels": pytest.approx(5 * 1.8e-6)}


def test_the_estimate_is_called_one(tmp_path, capsys):
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"model": "toy", "phases": {"learn": [["launch", [1, 32, 0, 0], "add"]]}}))
    roofline.main([str(file), "--card", "a100"])
    assert "estimated" in capsys.readouterr().out
