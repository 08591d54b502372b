"""EasyR1's YAML file with overrides, and verl's overrides."""

import pytest

from benchmarks.coming_from import unspoken, wrong
from tests.convert.helpers import drafted, text_of, told, values_of
from tiercel.cli.import_command import imported
from tiercel.convert.overrides import override_words
from tiercel.convert.overrides import values_of as words_of
from tiercel.convert.shell import commands
from tiercel.convert.table import rows_of
from tiercel.errors import RecipeError

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet data.val_files=v.parquet "
    "actor_rollout_ref.model.path=org/Qwen2.5-VL-7B actor_rollout_ref.rollout.n=5"
)
EASY = "python3 -m verl.trainer.main config=config.yaml data.train_files=org/geo@train data.val_files=org/geo@test"
SETTINGS = """
data:
  rollout_batch_size: 512
  max_response_length: 2048
  format_prompt: ./math.jinja
  image_dir: null
  seed: 1
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor:
    global_batch_size: 128
    model:
      model_path: org/Qwen2.5-VL-3B
      override_config: {}
      lora: {rank: 0, alpha: 64, target_modules: all-linear, exclude_modules: .*visual.*}
  rollout: {n: 5, val_override_config: {temperature: 0.6}}
  reward: {reward_function: ./math.py:compute_score}
trainer:
  total_epochs: 15
  logger: ["file", "wandb"]
  n_gpus_per_node: 8
  save_freq: 5
  val_freq: 5
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(SETTINGS)
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Put the answer in \\boxed{}.\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (VERL, {"optim.prompts_per_step": 1024, "optim.minibatches": 4, "rollout.group_size": 5, "optim.lr": 1e-6,
                "algorithm.normalise": "token", "algorithm.delta": 3.0, "algorithm.kl.coef": None, "freeze": [],
                "rollout.engine": "vllm", "rollout.vllm.tensor_parallel": 2, "train.strategy": "fsdp2",
                "train.epochs": 30, "optim.weight_decay": 0.01, "rollout.max_new_tokens": 512}),
        (f"{VERL} data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 "
         "actor_rollout_ref.actor.ppo_epochs=2 trainer.total_training_steps=90 trainer.save_freq=20 "
         "trainer.test_freq=5",
         {"optim.prompts_per_step": 512, "optim.minibatches": 4, "optim.rollout_epochs": 2, "train.steps": 90,
          "train.save_every": 20, "train.eval_every": 5, "train.epochs": None}),
        (f"{VERL} actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01",
         {"algorithm.kl.coef": 0.01, "algorithm.kl.estimator": "k3", "algorithm.kl.place": None,
          "model.reference": "device"}),
        (f"{VERL} actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3+",
         {"algorithm.kl.estimator": "k2"}),
        (f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02",
         {"algorithm.kl.coef": 0.02, "algorithm.kl.place": "reward", "algorithm.kl.estimator": "k1"}),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4",
         {"algorithm.loss": "gspo", "algorithm.normalise": None, "algorithm.clip_low": 3e-4, "algorithm.delta": None}),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=sapo actor_rollout_ref.actor.tau_neg=1.1",
         {"algorithm.loss": "sapo", "algorithm.gate_negative": 1.1, "algorithm.clip_low": None}),
        (f"{VERL} actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
         "algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.normalise": "constant", "algorithm.scale": "none"}),
        (f"{VERL} actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.exclude_modules='.*visual.*' "
         "actor_rollout_ref.model.lora_adapter_path=a",
         {"lora.rank": 64, "lora.alpha": 16, "lora.targets": "language", "lora.init": "a", "freeze": None}),
        (f"{VERL} actor_rollout_ref.model.lora_rank=8 'actor_rollout_ref.model.target_modules=[q_proj,v_proj]'",
         {"lora.targets": r"(.*\.)?(q_proj|v_proj)"}),
        (f"{VERL} actor_rollout_ref.rollout.name=hf", {"rollout.engine": "local", "rollout.vllm.sleep_level": None}),
        (f"{VERL} algorithm.rollout_correction.rollout_is=token", {"algorithm.correction.level": "token"}),
        (f"{VERL} data.train_files='[\"a.parquet\",\"b.parquet\"]'",
         {"data.train": "a.parquet", "data.mix": [{"path": "b.parquet", "weight": 1.0}]}),
        (f"{VERL} reward_model.reward_kwargs.overlong_buffer_cfg.enable=True data.max_response_length=1000 "
         "reward_model.reward_kwargs.overlong_buffer_cfg.len=100",
         {"rewards": [{"name": "math"}, {"name": "soft_overlong", "max_tokens": 1000, "buffer": 100, "weight": 1.0}]}),
        (f"{VERL} custom_reward_function.path=mine.py", {"rewards": [{"call": "mine.py:compute_score"}]}),
        (f"{VERL} trainer.n_gpus_per_node=1", {"train.strategy": None, "rollout.vllm.tensor_parallel": 1}),
    ],
)  # fmt: skip
def test_what_verls_keys_become(line, expected):
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (EASY, {"data.train": "hf:org/geo:train", "data.eval": "hf:org/geo:test", "model.path": "org/Qwen2.5-VL-3B",
                "data.prompt": "{prompt} Put the answer in \\boxed{{}}.", "optim.prompts_per_step": 512,
                "optim.minibatches": 4, "algorithm.kl.coef": 0.01, "algorithm.kl.estimator": "k3",
                "algorithm.clip_high": 0.3, "rewards": [{"call": "./math.py:compute_score"}], "train.seed": 1,
                "train.save_every": 5, "trackers": ["wandb"], "model.max_pixels": 4194304}),
        (f"{EASY} worker.actor.model.lora.rank=64 worker.actor.optim.lr=1e-5",
         {"lora.rank": 64, "lora.alpha": 64, "lora.targets": "language", "optim.lr": 1e-5}),
        (f"{EASY} algorithm.disable_kl=True", {"algorithm.kl.coef": None, "model.reference": None}),
        (f"{EASY} algorithm.use_kl_loss=false algorithm.kl_penalty=kl algorithm.kl_coef=1e-3",
         {"algorithm.kl.coef": 1e-3, "algorithm.kl.place": "reward", "algorithm.kl.estimator": "k1"}),
        (f"{EASY} algorithm.use_kl_loss=false algorithm.kl_penalty=low_var_kl",
         {"algorithm.kl.coef": 0.01, "algorithm.kl.place": "reward", "algorithm.kl.estimator": "k3"}),
        (f"{EASY} algorithm.use_kl_loss=false algorithm.kl_penalty=abs", {"algorithm.kl.estimator": "k1"}),
        (f"{EASY} worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4",
         {"algorithm.loss": "cispo", "algorithm.clip_low": 1e-6, "algorithm.clip_high": 4.0, "algorithm.delta": None}),
        (f"{EASY} worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq",
         {"algorithm.loss": "gspo_token", "algorithm.normalise": "sequence", "algorithm.delta": 3.0}),
        (f"{EASY} algorithm.adv_estimator=reinforce_plus_plus", {"algorithm.advantage": "reinforce_pp"}),
        (f"{EASY} algorithm.online_filtering=True", {"rollout.resample_tries": 20}),
        (f"{EASY} worker.actor.model.freeze_vision_tower=true", {"freeze": ["vision", "projector"]}),
        (f"{EASY} worker.actor.optim.lr_warmup_ratio=0.05 trainer.max_steps=100", {"optim.warmup_steps": 5}),
        ("python3 -m verl.trainer.main worker.actor.model.model_path=m data.train_files=a.parquet "
         "worker.reward.score_function=./r.py:score worker.reward.reward_type=batch",
         {"rewards": [{"call": "./r.py:score"}]}),
    ],
)  # fmt: skip
def test_what_easyr1s_keys_become(home, line, expected):
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (VERL.replace("grpo", "gae"), "algorithm.adv_estimator gae is not a method"),
        (VERL.replace("algorithm.adv_estimator=grpo", ""), "algorithm.adv_estimator, by default gae is not a method"),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "loss_mode geo_mean is not a method"),
        (f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True", "turns that may call tools is not a method"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer optim.lr=1e-4", "verl.trainer.fsdp_sft_trainer is not a method"),
    ],
)
def test_another_method_is_named(line, named):
    with pytest.raises(RecipeError, match="is not a method of this version; nearest: ") as error:
        imported(line)
    assert named in str(error.value)


@pytest.mark.parametrize("line", [EASY, VERL, f"{EASY} my.own.key=3 worker.ref.odd=1", f"{VERL} +a.b=c ++d.e=[1,2] $@"])
def test_every_key_is_spoken_of(home, line):
    draft = drafted(line)
    assert unspoken(draft, text_of(line)) == () and wrong(draft) == ()


def test_a_key_that_is_not_known_says_what_comes_nearest():
    notes = told(drafted(f"{VERL} actor_rollout_ref.rollout.temprature=0.5 some.thing=1"))
    assert "actor_rollout_ref.rollout.temprature=0.5: " in notes and "some.thing=1: is not known" in notes


def test_an_estimator_that_the_reward_does_not_have(home):
    notes = told(drafted(f"{EASY} algorithm.use_kl_loss=false algorithm.kl_penalty=abs"))
    assert "algorithm.kl_penalty=abs: tiercel's reward has no estimator abs; k1 averages to the divergence" in notes


def test_the_settings_file_itself(home):
    text, problems = imported(str(home / "config.yaml"))
    assert "# Made from a command of EasyR1" in text and "8 processes" in text
    names = {problem.partition(":")[0] for problem in problems}
    assert names <= {"data", "data.train", "rewards.0.call", "rollout.engine", "trackers"}


def test_settings_that_are_not_there_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "config=config.yaml: the file is not on this machine; its flags are lost" in told(drafted(EASY))


def test_a_template_that_is_more_than_a_text(home):
    (home / "math.jinja").write_text("{% if content %}{{ content }}{% endif %}")
    draft = drafted(EASY)
    assert "data.prompt" not in draft.values and "is more than a text around the question" in told(draft)


def test_words_that_are_overrides():
    assert override_words(["a.b=1", "$@", "+c='x y'", "--config-name", "p", "d=[1,2]", "e=[]"]) == [
        "$@", "--a.b=1", "--c=x y", "--config-name", "p", "--d=1", "2", "--e=null",
    ]  # fmt: skip
    assert words_of("[a, [b") == ["[a, [b"] and words_of("'") == ["'"]


def test_no_row_is_hidden_by_a_pattern_and_none_is_twice():
    for peer in ("EasyR1", "verl"):
        assert all(row.meaning for row in rows_of(peer, "grpo").values())
    launches = commands(f"{VERL} critic.optim.lr=1e-5")
    assert launches and "the critic of gae" in told(drafted(f"{VERL} critic.optim.lr=1e-5"))


@pytest.mark.parametrize(
    ("key", "is_change"),
    [("rollout.enforce_eager=True", False), ("rollout.trace.backend=mlflow", False), ("rollout.seed=3", True),
     ("rollout.min_p=0.1", True), ("rollout.ignore_eos=True", True), ("ref.strategy=fsdp2", False)],
)  # fmt: skip
def test_only_what_changes_no_result_is_nothing_to_do(key, is_change):
    notes = [note for note in drafted(f"{VERL} actor_rollout_ref.{key}").notes if key in note.subject]
    assert [note.is_change for note in notes] == [is_change]


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        (f"{VERL} data.prompt_key=question data.image_key=pics", {"prompt": "question", "images": "pics"}),
        (f"{VERL} data.image_key=image data.prompt_key=prompt", None),
        (f"{EASY} data.prompt_key=task data.answer_key=truth data.video_key=clip",
         {"problem": "task", "answer": "truth", "videos": "clip"}),
        (f"{EASY} data.prompt_key=problem data.answer_key=solution", None),
    ],
)  # fmt: skip
def test_keys_of_columns_are_names_where_no_format_reads_them(home, line, columns):
    draft = drafted(line)
    assert draft.values.get("data.columns") == columns
    if columns is None:
        assert "data.prompt_key" in told(draft) and "is read by this name" in told(draft)


def test_null_is_no_value_on_the_command_line_either():
    nothing = ("trainer.max_actor_ckpt_to_keep", "actor_rollout_ref.model.lora_rank", "custom_reward_function.path")
    draft = drafted(" ".join([VERL, *(f"{name}=null" for name in nothing)]))
    assert draft.values == drafted(VERL).values and "lora.rank" not in draft.values
    assert "=null" not in told(drafted(VERL))


OWN = "reward.custom_reward_function.path=mine.py reward.custom_reward_function.name=score"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("keys", "rewards"),
    [
        (OWN, [{"call": "mine.py:score"}]),
        ("+reward.reward_model.enable=True reward.reward_model.model_path=org/rm",
         [{"name": "model", "model": {"path": "org/rm"}}]),
        (f"{OWN} +{OVERLONG}.enable=True +{OVERLONG}.len=100 +{OVERLONG}.penalty_factor=0.5 "
         "+reward.reward_kwargs.max_resp_len=900",
         [{"call": "mine.py:score"}, {"name": "soft_overlong", "max_tokens": 900, "buffer": 100, "weight": 0.5}]),
    ],
)  # fmt: skip
def test_rewards_by_the_keys_that_verl_has_since_2026(keys, rewards):
    """verl 5255 moved them below `reward`; by their new names they were lost, and `math` took their place."""
    draft = drafted(f"{VERL} {keys}")
    assert draft.values["rewards"] == rewards
    assert unspoken(draft, text_of(f"{VERL} {keys}")) == () and "is not known" not in told(draft)


@pytest.mark.parametrize(
    ("mode", "normalise"),
    [("token-mean", "token"), ("seq-mean-token-mean", "sequence"), ("seq-mean-token-sum", "sum"),
     ("seq-mean-token-sum-norm", "constant")],
)  # fmt: skip
def test_a_sum_over_tokens_is_divided_by_a_length_only_where_verl_does_it(mode, normalise):
    """As verl 3741 and rllm 354 tell them apart."""
    values = values_of(f"{VERL} actor_rollout_ref.actor.loss_agg_mode={mode}")
    assert values["algorithm.normalise"] == normalise


@pytest.mark.parametrize("key", ["distillation.enabled=True", "actor_rollout_ref.model.lora.rank=16"])
def test_a_teacher_and_megatrons_adapters_are_refused(key):
    with pytest.raises(RecipeError, match=rf"{key}.* is not a method of this version; nearest: "):
        imported(f"{VERL} {key}")
    imported(f"{VERL} {key.partition('=')[0]}={'False' if 'enabled' in key else 0}")


def test_the_older_place_of_dapo_is_known():
    line = VERL.replace("verl.trainer.main_ppo", "recipe.dapo.src.main_dapo")
    assert drafted(f"{line} algorithm.filter_groups.enable=True").values["rollout.resample_tries"] == 20


def test_settings_of_ones_own_are_read_or_told(tmp_path, monkeypatch):
    """As in verl's examples of several turns, whose YAML files switch them on; they were taken for its defaults."""
    monkeypatch.chdir(tmp_path)
    line = VERL.replace("main_ppo ", "main_ppo --config-path=config --config-name='own_grpo' ")
    assert "config=config/own_grpo.yaml: the file is not on this machine; its flags are lost" in told(drafted(line))
    (tmp_path / "config").mkdir()
    settings = "hydra: {searchpath: [a]}\ndefaults: [ppo_trainer]\nactor_rollout_ref: {actor: {ppo_epochs: 3}}\n"
    (tmp_path / "config" / "own_grpo.yaml").write_text(settings)
    draft = drafted(line)
    assert draft.values["optim.rollout_epochs"] == 3 and "hydra" not in told(draft)
    assert "is lost" not in told(drafted(line.replace("own_grpo", "ppo_megatron_trainer.yaml")))


@pytest.mark.parametrize(
    ("command", "below", "call"),
    [
        (f"{VERL} custom_reward_function.path=mine.py", "+custom_reward_function.reward_kwargs",
         "mine.py:compute_score"),
        (f"{VERL} {OWN}", "+reward.custom_reward_function.reward_kwargs", "mine.py:score"),
        (EASY, "worker.reward.reward_function_kwargs", "./math.py:compute_score"),
    ],
)  # fmt: skip
def test_arguments_of_a_reward_are_carried_over_and_secrets_are_not(home, command, below, call):
    given = ("weight=0.5", "words=[a,b]", "of.parts=two", "api_key=a1b2c3d4e5")
    line = " ".join([command, *(f"{below}.{each}" for each in given)])
    draft = drafted(line)
    arguments = {"weight": 0.5, "words": ["a", "b"], "of": {"parts": "two"}}
    assert draft.values["rewards"] == [{"call": call, "arguments": arguments}]
    assert unspoken(draft, text_of(line)) == () and "a1b2c3d4e5" not in told(draft)
