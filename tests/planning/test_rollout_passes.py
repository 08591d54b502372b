"""What a GPU holds besides the weights: the largest pass of the local engine, what it keeps, and the update."""

from dataclasses import replace

import pytest

from benchmarks.published import save_config
from tests.planning.test_memory import recipe_of
from tiercel.planning.memory import CACHE, Layout, Measured, rank_memory, step_rollout
from tiercel.planning.options import Subject, study
from tiercel.planning.probe import NOTHING, packed_case, update_bytes
from tiercel.rollout.local.engine import KEPT_BYTES

PASSES = "prefill, logits or the vision pass"


def subject_of(directory, size: str) -> Subject:
    return study(recipe_of(save_config("qwen2_5_vl", size, directory), {}), None)


def parts_of(subject: Subject, completion_tokens: int = 128, *, on_gpu: bool = True) -> dict:
    """Return the parts of a step of 8 prompts, for a prefill that takes 100,000 bytes for a token, and an update that
    takes 10 GB where it is not one kernel."""
    prefill = replace(NOTHING, per_token=100_000, per_layer=10**9)
    measured = Measured(learn=NOTHING, step=replace(NOTHING, constant=10**10), prefill=prefill)
    rollout = step_rollout(subject.recipe, ranks=1, prompt_tokens=1000, memory_bytes=80 * 10**9)
    rollout = replace(rollout, prompts=8, completion_tokens=completion_tokens)
    layout = Layout(strategy="single", ranks=1, tokens=1000, on_gpu=on_gpu)
    return rank_memory(subject.recipe, subject.sizes, measured, rollout, layout).parts


def test_a_prompt_token_holds_four_rows_of_the_mlp_and_of_the_hidden_states(tmp_path):
    """In the adapted `up_proj`: its input `gate`, its own product and the two of its adapter, 4 x 11,008 numbers of two
    bytes; and the embeddings, the residual, the norm's output and the input of the adapter, 4 x 2,048."""
    subject = subject_of(tmp_path, "3b")
    small, large = (
        update_bytes(subject, 2, packed_case(subject.composition, tokens, 3), "split", compiled=False).prefill
        for tokens in (4000, 8000)
    )
    assert (large - small) / 4000 == pytest.approx(2 * (4 * 11_008 + 4 * 2048), rel=0.02)


def test_the_largest_pass_counts(tmp_path):
    """The prefill of 8 prompts of 1,000 tokens, without the casts of weights, which are not kept; or the logits of the
    rows, in bfloat16 and three times in float32. 512 rows of a prompt fill a batch."""
    subject = subject_of(tmp_path, "3b")
    assert parts_of(subject)["rollout"][PASSES] == 800_000_000
    many = subject.recipe.model_copy(update={"rollout": subject.recipe.rollout.model_copy(update={"group_size": 512})})
    assert parts_of(replace(subject, recipe=many))["rollout"][PASSES] == 512 * 151_936 * 14


def test_memory_for_decoding_is_kept_only_if_it_is_small(tmp_path):
    """A token of the 7B has keys and values of 28 layers, 4 heads of 128, two bytes each: 57,344 bytes."""
    subject = subject_of(tmp_path, "7b")
    for completion_tokens, is_kept in ((128, True), (512, False)):
        parts = parts_of(subject, completion_tokens)
        held = parts["rollout"][CACHE] + parts["rollout"]["trained weights, narrow for decoding"]
        assert parts["rollout"][CACHE] == 57_344 * 8 * (1000 + 8 * completion_tokens)
        assert (held <= KEPT_BYTES) == is_kept
        assert parts["learn"]["kept for decoding"] == (held if is_kept else 0)


@pytest.mark.parametrize(
    ("optimizer", "on_gpu", "is_one_kernel"), [("adamw", True, True), ("muon", True, False), ("adamw", False, False)]
)
def test_an_update_in_one_kernel_takes_the_gradients_alone(tmp_path, optimizer, on_gpu, is_one_kernel):
    subject = subject_of(tmp_path, "3b")
    recipe = subject.recipe.with_values({"optim.name": optimizer})
    found = parts_of(replace(subject, recipe=recipe), on_gpu=on_gpu)["update"]["gradients and the update"]
    assert found == (4 * subject.sizes.trained if is_one_kernel else 10**10)


def test_a_dequantised_weight_is_there_in_passes_alone(tmp_path):
    """That of the 3B's MLP, 2,048 x 11,008 numbers of two bytes."""
    subject = subject_of(tmp_path, "3b")
    sizes = replace(subject.sizes, quantize="nf4", largest_quantized=2048 * 11_008)
    held = {
        phase: parts.get("a dequantised weight") for phase, parts in parts_of(replace(subject, sizes=sizes)).items()
    }
    assert held == {"rollout": 45_088_768, "learn": 45_088_768, "update": None}
