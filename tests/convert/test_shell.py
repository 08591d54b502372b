"""Commands of shell scripts."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.convert.helpers import drafted, told
from tiercel.convert.arithmetic import evaluated
from tiercel.convert.detect_program import Foreign
from tiercel.convert.launches import Launch, launch_of, parsed_flags
from tiercel.convert.shell import commands


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


def test_a_comment_ends_at_its_line():
    """Also one that ends with a backslash, as a line of a command that was commented out."""
    assert words("# A=0,1 \\\ntrain \\\n  --a 1\n  # other \\\ntrain --b 2") == [
        ["train", "--a", "1"],
        ["train", "--b", "2"],
    ]


def test_a_hash_inside_a_word_is_no_comment():
    assert words("train --dataset org/rows#500 --x 1") == [["train", "--dataset", "org/rows#500", "--x", "1"]]


def test_variables_of_the_script_are_filled_in():
    script = 'MODEL=org/model\nexport OUT="runs/$MODEL"\ntrain --m ${MODEL} --o "$OUT" --n $UNSET \'$MODEL\' ${N:-4}\n'
    assert words(script) == [["train", "--m", "org/model", "--o", "runs/org/model", "--n", "$UNSET", "$MODEL", "4"]]


def test_variables_before_a_command_are_its_own():
    (first, second) = commands("A=1 B=2 run --x\nrun --y")
    assert first.environment == {"A": "1", "B": "2"} and second.environment == {}


def test_an_open_quote_is_refused():
    with pytest.raises(ValueError):
        commands('train --a "open')


def test_only_what_is_exported_reaches_a_command():
    first, second = commands("A=1\nexport B=2 C\nC=3\nrun\nD=4 env E=5 run")
    assert first.environment == {"B": "2", "C": "3"}
    assert second.environment == {"B": "2", "C": "3", "D": "4", "E": "5"}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("n=4\nrun $(expr 16 / $n) $((16 / n)) `expr 2 + 3` $(( (n+1) * -2 ))", ["4", "4", "5", "-10"]),
        ('run $((7 / 0)) $(nproc) $((a ** 2)) "$(date +%F)"', ["$((7 / 0))", "$(nproc)", "$((a ** 2))", "$(date +%F)"]),
        (
            'A=(1 "two words")\nA+=(3)\nrun "${A[@]}" ${A[1]} ${#A[@]} $A',
            ["1", "two words", "3", "two", "words", "3", "1"],
        ),
        ('L="--a 1"\nrun $L "$L" ${U:-d} ${L:+yes} ${U:+no} ${L%1}', ["--a", "1", "--a 1", "d", "yes", "", "${L%1}"]),
        ('A=()\nrun "${A[@]}" a $A "x$A" "${A[*]}y"', ["a", "x", "y"]),
        ('A=(1\n 2 # it\'s\n)\nrun "${A[*]}" "--n=${#A[@]}"', ["1 2", "--n=2"]),
        ('run "a # b" c#d "(" \\$X "\\$X" # e', ["a # b", "c#d", "(", "$X", "$X"]),
        ("run a > out.txt 2>&1 b <in", ["a", "b"]),
        ("run --host <node_ip> --root <your-root> c", ["--host", "<node_ip>", "--root", "<your-root>", "c"]),
        ("run $'a' \"x\\\"y\" z\\ z ''", ["a", 'x"y', "z z", ""]),
        ('declare -a A=(1 2)\nlocal B=(3)\nexport C=(4)\nrun "${A[@]}" $B $C', ["1", "2", "3", "4"]),
        ('run --a 1 "$@" $* b', ["--a", "1", "b"]),
        (': "${M:=small}"\n: ${M:=large}\nrun $M', ["small"]),
        ("n=$((1<<2))\nread -r A <<< text\nrun a", ["a"]),
        ("D=$(dirname /a/b/c.sh)\nrun $D $(basename $D) $(cd $D/.. && pwd)", ["/a/b", "b", "/a"]),
    ],
)
def test_what_a_shell_would_fill_in(script, found):
    assert words(script)[-1] == ["run", *[word for word in found if word or "''" in script]]


def test_a_script_knows_where_it_lies():
    script = 'ROOT="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"\nrun $ROOT/out'
    assert commands(script, Path("/home/me/run/x.sh"))[-1].words == ("run", "/home/me/out")


def test_the_inside_of_a_here_document_is_no_command():
    assert words("cat > f << EOL\nswift sft --model m\nEOL\nrun") == [["cat"], ["run"]]


@pytest.mark.parametrize(
    ("text", "value"),
    [("16 / 3", 5), ("-7 / 2", -3), ("-7 % 2", -1), ("2*(n+1)", 8), ("08", None), ("__import__('os')", None),
     ("2**99", None), ("n.real", None), ("1.5", None), ("", None), ("9" * 300, None), ("True", None)],
)  # fmt: skip
def test_arithmetic_is_of_whole_numbers_only(text, value):
    assert evaluated(text, {"n": "3"}) == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aA1=$(){}[]\"'`\\ \n\t;|&<>#@*:-+/%", max_size=30))
def test_any_text_is_read_or_refused(script):
    try:
        found = commands(script)
    except ValueError:
        return
    assert all(command.words for command in found)


@pytest.mark.parametrize("script", ("run " + "$(" * 3000 + ")" * 3000, "run " + "${a:-" * 3000 + "}" * 3000))
def test_what_is_nested_too_deeply_is_refused(script):
    with pytest.raises(ValueError, match="nested too deeply"):
        commands(script)


def test_flags_of_every_form():
    flags, earlier, strays = parsed_flags(["stray", "--a", "1", "--b=x=y", "--c", "--d-e", "1", "2", "-1", "--a", "2"])
    assert flags == {"a": ("2",), "b": ("x=y",), "c": (), "d_e": ("1", "2", "-1")}
    assert (earlier, strays) == (["--a 1"], ["stray"])


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


@pytest.mark.parametrize(
    "line", ("swift deploy --model m", "swift rollout --model m", "ls -l", "python", "python a.py")
)
def test_what_trains_nothing_known_is_passed_over(line):
    assert launch_of(commands(line)[0]) is None


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("swift rlhf --rlhf_type ppo --model m", "--rlhf_type ppo"),
        ("megatron rlhf --rlhf_type grpo --model m", "megatron rlhf"),
        ("swift pt --model m", "swift pt"),
        ("trl bco --model_name_or_path m", "trl bco"),
        ("llamafactory-cli train --do_train --stage pt --model_name_or_path m", "--stage pt"),
        ("python online_dpo_vlm.py --model_name_or_path m", "online_dpo_vlm.py"),
        ("python train.py --model_name_or_path m", "train.py"),
    ],
)
def test_another_method_is_named_and_no_grpo(line, flag):
    found = launch_of(commands(line)[0])
    assert isinstance(found, Foreign)
    assert found.told.startswith(flag) and "nearest: " in found.told


STRANGE = "python src/open_r1/grpo.py --model_name_or_path m --dataset_name d --output_dir o --report_to none"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("deepspeed src/train/train_sft.py --lora_enable True --lora_rank 32 --model_id m --output_dir o",
         "train_sft.py is not a script of TRL, which has no --lora_enable, --lora_rank, --model_id;"),
        ("deepspeed train_dpo.py --model_name_or_path m --output_dir o --vision_tower=x --tune_mm_llm False",
         "train_dpo.py is not a script of TRL, which has no --vision_tower, --tune_mm_llm;"),
        ("python train_sft.py --pretrain m --save o --max_len 8 --micro_batch 2 --lr 1e-5",
         "train_sft.py is not a script of TRL, which has no --pretrain, --save, --max_len, --micro_batch ...;"),
        (f"{STRANGE} --temporal true --len_control true --unfreeze-tower true",
         "grpo.py is not a script of VLM-R1, which has no --temporal, --len_control, --unfreeze_tower;"),
    ],
)  # fmt: skip
def test_a_script_of_another_framework_is_named_with_its_flags(line, named):
    found = launch_of(commands(line)[0])
    assert isinstance(found, Foreign) and found.told.startswith(named) and "nearest: the flags of" in found.told


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --num_processes 2 my_sft.py --model_name_or_path m --output_dir o --use_peft --my_rows r",
        "trl sft --model_name_or_path m --lora_enable True",  # the program is TRL's, whatever is given
        STRANGE,
    ],
)
def test_a_script_with_flags_of_its_own_is_still_read(line):
    assert isinstance(launch_of(commands(line)[0]), Launch)


@pytest.mark.parametrize(
    ("line", "method", "kind"),
    [
        ("swift rlhf --model m", "dpo", "dpo"),  # the default there
        ("swift rlhf --rlhf_type simpo --model m", "simpo", "dpo"),
        ("swift rlhf --rlhf_type rm --model m", "rm", "reward"),
        ("python swift/cli/rlhf.py --rlhf_type gkd --model m", "gkd", "distill"),
        ("trl reward --model_name_or_path m", "rm", "reward"),
        ("accelerate launch examples/scripts/dpo_vlm.py --model_name_or_path m", "dpo", "dpo"),
        ("python examples/scripts/mpo_vlm.py --model_name_or_path m", "dpo", "dpo"),
        ("python examples/scripts/reward_modeling.py --model_name_or_path m", "rm", "reward"),
        ("python my_reward_grpo.py --model_name_or_path m", "grpo", "grpo"),
        ("llamafactory-cli train --do_train --stage kto", "kto", "kto"),
        ("lmf train --do_train true", "sft", "sft"),  # the default there
        ("torchrun --nproc_per_node 2 src/train.py --stage rm --do_train", "rm", "reward"),
    ],
)
def test_the_method_and_the_verb(line, method, kind):
    found = launch_of(commands(line)[0])
    assert isinstance(found, Launch)
    assert (found.method, found.kind) == (method, kind)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("swift sft " + "--m a " * 9_000, "a command has 18,002 words, but one"),
        ("A=x\n" + "A=$A$A\n" * 19 + "swift sft --model $A", "a command has 131,074 characters"),
    ],
)
def test_a_command_that_is_too_long_is_refused(script, said):
    with pytest.raises(ValueError, match=said):
        commands(script)


@pytest.mark.parametrize(
    "script",
    [
        "A=0123456789\n" + "A=$A$A\n" * 40 + "train --x $A",
        "A=(a b)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40 + 'train "${A[@]}"',
        "A=ab\n" + "A+=${B:-$A$A}\n" * 40 + "train $A",
        "A=ab\n" + 'A="$(echo $A $A)"\n' * 40 + "train $A",
        "".join(f"export V{number}={'x' * 100}\ntrue\n" for number in range(2000)),
    ],
)
def test_variables_that_double_take_no_memory(script):
    with pytest.raises(ValueError, match=r"its variables expand to more than|a command has"):
        commands(script)


NEMO = "uv run examples/run_vlm_grpo.py --config examples/configs/vlm_grpo_3B.yaml cluster.gpus_per_node=8"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m",
         "openrlhf.cli.train_ppo_ray is not a method of this version; nearest: tiercel grpo"),
        (NEMO, "run_vlm_grpo.py is not a method of this version; nearest: tiercel grpo"),
        (NEMO.replace("run_vlm_grpo", "my_grpo").replace("uv run", "python") + " logger.wandb.key=abc",
         "my_grpo.py is not a script of TRL, which has no cluster.gpus_per_node, logger.wandb.key;"),
    ],
)  # fmt: skip
def test_programs_of_other_frameworks_are_named(line, named):
    """NeMo-RL's command was read as one of TRL: its settings became values of --config."""
    found = launch_of(commands(line)[0])
    assert isinstance(found, Foreign) and found.told.startswith(named) and "abc" not in found.told


