"""Pairs, labels, their values, and teachers."""

import pytest

from tests.convert.helpers import DPO, FACTORY, GRPO, SFT, TRL, drafted, told, values_of
from tests.convert.shapes import LLAMA_FACTORY, LLAMA_FACTORY_FULL, SWIFT_GKD, SWIFT_KTO, SWIFT_MPO, SWIFT_RM
from tests.convert.shapes import TRL_DPO as TRL_PAIRS

PEFT = f"{TRL.replace('grpo', 'dpo')} --use_peft"
GKD = f"{DPO.replace('dpo', 'gkd')} --teacher_model org/t"


def check(line: str, expected: dict[str, object]) -> None:
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "loss", "sft"),
    [
        (f"{DPO} --loss_type ipo", "ipo", None),
        (f"{DPO} --loss_type hinge --rpo_alpha 0.1", "hinge", 0.1),
        (f"{DPO} --loss_type sigmoid sft --loss_weights 2 1", "sigmoid", 0.5),  # relative to the other term
        (f"{DPO} --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0", "mpo", None),
        (f"{DPO} --loss_type sigmoid bco_pair --loss_weights 0.8 0.2", "mpo", 0.0),
        (f"{DPO} --loss_type sigmoid bco_pair sft --loss_weights 1.6 0.4 1.0", "mpo", 0.5),
        (f"{DPO} --rpo_alpha 0.0", "sigmoid", 0.0),
        *(
            (f"{PEFT} --loss_type {name}", name, None)
            for name in ("exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
        ),
        (f"{PEFT} --loss_type apo_zero sft --loss_weights 1 0.5", "apo_zero", 0.5),
        (DPO.replace("dpo", "cpo") + " --loss_type ipo", "cpo_ipo", None),
        (DPO.replace("dpo", "cpo") + " --loss_type hinge --cpo_alpha 0", "cpo_hinge", 0.0),
        (DPO.replace("dpo", "simpo") + " --cpo_alpha 0", "simpo", 0.0),
        (DPO.replace("dpo", "cpo") + " --loss_type simpo", "simpo", 1.0),
        (DPO.replace("dpo", "cpo") + " --cpo_alpha 0.5", "cpo", 0.5),
        (f"{PEFT} --loss_type robust --label_smoothing 0.1", "robust", None),
        (FACTORY, "sigmoid", None),
        (f"{FACTORY} --pref_loss simpo", "simpo", None),
        (f"{FACTORY} --pref_loss orpo --pref_ftx 0.5", "orpo", 1.5),  # its own SFT term and the other one
        (f"{FACTORY} --pref_ftx 1.0", "sigmoid", 1.0),
        (f"{FACTORY} --pref_bco_weight 0.25 --pref_ftx 1.0", "mpo", 1.0),  # (sigmoid + 0.25 bco) / 1.25
    ],
)
def test_the_loss_of_a_pair_and_its_sft_term(line, loss, sft):
    check(line, {"dpo.loss": loss, "dpo.sft_coef": sft})


@pytest.mark.parametrize(
    ("line", "spoken"),
    [
        (f"{DPO} --loss_type sigmoid bco_pair", "tiercel's mpo is 0.8 sigmoid and 0.2 bco_pair"),
        (f"{PEFT} --loss_type sigmoid bco_pair --loss_weights 0.8 0.2", "TRL's bco_pair has no shift"),
        (f"{PEFT} --loss_type bco_pair", "TRL has no shift"),
        (f"{PEFT} --loss_type ipo --f_divergence_type js_divergence", "has no place in dpo.loss: ipo"),
        (TRL.replace("grpo", "orpo"), "TRL's SFT term learns prompts too"),
        (f"{FACTORY} --pref_loss orpo", "LLaMA-Factory's SFT term weighs answers alike"),
        (f"{DPO} --loss_type ipo --ld_alpha 0.5", "shorter answer; nothing depends on it"),
        (
            f"{DPO} --ref_model org/other --tuner_type full",
            "--ref_model org/other: the KL reference; has no equivalent",
        ),
        (f"{DPO} --adapters sft", "reference is the model without this adapter"),
        (f"{DPO} --adapters sft --precompute_ref_log_probs true", "reference is the model without this"),
        (f"{DPO} --adapters sft --ref_adapters other", "--ref_adapters other: adapter of the KL reference; has no equ"),
        (f"{GRPO} --adapters sft", "reference is the model without this adapter"),
        (f"{PEFT} --sync_ref_model true", "moves the reference; has no equivalent"),
        (f"{DPO} --simpo_gamma 1", "another method reads it"),
        (DPO.replace("dpo", "rm"), "reads it if rows have it"),
        (f"{FACTORY.replace('dpo', 'kto')} --pref_ftx 0.5", "weight of an SFT term; has no equivalent"),
        (f"{GKD} --sft_alpha 0.1", "nearest is teacher.rows_share"),
        (f"{GKD} --external_plugins own.py", "teacher.prompt asks a teacher otherwise"),
    ],
)
def test_what_differs_is_told(line, spoken):
    assert spoken in told(drafted(line))


