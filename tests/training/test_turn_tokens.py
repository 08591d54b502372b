"""How many tokens a step computes if trajectories have three turns."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import is_grad_enabled
from torch.nn.modules.module import register_module_forward_hook

from tests.calling_models import call, save_calling_checkpoint
from tests.training.test_loops import run_grpo
from tests.training.turn_recipes import records, turn_recipe
from tiercel.runs.directory import read_metrics


@contextmanager
def run_tokens() -> Iterator[dict[bool, int]]:
    """Tokens through the first decoder layer, by whether they were run to learn from."""
    counts = {False: 0, True: 0}

    def count(module, inputs, output):
        if type(module).__name__ == "Qwen2MLP" and module is first.setdefault("module", module):
            counts[is_grad_enabled()] += output.numel() // output.shape[-1]

    first: dict[str, object] = {}
    handle = register_module_forward_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def test_prompt_and_turns_are_run_once_to_sample_and_once_to_learn(tiny_checkpoints, tmp_path):
    """All pictures have one size, so that no row is padded to the length of another."""
    checkpoint = save_calling_checkpoint(tiny_checkpoints["qwen2_5_vl"], tmp_path / "model", [call("look", part=3)])
    recipe = turn_recipe(
        checkpoint,
        tmp_path / "data",
        "run",
        rollout={"max_new_tokens": 200, "max_trajectory_tokens": 480},
        optim={"prompts_per_step": 1},
        train={"steps": 1},
        learner={"skip_zero_advantage": False},
    )
    with run_tokens() as counts:
        run = run_grpo(recipe)
    (row,), (line,) = read_metrics(run), records(run, 1)
    lengths = [len(each["token_ids"]) for each in line["completions"]]
    assert [len(each["turns"]) for each in line["completions"]] == [3, 3, 3]
    assert counts[False] == row["tokens/prompt"] + sum(lengths) - len(lengths)  # nothing follows the last token
    assert counts[True] == row["tokens/prompt"] + sum(lengths)