def test_a_scripts_file_of_settings_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = commands("accelerate launch --num_processes 2 src/open_r1/grpo.py --config own.yaml")[0]
    (tmp_path / "own.yaml").write_text("grpo: {num_prompts_per_step: 8}\npolicy: {model_name: m}\ndata: {}\n")
    found = launch_of(line)
    assert isinstance(found, Foreign) and "is not a script of TRL, which has no --grpo, --policy, --data" in found.told
    (tmp_path / "own.yaml").write_text("model_name_or_path: m\ndataset_name: org/rows\ntemperature: 0.7\nbeta: 0.04\n")
    found = launch_of(line)  # Open-R1 trains with TRL; without a file it would be R1-V, which samples otherwise
    assert isinstance(found, Launch) and (found.framework, found.processes) == ("TRL", 2)
    assert found.flags["temperature"] == ("0.7",)


def test_settings_without_a_program_are_refused(tmp_path):
    settings = tmp_path / "recipe.yaml"
    with pytest.raises(ValueError, match="give the command that does, such as 'trl grpo --config FILE'"):
        commands('model_name_or_path: m\nsystem_prompt: "You don\'t know"\n', settings)
    assert commands("run: |\n  swift sft --model m\n", settings)[-1].words[:2] == ("swift", "sft")
    for text in ("commands:\n  - trl sft ", "cmd: trl sft "):
        assert drafted(f"{text}--model_name_or_path m --dataset_name org/rows\n", settings).values["model.path"] == "m"


