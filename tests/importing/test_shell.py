"""Commands of shell scripts."""

import pytest

from tiercel.importing.launches import launch_of, parsed_flags
from tiercel.importing.shell import commands


def words(script: str) -> list[list[str]]:
    return [list(command.words) for command in commands(script)]


def test_continued_lines_comments_and_quotes():
    script = """
    # a comment with 'one quote
    train --a 1 \\
        --data 'file one.json#1000' \\
        --b "two words"   # --c 3
    echo done; echo again && echo more
    """
    assert words(script) == [
        ["train", "--a", "1", "--data", "file one.json#1000", "--b", "two words"],
        ["echo", "done"],
        ["echo", "again"],
        ["echo", "more"],
    ]


def test_a_hash_inside_a_word_is_no_comment():
    assert words("train --dataset org/rows#500 --x 1") == [["train", "--dataset", "org/rows#500", "--x", "1"]]


def test_variables_of_the_script_are_filled_in():
    script = 'MODEL=org/model\nexport OUT="runs/$MODEL"\ntrain --m ${MODEL} --o "$OUT" --n $UNSET \'$MODEL\' ${N:-4}\n'
    assert words(script) == [["train", "--m", "org/model", "--o", "runs/org/model", "--n", "$UNSET", "$MODEL", "4"]]


def test_variables_before_a_command_are_its_own():
    (first, second) = commands("A=1 B=2 run --x\nrun --y")
    assert first.variables == {"A": "1", "B": "2"} and second.variables == {}


def test_an_open_quote_is_refused():
    with pytest.raises(ValueError):
        commands('train --a "open')


def test_flags_of_every_form():
    assert parsed_flags(["stray", "--a", "1", "--b=x=y", "--c", "--d-e", "1", "2", "-1"]) == {
        "a": ("1",), "b": ("x=y",), "c": ("true",), "d_e": ("1", "2", "-1"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "framework", "kind", "processes"),
    [
        ("swift rlhf --rlhf_type grpo --model m", "ms-swift", "grpo", 1),
        ("NPROC_PER_NODE=4 NNODES=2 swift rlhf --rlhf_type grpo --model m", "ms-swift", "grpo", 8),
        ("swift sft --model m", "ms-swift", "sft", 1),
        ("torchrun --nproc_per_node=4 swift/cli/rlhf.py --rlhf_type grpo --model m", "ms-swift", "grpo", 4),
        ("trl grpo --model_name_or_path m", "TRL", "grpo", 1),
        ("accelerate launch --num_processes 8 train_grpo.py --model_name_or_path m", "TRL", "grpo", 8),
        (
            "torchrun --nproc-per-node 8 --nnodes 2 src/open_r1/grpo_jsonl.py --model_name_or_path m",
            "VLM-R1",
            "grpo",
            16,
        ),
    ],
)
def test_who_is_started_on_how_many_processes(line, framework, kind, processes):
    launch = launch_of(commands(line)[0])
    assert (launch.framework, launch.kind, launch.processes) == (framework, kind, processes)


@pytest.mark.parametrize("line", ("swift rlhf --rlhf_type dpo --model m", "swift deploy --model m", "ls -l", "python"))
def test_what_trains_nothing_known_is_passed_over(line):
    assert launch_of(commands(line)[0]) is None