def test_no_adapter_is_named_where_there_is_no_reference():
    assert "without this adapter" not in told(drafted(f"{GRPO} --adapters sft --beta 0"))
    assert "without this adapter" not in told(drafted(DPO.replace("dpo", "orpo") + " --adapters sft"))
    assert "without this adapter" not in told(drafted(f"{DPO} --adapters sft --ref_adapters other"))


def test_options_that_the_loss_does_not_read_stay_out():
    check(f"{DPO} --loss_type hinge --label_smoothing 0.1", {"dpo.label_smoothing": None})
    check(f"{DPO} --label_smoothing 0.1", {"dpo.label_smoothing": 0.1})
    check(f"{PEFT} --label_smoothing 0.1", {"dpo.label_smoothing": None})  # TRL's sigmoid does not read it
    check(DPO.replace("dpo", "orpo") + " --precompute_ref_log_probs true", {"dpo.precompute_reference": None})
    draft = drafted(f"{PEFT} --label_smoothing 0.1")
    assert "--label_smoothing 0.1: share of wrong labels; nothing depends on it" in told(draft)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--ld_alpha 0.5 --loss_type aot --label_smoothing 0.1",
         {"dpo.loss": "aot", "dpo.ld_alpha": 0.5, "dpo.label_smoothing": 0.1}),
        ("--f_divergence_type reverse_kl", {"dpo.divergence": None}),
        ("--f_divergence_type js_divergence", {"dpo.divergence": "js", "dpo.divergence_alpha": None}),
        ("--f_divergence_type alpha_divergence", {"dpo.divergence": "alpha", "dpo.divergence_alpha": None}),
        ("--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.2",
         {"dpo.divergence": "alpha", "dpo.divergence_alpha": 0.8}),
        ("--f_divergence_type alpha_divergence --f_alpha_divergence_coef 1", {"dpo.divergence": None}),
        ("--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0", {"dpo.divergence": "forward_kl"}),
        ("--loss_type discopop --discopop_tau 0.1", {"dpo.tau": 0.1}),
        ("--discopop_tau 0.1", {"dpo.tau": None}),
        ("--use_weighting true", {"dpo.wpo": True}),
        ("--use_weighting false", {"dpo.wpo": False}),
        ("--loss_type exo_pair", {"dpo.label_smoothing": 0.001}),
        ("--loss_type exo_pair --label_smoothing 0.1", {"dpo.label_smoothing": 0.1}),
        ("--loss_type apo_down --label_smoothing 0.1", {"dpo.label_smoothing": None}),
    ],
)  # fmt: skip
def test_options_of_trls_losses(flags, expected):
    check(f"{PEFT} {flags}", expected)


def test_pairs_by_three_losses_in_full_fine_tuning():
    draft = drafted(SWIFT_MPO)
    values = draft.values
    expected = {
        "dpo.loss": "mpo",
        "dpo.label_smoothing": 0.1,
        "dpo.sft_coef": 1.0,
        "model.reference": "device",
        "train.strategy": "fsdp2",  # ZeRO keeps no copy of the start
        "optim.prompts_per_step": 16,
        "learner.max_tokens_per_microbatch": 18000,  # both answers of a pair
    }
    assert {key: values.get(key) for key in expected} == expected
    assert "keeps no copy of the start as the reference" in told(draft)


def test_the_reference_is_no_copy_where_none_is_compared_or_all_is_computed_ahead():
    full = f"{DPO} --tuner_type full --deepspeed zero3"
    check(f"{full} --precompute_ref_log_probs true", {"train.strategy": "deepspeed", "model.reference": None})
    check(full.replace("dpo", "orpo"), {"train.strategy": "deepspeed", "model.reference": None})
    check(full.replace("dpo", "kto"), {"train.strategy": "fsdp2", "model.reference": "device"})


def test_means_over_tokens():
    check(TRL_PAIRS, {"dpo.loss": "sigmoid", "dpo.length_normalised": True, "dpo.beta": 0.3, "lora.targets": "all"})


def test_labels():
    draft = drafted(SWIFT_KTO)
    expected = {
        "kto.beta": 0.2,
        "kto.desirable_weight": 1.5,
        "kto.undesirable_weight": 0.5,
        "lora.init": "sft/checkpoint-100",
    }
    assert {key: draft.values.get(key) for key in expected} == expected
    assert "lora.init is the KL reference as well" in told(draft)
    check(LLAMA_FACTORY_FULL, {"kto.undesirable_weight": 0.5, "freeze": ["projector"], "data.shuffle": False,
                               "learner.gradient_checkpointing": False, "optim.prompts_per_step": 64})  # fmt: skip


