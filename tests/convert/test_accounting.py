"""Nothing that a command gives is lost: it becomes a value, or is in a comment, or is reported."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.coming_from import unspoken, wrong
from tests.convert.helpers import DPO, FACTORY, GRPO, SFT, TRL, drafted, text_of, told
from tests.convert.shapes import SHAPES
from tiercel.config.yaml_text import parse
from tiercel.convert.table import environment_rows, rows_of
from tiercel.convert.text import recipe_text

KNOWN = {
    *rows_of("ms-swift", "grpo"),
    *rows_of("TRL", "sft"),
    *rows_of("VLM-R1", "grpo"),
    *rows_of("LLaMA-Factory", "dpo"),
}
FLAGS = sorted({*KNOWN, "odd", "odd_token"} - {"rlhf_type", "stage", "do_train", "config"})
KTO = DPO.replace("dpo", "kto")
GKD = f"{DPO.replace('dpo', 'gkd')} --teacher_model org/t"
VARIABLES = sorted(row.name.replace("*", "X") for row in environment_rows() if "launcher" not in row.name)
WORDS = st.sampled_from(
    ["true", "false", "3", "0.5", "none", "x y", "a: b # c", "[q, {r]", "$HOME", '"', "path/to#4", ""]
)


@pytest.mark.parametrize("script", SHAPES.values(), ids=SHAPES.keys())
def test_every_flag_and_variable_of_a_command_is_spoken_of(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draft = drafted(script)
    assert unspoken(draft, recipe_text(draft)) == ()
    assert wrong(draft) == ()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from([GRPO, SFT, TRL, DPO, FACTORY, KTO, GKD]),
    flags=st.dictionaries(st.sampled_from(FLAGS), st.lists(WORDS, max_size=2), max_size=8),
    variables=st.dictionaries(st.sampled_from([*VARIABLES, "MY_OWN"]), st.sampled_from(["1", "64", "a,b"]), max_size=4),
)
def test_whatever_is_given_stands_in_the_recipe_or_is_refused_by_name(base, flags, variables):
    def quoted(word: str) -> str:
        return "'" + word.replace("'", "") + "'"

    line = " ".join(
        [*(f"{name}={value}" for name, value in variables.items()), base]
        + [f"--{name} {' '.join(map(quoted, words))}" for name, words in flags.items()]
    )
    try:
        draft = drafted(line)
    except ValueError as error:
        assert any(name in str(error) for name in [*flags, *variables]), error
        return
    text = recipe_text(draft)
    assert isinstance(parse(text)[0], dict)
    assert unspoken(draft, text) == ()


def test_the_check_itself_sees_what_is_left_out():
    draft = drafted(f"NCCL_DEBUG=INFO {GRPO} --learning_rate 3e-6 --odd thing")
    text = recipe_text(draft)
    assert unspoken(draft, text) == ()
    assert unspoken(draft, text.replace("NCCL_DEBUG", "")) == ("NCCL_DEBUG",)
    assert unspoken(draft, text.replace("thing", "")) == ("--odd thing",)


def test_a_flag_given_twice_and_words_of_no_flag_are_told():
    draft = drafted("swift sft more.yaml --model org/m --dataset r --seed 1 --seed 2")
    assert draft.values["train.seed"] == 2
    assert "--seed 1: is given again later" in told(draft)
    assert "more.yaml: belongs to no flag" in told(draft)


@pytest.mark.parametrize(
    ("flag", "is_hidden"),
    [
        ("--hub_token hf_ABCDEFGH", True),
        ("--my_password 12345678", True),
        ("--my_password 1234", True),
        ("--max_new_tokens 300", False),
        ("--some_token_count 300", False),
    ],
)
def test_a_secret_stays_out_and_a_count_of_tokens_is_none(flag, is_hidden):
    text = text_of(f"{GRPO} {flag}")
    assert (flag.split()[1] not in text) == is_hidden
    assert flag.split()[0] in text


def test_secrets_of_the_environment_stay_out():
    proxy = "https_proxy=http://me:hidden@proxy:80"
    text = text_of(
        f"WANDB_API_KEY=abcdefgh VIDEO_MAX_TOKEN_NUM=128 {proxy} {GRPO} --hub_token hf_ABCD --hub_token hf_EFGH"
    )
    assert not [word for word in ("abcdefgh", "hidden", "hf_ABCD", "hf_EFGH") if word in text]
    assert "https_proxy=http://redacted@proxy:80" in text
    assert "abcdefgh" not in text and "WANDB_API_KEY: a secret stays out" in text
    assert "VIDEO_MAX_TOKEN_NUM=128" in text


def test_what_only_the_shell_knows_is_told():
    draft = drafted(f'{GRPO} --output_dir "runs/$(date +%F)" --gradient_accumulation_steps 2')
    assert draft.values["output"] == "runs/imported"
    assert "holds what only the shell knows" in told(draft)
    with pytest.raises(ValueError, match=r"--gradient_accumulation_steps \$\(nproc\) is not a number"):
        drafted(f"{GRPO} --gradient_accumulation_steps $(nproc)")


def test_what_nothing_depends_on_is_told_once():
    draft = drafted(f'export LOG_PATH="./debug_$RUN.txt"\nMINE=$RUN {GRPO} --logging_dir logs/$RUN')
    for name in ("LOG_PATH", "MINE", "--logging_dir"):
        assert [note.is_change for note in draft.notes if note.subject.startswith(name)] == [False], name
    draft = drafted(f"CUDA_VISIBLE_DEVICES=$GPUS {FACTORY}")  # a process for each of them
    assert "CUDA_VISIBLE_DEVICES=$GPUS: holds what only the shell knows" in told(draft)


def test_what_packing_counts_is_told():
    notes = [note for note in drafted(f"{SFT} --packing true").notes if "--packing" in note.subject]
    assert notes[0].is_change and "an update counts rows" in notes[0].text


def test_an_unknown_flag_says_what_comes_nearest():
    draft = drafted(f"{GRPO} --learning_rte 1e-5 --nothing_like_it 1")
    assert "--learning_rte 1e-5: is not known; --learning_rate was perhaps meant" in told(draft)
    assert "--nothing_like_it 1: is not known; has no equivalent" in told(draft)