@pytest.mark.parametrize(
    ("script", "unexported"),
    [
        ("NPROC_PER_NODE=4\nMAX_PIXELS=9\nNCCL_DEBUG=INFO\nswift rlhf", ("NPROC_PER_NODE", "MAX_PIXELS")),
        ("export NPROC_PER_NODE=4\nMAX_PIXELS=9 swift rlhf", ()),
        ("set -ea\nNPROC_PER_NODE=4\nset +a\nMAX_PIXELS=9\nswift rlhf", ("MAX_PIXELS",)),
        ("set -euo pipefail -o allexport\nNPROC_PER_NODE=4\nswift rlhf", ()),
        ("set -euo pipefail -- -a\nNPROC_PER_NODE=4\nswift rlhf", ("NPROC_PER_NODE",)),
        ("NPROC_PER_NODE=4\nMAX_PIXELS=9\nexport MAX_PIXELS\nNPROC_PER_NODE=${NPROC_PER_NODE} swift rlhf", ()),
        ("NPROC_PER_NODE=4\nswift rlhf --gradient_accumulation_steps $((16 / NPROC_PER_NODE))", ()),
        ("NPROC_PER_NODE=4\nswift rlhf --gradient_accumulation_steps $(expr 16 / $NPROC_PER_NODE)", ()),
        ("NNODES=2\ntorchrun --nnodes=$NNODES swift/cli/rlhf.py", ()),
    ],
)
def test_variables_that_no_command_gets_are_told(script, unexported):
    """As in the script of ms-swift 4677, whose NPROC_PER_NODE stands in a line of its own."""
    script += " --rlhf_type grpo --model org/m --dataset r.jsonl --reward_funcs format"
    launch = launch_of(commands(script)[-1])
    assert isinstance(launch, Launch) and launch.unexported == unexported
    notes, verb = told(drafted(script)), "are" if len(unexported) > 1 else "is"
    assert (f"{', '.join(unexported)}: {verb} set without export" in notes) == ("without export" in notes)
    assert ("without export" in notes) == bool(unexported)


@pytest.mark.parametrize(
    "line",
    [
        "swift sft --sft_type full --model_type qwen2-vl-7b-instruct --model_id_or_path m --dataset d",
        "swift rlhf --rlhf_type dpo --sft_type lora --model_id_or_path m",
    ],
)
def test_flags_of_ms_swift_2_are_named(line):
    """They were unknown ones, and the recipe had adapters and no model."""
    found = launch_of(commands(line)[0])
    assert isinstance(found, Foreign)
    assert found.told.startswith("--sft_type, --model_id_or_path: flags of ms-swift 2")