def test_labels_without_a_divergence():
    check(DPO.replace("dpo", "kto") + " --loss_type apo_zero_unpaired", {"kto.loss": "apo_zero_unpaired"})


def test_values():
    check(SWIFT_RM, {"ranking.centre_coef": 0.01, "ranking.margin": 0.0, "data.max_prompt_tokens": 2048})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--beta 0", {"teacher.divergence": "forward_kl", "teacher.mix": None}),
        ("--beta 1.0", {"teacher.divergence": "reverse_kl", "teacher.mix": None}),
        ("--beta 0.1", {"teacher.divergence": "jsd", "teacher.mix": 0.1}),
        ("--lmbda 1", {"teacher.rows_share": 0.0}),
        ("--lmbda 0", {"teacher.rows_share": 1.0}),
        ("--use_hf true", {"teacher.hub": None}),
        (
            "--teacher_model_server http://h:8000 --gkd_logits_topk 20",
            {"teacher.url": "http://h:8000", "teacher.top_k": 20},
        ),
        ("--max_new_tokens 64", {"rollout.max_new_tokens": 64}),
        ("--teacher_adapters a --teacher_model_revision v1", {"teacher.adapter": "a", "teacher.revision": "v1"}),
    ],
)
def test_a_teacher(flags, expected):
    check(f"{GKD} {flags}", expected)


def test_a_teacher_with_an_engine():
    draft = drafted(SWIFT_GKD)
    expected = {
        "teacher.path": "OpenGVLab/InternVL3-8B",
        "teacher.mix": 0.1,
        "teacher.rows_share": 0.25,
        "teacher.top_k": 64,
        "rollout.engine": "vllm",
        "rollout.group_size": 1,
        "rollout.max_new_tokens": 1024,
        "optim.prompts_per_step": 16,  # 4 x 4, and no further pass
        "rewards": None,
    }
    assert {key: draft.values.get(key) for key in expected} == expected
    for flag in ("--sft_alpha", "--teacher_deepspeed", "--offload_teacher_model"):
        assert flag in told(draft)


def test_pairs_of_llama_factory():
    check(LLAMA_FACTORY, {"dpo.loss": "mpo", "dpo.beta": 0.2, "dpo.sft_coef": 0.5, "lora.alpha": 16.0,
                          "optim.prompts_per_step": 16, "data.eval": {"fraction": 0.1}})  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "share", "mixes"),
    [("", 0.0, False), (" --lmbda 1", 0.0, False), (" --lmbda 0.75", 0.25, True)],
)
def test_the_remark_says_who_samples(flags, share, mixes):
    draft = drafted(f"{TRL.replace('grpo', 'distillation')} --teacher_model_name_or_path org/t{flags}")
    assert draft.values["teacher.rows_share"] == share
    assert ("draws for each prompt" in draft.origins["teacher.rows_share"].remark) == mixes


def test_held_out_rows_of_a_distillation_need_rewards():
    draft = drafted(f"{GKD} --val_dataset held.jsonl --eval_steps 10")
    assert "data.eval" not in draft.values and "train.eval_every" not in draft.values
    assert "in tiercel rewards score what is held out" in told(draft)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{SFT} --enable_dft_loss true --neftune_noise_alpha 5", {"sft.loss": "dft", "sft.neftune_alpha": 5}),
        (f"{SFT} --enable_dft_loss false --neftune_noise_alpha 0", {"sft.loss": None, "sft.neftune_alpha": None}),
        (f"{SFT} --label_smoothing_factor 0.1", {"sft.label_smoothing": 0.1, "sft.loss": None}),
        ("trl sft --model_name_or_path m --dataset_name r.jsonl --loss_type dft --label_smoothing_factor 0.1",
         {"sft.loss": "dft", "sft.label_smoothing": None}),
        ("trl sft --model_name_or_path m --dataset_name r.jsonl --loss_type chunked_nll", {"sft.loss": None}),
        (FACTORY.replace("dpo", "sft") + " --use_dft_loss true --neftune_noise_alpha 2.5",
         {"sft.loss": "dft", "sft.neftune_alpha": 2.5}),
        (f"{DPO} --neftune_noise_alpha 5 --label_smoothing_factor 0.1", {"dpo.loss": "sigmoid", "sft.loss": None}),
        (f"{DPO} --loss_type aot_unpaired --label_smoothing 0.1",
         {"dpo.loss": "aot_unpaired", "dpo.label_smoothing": 0.1}),
        (f"{DPO} --loss_type aot_pair", {"dpo.loss": "aot_unpaired"}),
    ],
)  # fmt: skip
def test_losses_of_tokens_and_unpaired_aot(line, expected):
    check(line, expected)


def test_noise_on_embeddings_is_told_where_no_key_takes_it():
    draft = drafted(f"{DPO} --neftune_noise_alpha 5")
    assert "sft.neftune_alpha is for tiercel sft only" in told(draft)
