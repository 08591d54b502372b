import pytest

from tiercel.web.report.numbers import (
    duration,
    ends,
    evenly_spaced,
    pair,
    share,
    short,
    sign_test,
    thinned,
    trailing_means,
)


def test_the_two_ends_of_a_run_do_not_overlap():
    points = [(step, float(step)) for step in range(1, 6)]
    assert ends(points) == (1.5, 4.5, 2)
    assert ends(points[:1]) == (1.0, 1.0, 1)
    assert ends([(step, 1.0) for step in range(100)])[2] == 20


def test_trailing_means_use_what_there_is():
    points = [(1, 1.0), (2, 3.0), (3, 5.0), (4, 1.0)]
    assert trailing_means(points, 3) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0)]


def test_thinning_keeps_spikes_and_both_ends():
    points = [(step, 100.0 if step == 777 else 0.0) for step in range(5000)]
    kept = thinned(points, 100)
    assert len(kept) <= 102
    assert (777, 100.0) in kept
    assert kept[0] == (0, 0.0) and kept[-1] == (4999, 0.0)


def test_evenly_spaced_keeps_first_and_last():
    assert evenly_spaced(range(3), 6) == [0, 1, 2]
    assert evenly_spaced(range(60), 6) == [0, 12, 24, 35, 47, 59]
    assert evenly_spaced("abcde", 1) == ["a"]
    assert evenly_spaced([], 4) == evenly_spaced("abcde", 0) == []


def test_sign_test_by_hand():
    assert sign_test(3, 0) == pytest.approx(2 / 8)
    assert sign_test(5, 1) == pytest.approx(2 * (1 + 6) / 64)
    assert sign_test(0, 0) == sign_test(2, 2) == 1.0
    assert sign_test(3000, 2000) < 1e-40


def test_formats():
    assert [short(value) for value in (0, 0.31234, -1.256, 12.34, 1024, 12345, 2e6, 2e-5)] == [
        "0",
        "0.312",
        "\u22121.26",
        "12.3",
        "1,024",
        "12.3k",
        "2M",
        "2e-05",
    ]
    assert pair(0.27, 0.41) == ("0.27", "0.41")
    assert pair(0.2711, 0.2742) == ("0.271", "0.274")
    assert pair(0.5, 0.5) == ("0.50", "0.50")
    assert (share(0.5), share(0.061), share(0.0001), share(0)) == ("50 %", "6.1 %", "< 0.1 %", "0 %")
    assert [duration(seconds) for seconds in (4.2, 59, 450, 11100)] == ["4.2 s", "59 s", "7 min 30 s", "3 h 05 min"]
