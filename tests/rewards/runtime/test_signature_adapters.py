"""Rewards as TRL, VLM-R1, ms-swift, verl and EasyR1 write them, each in its own file and in a real process."""

import importlib.util
from dataclasses import replace
from functools import partial

import pytest

from tests.rewards.samples import limits, sample
from tiercel.config.schema import Reliability
from tiercel.errors import RecipeError
from tiercel.reward_types import PolicyTurn
from tiercel.rewards.external import ByCall
from tiercel.rewards.runtime.batches import batch_reward
from tiercel.rewards.runtime.in_process import register_function
from tiercel.rewards.runtime.signature_adapters import NoReward, as_reward
from tiercel.rewards.runtime.user import UserReward

pytestmark = pytest.mark.usefixtures("no_child_left")

SAMPLES = (
    sample("one", 1, id="a", columns={"solution": "one", "level": 3}),
    sample("two", 2, id="b", columns={"solution": "one"}),
    sample("one", 3, id="c", columns={"solution": "two", "level": 5}),
)


def score(call, *samples, **arguments):
    reward = UserReward(call, limits(30.0), arguments=arguments)
    try:
        reward.start()
        return reward.score(samples or SAMPLES)
    finally:
        reward.close()


def numbers(values):
    assert [value.failure for value in values] == [None] * len(values)
    return [value.value for value in values]


def refused(call, **arguments):
    with pytest.raises(RecipeError) as error:
        score(call, **arguments)
    return str(error.value)


# TRL's and VLM-R1's functions

TRL = """
    CALLS = []

    def score(completions, solution, **kwargs):
        CALLS.append(len(completions))
        assert CALLS == [3], "once for a batch"
        assert kwargs["prompts"][0] == [{"role": "user", "content": "<image>Where?"}]
        assert kwargs["level"] == [3, None, 5] and kwargs["answer"] == [1, 2, 3]
        contents = [completion[0]["content"] for completion in completions]
        assert all(set(completion[0]) == {"role", "content"} for completion in completions)
        return [float(content == right) for content, right in zip(contents, solution)]
    """


def test_a_function_of_trls_gets_conversations_and_columns_once_for_a_batch(reward_file):
    assert numbers(score(reward_file(TRL))) == [1.0, 0.0, 0.0]


def test_prompts_completions_and_columns_without_further_arguments(reward_file):
    call = reward_file("""
        def score(prompts, completions, level=None):
            return [None if each is None else len(prompt) + each for prompt, each in zip(prompts, level)]
        """)
    assert numbers(score(call)) == [4.0, None, 6.0]


def test_texts_are_chosen_by_an_attribute(reward_file):
    call = reward_file("""
        def score(completions, prompts, **kwargs):
            assert prompts == ["<image>Where?"] * 3
            return [len(text) for text in completions]
        score.conversational = False
        """)
    assert numbers(score(call)) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "taken",
    (
        "len(each)",
        "float('o' in each)",
        "each.count('o')",
        "float(each == 'one')",
        "float('one' == each)",
        "float(each in ('one',))",
        "float(each != 'one')",
        "float('o' in each[-20:])",
    ),
)
def test_a_conversation_is_not_taken_for_a_text(reward_file, taken):
    """TRL's own first example is len(completion), which would be 1 for each conversation."""
    call = reward_file(f"def score(completions, **kwargs):\n    return [{taken} for each in completions]\n")
    for value in score(call):
        assert value.value is None and "write NAME.conversational = False" in value.failure


def test_a_function_that_names_the_content_of_turns_may_count_them(reward_file):
    call = reward_file("""
        def score(completions, **kwargs):
            def text(each):
                return each[0]["content"] if isinstance(each, list) and len(each) > 0 else each
            return [len(text(each)) for each in completions]
        """)
    assert numbers(score(call)) == [3.0, 3.0, 3.0]


