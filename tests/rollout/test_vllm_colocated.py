"""What the engine in process needs from vLLM. vLLM itself is not imported."""

import pytest
from packaging.version import Version

from tiercel.errors import EnvironmentProblem
from tiercel.rollout.vllm.colocated import _require_reload


def test_weights_are_not_dropped_where_vllm_cannot_read_them_again():
    with pytest.raises(
        EnvironmentProblem,
        match=r"rollout\.vllm\.sleep_level: 2 does not work with vLLM 0\.32\.0,.*set sleep_level: 1,",
    ):
        _require_reload(Version("0.32.0"), 2)
    _require_reload(Version("0.33.0"), 2)
    _require_reload(Version("0.19.0"), 1)
