"""The loss of a microbatch of examples, by the verb's objective, and the update that a step of them makes."""

from collections.abc import Iterator
from functools import partial

from tiercel.packing.batch import MicrobatchUnit
from tiercel.packing.examples import ExampleBatch
from tiercel.training.nonfinite_guard import faulty_examples
from tiercel.training.offline.objectives import Objective, UpdateInputs
from tiercel.training.optimizer_step import MicrobatchLoss, Update, backward_and_step, pass_counts
from tiercel.training.trainer import Trainer


def example_update(trainer: Trainer, objective: Objective, inputs: UpdateInputs) -> Update:
    """Make one update from a step's examples. Raises NonFiniteError."""
    units = trainer.example_units(inputs.groups)
    passes = [example_microbatch_losses(trainer, objective, unit, inputs) for unit in units]
    with trainer.training_mode(), trainer.vision.update([images for unit in units for images in unit.images_of_passes]):
        return backward_and_step(trainer, passes, inputs.tokens)


def example_microbatch_losses(
    trainer: Trainer, objective: Objective, unit: MicrobatchUnit[ExampleBatch], inputs: UpdateInputs
) -> Iterator[MicrobatchLoss]:
    """Yield what each microbatch of a unit adds to the loss; the caller has turned on training mode. Compute its
    gradient before asking for the next."""
    forward_inputs = trainer.inputs(unit, with_gradient=True)
    for number, each in enumerate(unit.batches):
        packed, features_KH, prefix = next(forward_inputs)
        scores = trainer.learner(packed, features_KH, trainer.temperature, prefix, options=objective.pass_options(each))
        terms = objective.loss_terms(each, scores, inputs)
        yield MicrobatchLoss(
            loss=terms.loss,
            loss_sums=terms.sums,
            pass_sums={
                **({} if scores.values_N is not None else {"entropy/mean": scores.entropy_N.sum()}),
                **pass_counts(trainer, terms.loss, unit, number),
            },
            tokens=len(packed.targets_N),
            row_ids=each.prompt_ids,
            faulty_rows=partial(faulty_examples, each.prompt_ids, terms.losses_B),
        )
    next(forward_inputs, None)  # the gradients of open prefixes go back through them