def test_a_conversation_is_still_a_list(reward_file):
    call = reward_file("""
        import copy, json, pickle

        def score(completions, **kwargs):
            assert completions == json.loads(json.dumps(completions)) == pickle.loads(pickle.dumps(completions))
            assert all(each and isinstance(each, list) and list(each) == copy.deepcopy(each) for each in completions)
            return [len(each[-1]["content"]) for each in completions]
        """)
    assert numbers(score(call)) == [3.0, 3.0, 3.0]


def test_a_function_of_keywords_alone_and_an_async_one(reward_file):
    alone = reward_file(
        "def score(**kwargs):\n    return [len(each[0]['content']) for each in kwargs['completions']]\n"
    )
    assert numbers(score(alone)) == [3.0, 3.0, 3.0]
    waiting = reward_file("""
        import asyncio

        async def score(completions, **kwargs):
            await asyncio.sleep(0.01)
            return [0.5] * len(completions)
        """)
    assert numbers(score(waiting)) == [0.5, 0.5, 0.5]


def test_the_column_answer_comes_before_what_its_format_takes(reward_file):
    """Rows of problem, solution and answer, read as VLM-R1's, have the solution as their right answer."""
    asked = sample("x", "a long proof", columns={"solution": "a long proof", "answer": 5})
    for form in ("completion, answer):\n    return answer\n", "completions, answer):\n    return answer\n"):
        assert numbers(score(reward_file(f"def score({form}"), asked)) == [5.0]


def test_the_answer_is_the_solution_where_rows_have_no_such_column(reward_file):
    call = reward_file("def score(completions, solution):\n    return solution\n")
    assert numbers(score(call, sample("x", 7), sample("y", 8))) == [7.0, 8.0]


# ms-swift's classes

ORM = """
    from swift.plugin import ORM, orms

    class Right(ORM):
        def __call__(self, completions, solution, **kwargs):
            assert self.args is None and isinstance(completions[0], str)
            return [float(text == right) for text, right in zip(completions, solution)]

    orms["registered_right"] = Right
    """
without_swift = pytest.mark.skipif(importlib.util.find_spec("swift") is not None, reason="ms-swift is installed")


def named(call, name):
    return call.replace(":score", f":{name}")


def test_a_class_gets_texts_and_is_called_by_its_own_or_its_registered_name(reward_file):
    call = reward_file(ORM, name="plugin.py")
    assert numbers(score(named(call, "Right"))) == [1.0, 0.0, 0.0]
    assert numbers(score(named(call, "registered_right"))) == [1.0, 0.0, 0.0]


def test_a_class_of_no_base_and_an_object(reward_file):
    source = """
        class Length:
            def __init__(self, unit=1):
                self.unit = unit
            def __call__(self, completions, **kwargs):
                return [self.unit * len(text) for text in completions]

        class Own:
            def __call__(self, sample):
                return len(sample.completion)

        class Waiting:
            async def __call__(self, sample):
                return len(sample.completion)

        class WaitingByName:
            async def __call__(self, completion):
                return len(completion)

        tens = Length(10)
        """
    call = reward_file(source)
    assert numbers(score(named(call, "Length"))) == [3.0, 3.0, 3.0]
    assert numbers(score(named(call, "tens"))) == [30.0, 30.0, 30.0]
    assert numbers(score(named(call, "Own"))) == [3.0, 3.0, 3.0]
    assert numbers(score(named(call, "Waiting"))) == [3.0, 3.0, 3.0]
    assert numbers(score(named(call, "WaitingByName"))) == [3.0, 3.0, 3.0]


@without_swift
@pytest.mark.parametrize("module", ["swift.plugin", "swift.rewards"])
def test_the_stand_in_is_there_for_both_names_and_async_classes(reward_file, module):
    call = reward_file(f"""
        from {module} import AsyncORM, orms

        class Waits(AsyncORM):
            async def __call__(self, completions, **kwargs):
                return [1.0] * len(completions)

        orms.update(score=Waits)
        """)
    assert numbers(score(call)) == [1.0, 1.0, 1.0]


