"""The loss of a microbatch of examples, by the verb's objective, and the update that a step of them makes."""

from collections.abc import Iterator
from functools import partial

from tiercel.packing.batch import MicrobatchUnit
from tiercel.packing.examples import ExamplePass
from tiercel.training.finite import faulty_examples
from tiercel.training.offline.objectives import Objective, UpdateInputs
from tiercel.training.optimizer_step import MicrobatchLoss, Update, backward_and_step, pass_counts
from tiercel.training.trainer import Trainer


def example_update(trainer: Trainer, objective: Objective, plan: UpdateInputs) -> Update:
    """Make one update from a step's examples. Raises NonFiniteError."""
    units = trainer.example_units(plan.made)
    passes = [example_microbatch_losses(trainer, objective, unit, plan) for unit in units]
    with trainer.vision.update([images for unit in units for images in unit.images_of_passes]):
        return backward_and_step(trainer, passes, plan.tokens)


def example_microbatch_losses(
    trainer: Trainer, objective: Objective, unit: MicrobatchUnit[ExamplePass], plan: UpdateInputs
) -> Iterator[MicrobatchLoss]:
    """Yield what each microbatch of a unit adds to the loss. Compute its gradient before asking for the next."""
    inputs = trainer.inputs(unit, with_gradient=True)
    for number, each in enumerate(unit.batches):
        with trainer.training_mode():
            packed, features_KH, prefix = next(inputs)
            scores = trainer.learner(packed, features_KH, trainer.temperature, prefix, asked=objective.asked(each))
        share = objective.share(each, scores, plan)
        yield MicrobatchLoss(
            loss=share.loss,
            loss_sums=share.sums,
            pass_sums={
                **({} if scores.values_N is not None else {"entropy/mean": scores.entropy_N.sum()}),
                **pass_counts(trainer, share.loss, unit, number),
            },
            tokens=len(packed.targets_N),
            row_ids=each.prompt_ids,
            faulty_rows=partial(faulty_examples, each.prompt_ids, share.losses_B),
        )
    next(inputs, None)  # the gradients of open prefixes go back through them
