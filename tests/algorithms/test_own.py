"""User-defined losses and advantages, from files outside the package."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from tiercel.algorithms import LossInput, Options, RewardTable, Totals, advantages, policy_loss
from tiercel.algorithms.custom_trial import try_own_functions
from tiercel.algorithms.section import Algorithm, load_own_functions
from tiercel.errors import RecipeError, TrainingError

IMPORTS = """\
import torch
from tiercel.algorithms import TokenTerms
"""


def written(directory: Path, body: str) -> str:
    """A file whose function is `mine`, and the call that names it."""
    file = directory / "research.py"
    file.write_text(IMPORTS + body)
    return f"{file}:mine"


def made_batch(ratios: list[float], **changes) -> LossInput:
    logprobs = torch.full((len(ratios),), -1.0, requires_grad=True)
    fields = {
        "logprobs_N": logprobs,
        "old_logprobs_N": -1.0 - torch.tensor(ratios).log(),
        "kl_N": None,
        "advantages_C": torch.tensor([1.0, -2.0]),
        "completion_of_N": torch.tensor([0, 1, 1])[: len(ratios)],
        "totals": Totals(tokens=3, completions=2, groups=1),
        "longest": 4,
    }
    return LossInput(**(fields | changes))


def own_loss(call: str, batch: LossInput, **choices):
    return policy_loss(batch, Algorithm.model_validate({"loss": {"call": call}, **choices}))


def test_values_at_each_token_are_averaged_as_the_recipe_says(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    return -batch.advantages_N * batch.logprobs_N\n")
    for normalise, loss in ((None, (1 - 2) / 2), ("token", (1 - 2 - 2) / 3), ("constant", (1 - 2 - 2) / 8)):
        batch = made_batch([1.0, 1.0, 1.0])
        output = own_loss(call, batch, normalise=normalise)
        assert float(output.loss.detach()) == pytest.approx(loss)
        assert output.token_sums == {}
    output.loss.backward()
    torch.testing.assert_close(batch.logprobs_N.grad, torch.tensor([-1.0, 2.0, 2.0]) / 8)


def test_weights_penalty_and_entropy_are_added_to_it(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    return batch.logprobs_N\n")
    batch = made_batch(
        [1.0, 1.0, 1.0],
        weights_N=torch.tensor([2.0, 0.0, 1.0]),
        kl_N=torch.tensor([3.0, 0.0, 0.0]),
        entropy_N=torch.tensor([0.0, 6.0, 0.0]),
    )
    output = own_loss(call, batch, normalise="token", kl={"coef": 0.5}, entropy_coef=0.1)
    assert float(output.loss.detach()) == pytest.approx((-2.0 - 1.0 + 0.5 * 3 - 0.1 * 6) / 3)
    assert float(output.token_sums["kl/mean"]) == 3.0


def test_sums_come_back_detached(tmp_path):
    call = written(
        tmp_path,
        "def mine(batch):\n"
        "    ratio_N = (batch.logprobs_N - batch.old_logprobs_N).exp()\n"
        "    return TokenTerms(values_N=-ratio_N, token_sums={'loss/ratio': ratio_N.sum()})\n",
    )
    sums = own_loss(call, made_batch([1.0, 2.0, 3.0])).token_sums
    assert list(sums) == ["loss/ratio"] and float(sums["loss/ratio"]) == pytest.approx(6.0)
    assert not sums["loss/ratio"].requires_grad


def test_a_microbatch_without_tokens_is_not_asked_and_keeps_its_graph(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    raise RuntimeError\n")
    batch = made_batch([])
    loss = own_loss(call, batch).loss
    loss.backward()
    assert float(loss.detach()) == 0.0 and batch.logprobs_N.grad.shape == (0,)


@pytest.mark.parametrize(
    ("body", "says"),
    (
        (
            "return batch.logprobs_N.sum()",
            r"returned a tensor of shape \(\), not \(3,\): a value for each",
        ),
        ("return batch.logprobs_N.double()", "returned a tensor of dtype float64, not float32"),
        ("return [1.0, 2.0, 3.0]", "returned a list, not a tensor: a value for each scored token"),
        ("return None", "returned a NoneType, not a tensor"),
        ("return batch.advantages_N", "returned values without gradient; compute them from batch.logprobs_N"),
        ("return batch.logprobs_N / 0", "returned values that are not finite, such as -inf"),
        (
            "return TokenTerms(values_N=batch.logprobs_N, token_sums={'loss': batch.logprobs_N.sum()})",
            "returned token_sums with 'loss', but its names must begin with loss/",
        ),
        (
            "return TokenTerms(values_N=batch.logprobs_N, token_sums={'loss/x': batch.logprobs_N})",
            "returned token_sums with 'loss/x', .*tensors of one number",
        ),
        (
            "return TokenTerms(values_N=batch.logprobs_N, token_sums=[1])",
            "returned token_sums as a list, but it must be a dict",
        ),
    ),
)
def test_what_a_loss_returns_is_checked(tmp_path, body, says):
    call = written(tmp_path, f"def mine(batch):\n    {body}\n")
    with pytest.raises(TrainingError, match=rf"^algorithm\.loss\.call: {call} {says}.*correct the function"):
        own_loss(call, made_batch([1.0, 1.0, 1.0]))


def test_later_values_that_are_not_finite_are_left_to_the_run(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    return batch.logprobs_N / (batch.advantages_N + 2)\n")
    own_loss(call, made_batch([1.0]))
    output = own_loss(call, made_batch([1.0, 1.0, 1.0]))
    assert math.isinf(float(output.loss.detach()))


def test_inputs_that_are_not_finite_are_no_fault_of_the_loss(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    return batch.logprobs_N * batch.advantages_N\n")
    output = own_loss(call, made_batch([1.0, 1.0, 1.0], advantages_C=torch.tensor([math.nan, 1.0])))
    assert math.isnan(float(output.loss.detach()))


def test_an_exception_names_file_line_and_remedy(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    wrong = batch.tokens\n    return wrong\n")
    with pytest.raises(TrainingError) as caught:
        own_loss(call, made_batch([1.0]))
    text = str(caught.value)
    assert text.startswith(f"algorithm.loss.call: {call} raised AttributeError")
    assert f"{tmp_path}/research.py:4: wrong = batch.tokens" in text and "correct the function" in text


def test_an_exception_inside_torch_names_the_line_of_the_users_file(tmp_path):
    call = written(tmp_path, "def mine(batch):\n    return batch.logprobs_N + torch.ones(7)\n")
    with pytest.raises(TrainingError, match=r"research\.py:4: return batch\.logprobs_N \+ torch\.ones\(7\)"):
        own_loss(call, made_batch([1.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("body", "says"),
    (
        ("def yours(batch):\n    return 1\n", "has no function mine; its functions are: yours"),
        ("mine = 3\n", "has no function mine; its functions are: none"),
        ("import nothing_of_this_name\n", "cannot be imported for its function mine: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "cannot be imported for its function mine: SystemExit"),
        ("class mine:\n    def __call__(self, batch):\n        return 1\n", "mine is a class"),
    ),
)
def test_a_function_that_cannot_be_loaded_is_a_fault_of_the_recipe(tmp_path, body, says):
    algorithm = Algorithm.model_validate({"advantage": {"call": written(tmp_path, body)}})
    with pytest.raises(RecipeError) as caught:
        load_own_functions(algorithm)
    assert caught.value.problems[0].startswith("algorithm.advantage.call: ") and says in caught.value.problems[0]


def test_a_file_that_is_not_there_is_a_fault_of_the_recipe(tmp_path):
    algorithm = Algorithm.model_validate({"loss": {"call": f"{tmp_path}/none.py:mine"}})
    with pytest.raises(RecipeError, match=r"algorithm\.loss\.call: .*none\.py is not a file"):
        load_own_functions(algorithm)


def test_a_file_beside_the_function_hides_no_package(tmp_path):
    (tmp_path / "wave.py").write_text("raise ImportError('the wrong one')\n")
    algorithm = Algorithm.model_validate({"loss": {"call": written(tmp_path, "def mine(batch):\n    return 1\n")}})
    load_own_functions(algorithm)
    assert importlib.import_module("wave").__file__ != str(tmp_path / "wave.py")


def made_table() -> RewardTable:
    return RewardTable(
        totals_C=torch.tensor([0.0, 1.0, 5.0, 2.0, 2.0]),
        group_of_C=torch.tensor([0, 0, 0, 1, 1]),
        rewards_CF=torch.tensor([[0.0], [1.0], [5.0], [2.0], [2.0]]),
        weights_F=torch.ones(1),
        is_correct_C=torch.tensor([False, True, True, True, True]),
    )


def own_advantage(call: str, **options) -> torch.Tensor:
    chosen = Algorithm.model_validate({"advantage": {"call": call}}).advantage
    return advantages(made_table(), chosen, Options(**options))


MEDIAN = """\
def mine(table, options):
    values_C = table.totals_C.clone()
    for run in table.groups():
        values_C[run] -= table.totals_C[run].median()
    return values_C