@without_swift
@pytest.mark.parametrize("line", ["from swift.llm import PtEngine", "from swift.plugin import rm_plugins"])
def test_more_of_ms_swift_than_the_stand_in_has_is_refused(reward_file, line):
    said = refused(reward_file(f"from swift.plugin import ORM\n{line}\n\nclass score(ORM):\n    pass\n"))
    assert "ORM, AsyncORM, orms of swift.plugin" in said and "remove that import, or install ms-swift" in said


@without_swift
def test_code_that_looks_whether_ms_swift_is_there_finds_it_is_not(reward_file):
    call = reward_file("""
        try:
            import swift
        except ImportError:
            swift = None

        def score(sample):
            return float(swift is None)
        """)
    assert numbers(score(call)) == [1.0, 1.0, 1.0]


# Faults of every form of reward

BODY = {
    "own batched": "def score(samples):\n    {body}\nscore.batched = True\n",
    "function": "def score(completions, **kwargs):\n    {body}\n",
    "async": "async def score(completions, **kwargs):\n    {body}\n",
    "class": "class score:\n    def __call__(self, completions, **kwargs):\n        {body}\n",
}


WRONG_LENGTH = ("return [1.0]", "returned 1 value for 3 samples")
RAISES = ("raise KeyError('level')", "KeyError: 'level'")


