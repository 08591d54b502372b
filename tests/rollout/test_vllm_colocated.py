"""What the engine in process needs from vLLM. vLLM itself is not imported."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from packaging.version import Version

from tiercel.errors import ElsewhereError, EnvironmentProblem
from tiercel.rollout.vllm import colocated
from tiercel.rollout.vllm.colocated import ColocatedSampler, _require_reload


class HalfAnEngine(ColocatedSampler):
    """One of two ranks, each a thread, that share an engine. It samples three turns, or fails after the second."""

    def __init__(self, rank: int, fails: bool):
        self.ranks, self.group, self.fails, self.turns = SimpleNamespace(rank=rank, heartbeat=self), "both", fails, 0
        self.beats = 0

    def beat(self):
        self.beats += 1

    def _request(self, asked):
        return asked

    def _generate(self, requests):
        return requests

    def _going_on(self, builders, asked, outputs):
        assert len(outputs) == len(asked)
        self.turns += 1
        if self.fails and self.turns == 2:
            raise EnvironmentProblem("a picture has another number of tokens")
        return builders if self.turns < 3 else []


def test_an_error_of_one_rank_ends_all_ranks_of_its_engine(monkeypatch):
    meeting, shared, me = threading.Barrier(2, timeout=20), [None, None], threading.local()

    def gather(shares, own, group):
        shared[me.rank] = own
        meeting.wait()
        shares[:] = shared
        meeting.wait()

    of_engine = SimpleNamespace(
        all_gather_object=gather, get_rank=lambda group: me.rank, get_world_size=lambda group: 2
    )
    monkeypatch.setattr(colocated, "dist", of_engine)
    monkeypatch.setattr(colocated.PromptRequest, "of_turn", lambda builder, params: builder)

    def sample(rank: int):
        me.rank = rank
        return HalfAnEngine(rank, fails=rank == 0)._trajectories([[SimpleNamespace()]], None)

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(sample, rank) for rank in (0, 1)]
        first, second = (each.exception() for each in both)
    assert type(first) is EnvironmentProblem
    assert type(second) is ElsewhereError and second.exit_code == first.exit_code


def test_each_turn_of_all_trajectories_is_a_sign_of_life(monkeypatch):
    engine = HalfAnEngine(0, fails=False)
    monkeypatch.setattr(engine, "_of_engine", lambda own: ([own], 0))
    for _ in range(2):
        engine._outputs([SimpleNamespace()])
    assert engine.beats == 2


def test_weights_are_not_dropped_where_vllm_cannot_read_them_again():
    with pytest.raises(
        EnvironmentProblem,
        match=r"rollout\.vllm\.sleep_level: 2 does not work with vLLM 0\.32\.0,.*set sleep_level: 1,",
    ):
        _require_reload(Version("0.32.0"), 2)
    _require_reload(Version("0.33.0"), 2)
    _require_reload(Version("0.19.0"), 1)