"""


def test_an_advantage_is_scaled_and_cut_as_the_recipe_says(tmp_path):
    call = written(tmp_path, MEDIAN)
    assert own_advantage(call).tolist() == [-1.0, 0.0, 4.0, 0.0, 0.0]
    assert own_advantage(call, clip=2.0).tolist() == [-1.0, 0.0, 2.0, 0.0, 0.0]
    # the totals' mean is 2, their squared deviations 4 + 1 + 9 over 4
    deviation = math.sqrt(14 / 4) + 1e-4
    torch.testing.assert_close(own_advantage(call, scale="batch")[:3], torch.tensor([-1.0, 0.0, 4.0]) / deviation)


def test_an_advantage_may_change_the_totals_that_it_gets(tmp_path):
    in_place = MEDIAN.replace("table.totals_C.clone()", "table.totals_C")
    plain = own_advantage(written(tmp_path, MEDIAN), scale="batch")
    (tmp_path / "more").mkdir()
    assert torch.equal(own_advantage(written(tmp_path / "more", in_place), scale="batch"), plain)


def test_an_advantage_sees_the_options(tmp_path):
    call = written(tmp_path, "def mine(table, options):\n    return table.totals_C * options.pass_k\n")
    assert own_advantage(call, pass_k=3).tolist() == [0.0, 3.0, 15.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("body", "says"),
    (
        ("return table.totals_C[:3]", r"returned a tensor of shape \(3,\), not \(5,\): a value for each completion"),
        ("return table.is_correct_C", "returned a tensor of dtype bool, not float32"),
        ("return table.totals_C.log()", "returned values that are not finite, such as -inf"),
        ("return table.total", "raised AttributeError"),
    ),
)
def test_what_an_advantage_returns_is_checked(tmp_path, body, says):
    call = written(tmp_path, f"def mine(table, options):\n    {body}\n")
    with pytest.raises(TrainingError, match=rf"^algorithm\.advantage\.call: {call} {says}"):
        own_advantage(call)


def test_a_trial_calls_both_with_what_the_recipe_asks_for(tmp_path):
    loss = "def mine(batch):\n    assert batch.kl_N is not None and batch.entropy_N is not None\n"
    call = written(tmp_path, loss + "    return batch.logprobs_N\n")
    (tmp_path / "more.py").write_text("def mine(table, options):\n    return table.rewards_CF @ table.weights_F\n")
    tree = {"loss": {"call": call}, "advantage": {"call": f"{tmp_path}/more.py:mine"}}
    algorithm = Algorithm.model_validate(tree | {"kl": {"coef": 0.1}, "entropy_coef": 0.1})
    lines = list(try_own_functions(algorithm, group_size=3, rewards=2))
    assert [line.partition(":")[0] for line in lines] == ["algorithm.loss.call", "algorithm.advantage.call"]
    assert list(try_own_functions(Algorithm(), group_size=3, rewards=2)) == []