@pytest.mark.parametrize(
    ("form", "body", "says"),
    [
        *((form, *fault) for form in BODY for fault in (WRONG_LENGTH, RAISES)),
        ("function", "return 1.0", "must return a list, not a float"),
        ("class", "return None", "must return a list, not a NoneType"),
        ("async", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_fault_of_the_call_fails_every_completion(reward_file, form, body, says):
    values = score(reward_file(BODY[form].format(body=body)))
    assert [value.value for value in values] == [None, None, None]
    for value, each in zip(values, SAMPLES, strict=True):
        assert says in value.failure and f"row {each.id}" in value.failure
        assert "signature_adapters.py" not in value.failure and "worker.py" not in value.failure


@pytest.mark.parametrize("form", BODY)
def test_a_wrong_value_fails_its_own_completion(reward_file, form):
    good, nan, text = score(reward_file(BODY[form].format(body="return [0.5, float('nan'), 'x']")))
    assert good.value == 0.5
    assert "returned nan, but a reward must return a finite number," in nan.failure
    assert "returned 'x', a str" in text.failure


def test_an_argument_that_no_row_has_is_named(reward_file):
    (value, *_) = score(reward_file("def score(completions, completion_ids):\n    return [1.0] * 3\n"))
    assert "it takes completion_ids, which the rows here do not have; give it a default, or take what there is: " in (
        value.failure
    )


def test_a_right_answer_that_a_row_lacks_is_not_passed_as_none(reward_file):
    rows = (sample("None", 1), sample("None", None))
    needs = reward_file("def score(completion, answer):\n    return float(str(answer) in completion)\n")
    found, lacking = score(needs, *rows)
    assert found.value == 0.0 and lacking.value is None and "it takes answer, which the rows" in lacking.failure
    may = reward_file("def score(completion, answer=None):\n    return float(answer is None)\n")
    assert numbers(score(may, *rows)) == [0.0, 1.0]


def test_a_class_that_needs_arguments_and_a_thing_that_cannot_be_called(reward_file):
    source = (
        "class score:\n    def __init__(self, url):\n        pass\n    def __call__(self, completions):\n        pass\n"
    )
    assert "score is a class that requires url" in refused(reward_file(source))
    said = refused(reward_file(source.replace("url", "*urls").replace("pass", "assert urls, 'needs a package'", 1)))
    assert "score cannot be created:" in said and "AssertionError: needs a package" in said
    assert "its functions are: Right, registered_right" in refused(named(reward_file(ORM), "wrong"))
    with pytest.raises(NoReward, match="is a Empty, which cannot be called"):
        as_reward(type("Empty", (), {}))


def test_a_function_of_other_parameters_is_told_what_there_is():
    def wrong(text, truth, scale=1.0):
        return 1.0

    with pytest.raises(NoReward, match=r"^takes text, truth; a reward takes `completion`, .*answer, .* row's columns"):
        as_reward(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def score(data_source, solution_str, ground_truth, extra_info=None): return found(solution_str)", 0.5),
        (
            "async def score(solution_str, ground_truth, **more): return {'overall': 9, 'score': found(solution_str)}",
            0.5,
        ),
        ("def score(solution_strs, ground_truths): return [{'score': found(each)} for each in solution_strs]", 0.5),
        ("def score(data_sources, solution_strs, ground_truths, extra_infos): return [0.25] * len(data_sources)", 0.25),
        (
            "def score(reward_inputs, share=1): return [{'format': 1, 'overall': of(each)} for each in reward_inputs]",
            0.5,
        ),
        ("def score(reward_input): return {'score': 9, 'overall': of(reward_input), 'format': 1.0}", 0.5),
        ("async def score(reward_input): return {'score': 9, 'overall': of(reward_input), 'format': 1.0}", 0.5),
        ("async def score(reward_inputs): return [{'overall': of(each)} for each in reward_inputs]", 0.5),
        ("async def score(solution_strs): return [{'score': found(each)} for each in solution_strs]", 0.5),
        # EasyR1's of early 2025, as in EasyR1 213
        ("def score(predict_str, ground_truth, share=0.1): return {'overall': found(predict_str), 'format': 1.0}", 0.5),
        ("def score(predict, ground_truth): return {'overall': found(predict) if ground_truth == 'cup' else 0}", 0.5),
        ("def score(predicts, ground_truths): return [{'overall': found(each)} for each in predicts]", 0.5),
    ],
)
def test_rewards_of_verl_and_easyr1_are_called_as_there(reward_file, source, expected):
    shared = """
def found(text):
    return 0.5 if text == "a cup" else 0.0

def of(given):
    assert set(given) == {"response", "response_length", "ground_truth"} and given["response_length"] == 2
    return found(given["response"]) if given["ground_truth"] == "cup" else 0.0

"""
    given = sample("a cup", "cup", token_count=2, columns={"data_source": "geo"})
    assert numbers(score(reward_file(shared + source + "\n"), given, given)) == [expected] * 2


@pytest.mark.parametrize(
    "source",
    [
        "def score(solution_str, ground_truth): return float(ground_truth == '[1, 2]')",
        "def score(solution_strs, ground_truths): return [float(each == '[1, 2]') for each in ground_truths]",
        "def score(reward_input): return {'overall': float(reward_input['ground_truth'] == '[1, 2]')}",
        "def score(completions, answer): return [float(each == '[1, 2]') for each in answer]",
    ],
)
def test_rewards_of_other_frameworks_get_the_right_answer_as_the_row_has_it(reward_file, source):
    given = sample("a", [1, 2], named={"answer": "[1, 2]"})
    assert numbers(score(reward_file(source + "\n"), given)) == [1.0]


def test_a_function_of_verl_gets_its_columns_and_no_answer_that_a_row_lacks():
    def of_verl(data_source, solution_str, ground_truth, extra_info=None):
        given = (data_source, solution_str, ground_truth, extra_info)
        return {"score": float(given == ("geo", "a cup", "5", {"n": 1, "num_turns": 2}))}

    row = {"data_source": "geo", "extra_info": {"n": 1}, "reward_model": {"ground_truth": "5"}}
    given = sample("a cup", "5", columns=row)
    assert as_reward(of_verl)(given) == 1.0
    with pytest.raises(TypeError, match="it takes ground_truth, which the rows here do not have"):
        as_reward(of_verl)(replace(given, answer=None))


def test_parameters_with_defaults_get_the_prompt_and_other_values_of_a_sample():
    def of_verl(solution_str, ground_truth, prompt=None, completion_id=None):
        return float(prompt is not None)

    def own(predict):
        return float(predict.completion == "a cup")

    assert [as_reward(each)(sample("a cup", "5")) for each in (of_verl, own)] == [1.0, 1.0]


def test_a_default_of_verls_function_is_no_column():
    """Its function for GSM8K has `score=1.0`; rows with a column of that name changed what a right answer earned."""

    def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
        return score if method == "strict" and solution_str == ground_truth else format_score

    def with_required(solution_str, ground_truth, kind):
        return float(kind == "geo")

    given = sample("5", "5", columns={"score": 0.25, "method": "flexible", "kind": "geo"})
    assert as_reward(gsm8k)(given) == 1.0 and as_reward(with_required)(given) == 1.0


@pytest.mark.parametrize("columns", [{}, {"extra_info": {"index": 3}}])
def test_verls_function_always_gets_the_number_of_turns(columns):
    """As Open-AgentRL 13 misses it: `extra_info.get("num_turns", 0)` would be 0 without a word."""

    def turns(solution_str, ground_truth, extra_info):
        return extra_info["num_turns"] + 10 * extra_info.get("index", 0)

    given = sample("5", "5", columns=columns)
    two = replace(given, turns=(PolicyTurn(text="a", token_count=1), PolicyTurn(text="b", token_count=1)))
    index = 30 * bool(columns)
    assert (as_reward(turns)(given), as_reward(turns)(two)) == (2 + index, 4 + index)


def test_a_partial_function_is_called_as_what_it_holds():
    """As in TRL 6133."""

    def longest(completions, most, **kwargs):
        return [float(len(each) == 1 and len(each[0]["content"]) <= most) for each in completions]

    assert as_reward(partial(longest, most=5))([sample("short", None), sample("longer", None)]) == [1.0, 0.0]


def test_tiercels_own_forms_are_left_as_they_are():
    def one(sample):
        return 1.0

    def many(completions):
        return [1.0]

    many.batched = True
    assert as_reward(one) is one and as_reward(many) is many


# Further arguments

TAKE_ARGUMENTS = (
    "def score(sample, times=1):\n    return times * sample.token_count\n",
    "def score(completion, token_count, times):\n    return times * token_count\n",
    "def score(completions, times, **kwargs):\n    return [times * (1 + each) for each in range(len(completions))]\n",
    "def score(completions, **kwargs):\n    return [kwargs['times'] * (1 + i) for i in range(len(completions))]\n",
    "def score(data_source, solution_str, ground_truth, extra_info=None, times=1):\n    return times * ground_truth\n",
    "def score(reward_inputs, times):\n    return [{'overall': times * i['ground_truth']} for i in reward_inputs]\n",
    "async def score(reward_input, times):\n    return {'overall': times * reward_input['ground_truth']}\n",
    "def score(samples, times):\n    return [times * each.token_count for each in samples]\nscore.batched = True\n",
    "class score:\n    def __init__(self, times):\n        self.times = times\n"
    "    def __call__(self, completions, **kwargs):\n        return [self.times, 2 * self.times, 3 * self.times]\n",
)


@pytest.mark.parametrize("text", TAKE_ARGUMENTS)
def test_every_form_takes_further_arguments_and_a_column_does_not_replace_them(reward_file, text):
    rows = [
        sample("a", number, id=str(number), token_count=number, columns={"times": 100, "data_source": "here"})
        for number in (1, 2, 3)
    ]
    assert numbers(score(reward_file(text), *rows, times=0.5)) == [0.5, 1.0, 1.5]


def test_an_argument_that_it_does_not_take_is_refused_at_the_start(reward_file):
    call = reward_file("def score(completion, answer, least=0):\n    return 1\n")
    assert "takes no most, given in `arguments`; it takes completion, answer, least" in refused(call, most=1)
    of_class = "class score:\n    def __call__(self, completions):\n        return [1]\n"
    assert "takes no url" in refused(reward_file(of_class), url="here")


def test_a_recipes_arguments_reach_a_file_and_a_function_of_a_session(reward_file, tmp_path):
    calls = (
        reward_file("def score(completion, token_count, times):\n    return times * token_count\n"),
        register_function(lambda completion, token_count, times: times * token_count, "score", tmp_path),
    )
    for call in calls:
        reward = batch_reward(ByCall(call=call, arguments={"times": 3}), Reliability())
        try:
            reward.start()
            assert numbers(reward.score([sample("a", token_count=2)])) == [6.0]
        finally:
            reward.close()
