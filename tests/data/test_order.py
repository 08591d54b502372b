"""The order of rows is a pure function of (seed, epoch, index)."""

import pytest

from tiercel.data.order import (
    RESAMPLED,
    RowOrder,
    clusters_of,
    indices_of_step,
    indices_of_try,
    prompts_of_epochs,
    rank_slice,
    row_of_index,
    steps_of_epochs,
)


def rows(indices, row_count=10, seed=3, shuffle=True):
    return [row_of_index(index, row_count, seed, shuffle) for index in indices]


def test_each_epoch_is_a_permutation_of_its_own():
    first, second = rows(range(10)), rows(range(10, 20))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != rows(range(10), seed=4)
    assert sorted(rows(range(20, 30))) == list(range(10)) and rows(range(20, 30)) not in (first, second)


def test_the_order_does_not_depend_on_what_was_asked_before():
    in_turn = rows(range(100))
    assert [rows([index])[0] for index in reversed(range(100))] == in_turn[::-1]


def test_the_order_never_changes():
    # Runs are resumed with this order: a change would repeat some rows and leave out others.
    assert rows(range(10), seed=0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert rows(range(10, 20), seed=0) == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]


def test_without_shuffling_the_file_is_the_order():
    assert rows(range(12), row_count=5, shuffle=False) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="row_count"):
        row_of_index(0, 0, 0, True)


@pytest.mark.parametrize(
    ("epochs", "row_count", "per_step", "steps"),
    [(1.0, 10, 4, 3), (2.0, 10, 4, 5), (0.5, 10, 5, 1), (0.07, 100, 7, 1), (1.0, 10, 100, 1), (0.001, 10, 4, 1)],
)
def test_steps_of_epochs(epochs, row_count, per_step, steps):
    assert steps_of_epochs(epochs, row_count, per_step) == steps


