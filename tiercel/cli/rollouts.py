"""`tiercel rollouts`: print what the policy answered in a step, with rewards and advantages."""

from argparse import Namespace

from tiercel.message_text import counted
from tiercel.web.report.rollout_table import StepRollouts, require_rollouts, rollouts_of


def run(recipe: None, arguments: Namespace) -> None:
    """Print the first prompts of a step. Raises RunError if the run has no rollouts of it."""
    require_rollouts(arguments.run, arguments.step)
    found = rollouts_of(arguments.run, arguments.step)
    print(StepRollouts(found[: arguments.prompts]))
    if len(found) > arguments.prompts:
        print(f"\n{counted(len(found) - arguments.prompts, 'more prompt')}: --prompts {len(found)}")