def test_last_step_runs_short():
    end = prompts_of_epochs(1.0, 10)
    assert [list(indices_of_step(step, 4, end)) for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert list(indices_of_step(3, 4)) == [12, 13, 14, 15]


def test_rank_slices_are_contiguous_and_even():
    assert [list(rank_slice(range(7), rank, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [rank_slice([5], rank, 2) for rank in range(2)] == [[], [5]]
    for count in range(20):
        for world_size in (1, 2, 3, 7):
            slices = [list(rank_slice(range(count), rank, world_size)) for rank in range(world_size)]
            assert [index for part in slices for index in part] == list(range(count))
            assert max(map(len, slices)) - min(map(len, slices)) <= 1
    with pytest.raises(ValueError, match="rank 2"):
        rank_slice(range(3), 2, 2)


def test_the_second_order_is_another_one_and_each_try_has_indices_of_its_own():
    rows, seed = 10, 3
    first = [row_of_index(index, rows, seed, True) for index in range(10)]
    second = [row_of_index(RESAMPLED + index, rows, seed, True) for index in range(10)]
    assert sorted(second) == list(range(10)) and second != first
    assert second == [row_of_index(RESAMPLED + index, rows, seed, False) for index in range(10)]
    tries = [indices_of_try(step, number, 3, 4) for step in range(5) for number in range(3)]
    every = [index for indices in tries for index in indices]
    assert len(set(every)) == len(every) == 60 and min(every) == RESAMPLED


def mixed(counts, weights, shuffle=True, seed=0):
    return RowOrder(counts=counts, weights=weights, seed=seed, shuffle=shuffle)


def test_one_file_alone_keeps_its_order():
    order = mixed((10,), (1.0,))
    assert [order.row(index) for index in range(20)] == rows(range(20), seed=0)
    assert [order.row(RESAMPLED + index) for index in range(9)] == rows(range(RESAMPLED, RESAMPLED + 9), seed=0)


@pytest.mark.parametrize(
    ("counts", "weights", "shares"),
    [
        ((6, 6), (1.0, 1.0), (6, 6)),
        ((10, 2), (1.0, 1.0), (6, 6)),
        ((9, 3), (1.0, 0.5), (8, 4)),
        ((5, 5), (1.0, 2.0), (3, 7)),  # 3.33 and 6.67: the larger remainder gets the row
        ((3, 1), (1.0, 0.001), (3, 1)),  # 3.996 and 0.004: never none
    ],
)
def test_a_round_has_a_files_share(counts, weights, shares):
    order = mixed(counts, weights)
    assert order.shares == shares
    for start in (0, sum(shares)):
        drawn = [order.row(start + place) for place in range(sum(shares))]
        assert sum(row < counts[0] for row in drawn) == shares[0]


def test_a_file_goes_through_all_its_rows_before_one_comes_again():
    order = mixed((4, 10), (3.0, 1.0))
    drawn = [order.row(index) for index in range(400)]
    second = [row - 4 for row in drawn if row >= 4]
    assert all(sorted(second[at : at + 10]) == list(range(10)) for at in range(0, 80, 10))
    first = [row for row in drawn if row < 4]
    assert all(sorted(first[at : at + 4]) == list(range(4)) for at in range(0, 280, 4))
    assert len(set(map(tuple, (first[:4], first[4:8], first[8:12], first[12:16])))) > 1


def test_the_mixed_order_never_changes():
    order = mixed((6, 3), (2.0, 1.0), seed=3)
    assert [order.row(index) for index in range(9)] == [1, 5, 2, 6, 7, 8, 4, 3, 0]
    assert [order.row(index) for index in reversed(range(9))] == [0, 3, 4, 8, 7, 6, 2, 5, 1]


def test_without_shuffling_files_are_spread_evenly():
    order = mixed((4, 2), (2.0, 1.0), shuffle=False)
    assert [order.row(index) for index in range(8)] == [0, 4, 1, 2, 5, 3, 0, 4]


def test_further_rollouts_of_mixed_files_have_an_order_of_their_own():
    order = mixed((40, 20), (2.0, 1.0))
    again = [order.row(RESAMPLED + index) for index in range(60)]
    assert sorted(again) == list(range(60)) and again != [order.row(index) for index in range(60)]


def test_rows_of_a_cluster_stay_together_in_an_order_of_the_epoch():
    keys = [number % 5 for number in range(20)]
    order = RowOrder(counts=(20,), weights=(1.0,), seed=3, shuffle=True, clusters=clusters_of(keys))
    for epoch in range(3):
        numbers = [order.row(20 * epoch + place) for place in range(20)]
        assert sorted(numbers) == list(range(20))
        for start in range(0, 20, 4):
            together = numbers[start : start + 4]
            assert len({keys[number] for number in together}) == 1
    within = [
        [order.row(20 * epoch + n) for n in range(20) if keys[order.row(20 * epoch + n)] == 0] for epoch in range(3)
    ]
    assert len({tuple(each) for each in within}) == 3 and [0, 5, 10, 15] not in within
    firsts = [[keys[order.row(20 * epoch + 4 * place)] for place in range(5)] for epoch in range(3)]
    assert len({tuple(each) for each in firsts}) == 3  # each epoch has its own order


def test_the_order_of_clusters_never_changes_and_does_not_depend_on_what_was_asked_before():
    order = RowOrder(counts=(6,), weights=(1.0,), seed=3, shuffle=True, clusters=clusters_of([0, 0, 0, 1, 1, 2]))
    expected = [5, 4, 3, 1, 2, 0, 5, 3, 4, 0, 2, 1]
    assert [order.row(index) for index in range(12)] == expected
    assert [order.row(index) for index in reversed(range(12))] == expected[::-1]


def test_a_large_cluster_is_cut_into_parts_that_stand_apart():
    assert clusters_of([0, 0, 1, 0, 0, 0], most=2).of_row.tolist() == [0, 0, 1, 2, 2, 3]


def test_clusters_of_unequal_sizes():
    keys = ["a", "b", "a", "c", "b", "a"]
    order = RowOrder(counts=(6,), weights=(1.0,), seed=0, shuffle=True, clusters=clusters_of(keys))
    numbers = [order.row(place) for place in range(6)]
    runs = [key for place, key in enumerate(keys[n] for n in numbers) if not place or key != keys[numbers[place - 1]]]
    assert sorted(numbers) == list(range(6)) and len(runs) == 3
    unshuffled = RowOrder(counts=(6,), weights=(1.0,), seed=0, shuffle=False, clusters=clusters_of(keys))
    assert [unshuffled.row(place) for place in range(6)] == list(range(6))
