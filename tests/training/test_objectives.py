"""What the commands that learn from rows compute in a step, on a tiny model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.test_loops import sft_recipe, write_rows
from tiercel.algorithms.preference_sections import Dpo, Kto
from tiercel.config.schema import DpoRecipe, KtoRecipe, SftRecipe
from tiercel.data.encoding import ExampleEncoder, with_answer_of
from tiercel.data.order import file_order
from tiercel.data.reading import read_training_rows
from tiercel.errors import DataError
from tiercel.packing import sharing
from tiercel.packing.batch import MicrobatchUnit
from tiercel.packing.examples import ExampleBatch
from tiercel.training.offline.example_loss import example_update
from tiercel.training.offline.objectives import answer_sums, objective_of, reference_sums
from tiercel.training.policy_passes import PolicyPasses
from tiercel.training.rank_balancing import grouped_by_rank
from tiercel.training.trainer import build_trainer
from tiercel.types import ImageSource, Message

LN2 = math.log(2)
ROOMY = {"max_tokens_per_microbatch": 450}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows with pictures, each with a rejected answer and a label."""
    recipe = sft_recipe(Path("unused"), write_rows(tmp_path_factory.mktemp("rows")), Path("unused"))
    made = []
    for number, row in enumerate(read_training_rows(recipe.data, "sft").rows[:6]):
        *asked, answer = row.messages
        wrong = replace(row, messages=(*asked, replace(answer, content="no, not that")))
        made.append(replace(row, rejected=wrong, label=number % 2 == 0))
    return made


def recipe_of(kind, checkpoint, tmp_path, **changes):
    own = {key: changes.pop(key) for key in ("sft", "dpo", "kto") if key in changes}
    changes = {"learner": {"max_tokens_per_microbatch": 400}, **changes}  # two answers with the longest prompt
    tree = sft_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", **changes).model_dump(exclude={"sft"})
    return kind.model_validate({**tree, **own})


def begun(recipe, rows):
    """A trainer, an objective, and the bundles of all rows in a step."""
    trainer = build_trainer(recipe)
    encode = ExampleEncoder(recipe=recipe, family=trainer.family, rows=rows, order=file_order(len(rows)))
    examples = [encode(row, index) for index, row in enumerate(rows)]
    return trainer, objective_of(recipe), grouped_by_rank(trainer, examples)


def example_passes(trainer, made):
    """The microbatches, each of which computes all of its rows' tokens."""
    return [unit.batches[0] for unit in replace(trainer, passes_are_private=False).example_units(made)]


def logprobs_of(trainer, packed, *, of_reference=False):
    (scores,) = trainer.scores(
        MicrobatchUnit(batches=(ExampleBatch(packed=packed, prompt_ids=(), examples=()),)), of_reference=of_reference
    )
    return scores.logprobs_N


def learn(trainer, objective, made, known=None):
    plan = objective.prepare(trainer, made, known)
    update = example_update(trainer, objective, plan)
    trainer.vision.end_step()
    return update, objective.metrics(update.loss_sums, plan.examples)


def gradient(trainer):
    return torch.cat([p.grad.flatten().clone() for p in trainer.policy.trained_parameters().values()])


@pytest.mark.parametrize("loss", ("sigmoid", "mpo"))
def test_pairs_start_even_and_are_told_apart(tiny_checkpoints, tmp_path, rows, loss):
    recipe = recipe_of(DpoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, dpo=Dpo(loss=loss, beta=0.5))
    trainer, objective, made = begun(recipe, rows)
    assert all(len(bundle.items) == 2 for bundle in made)
    update, metrics = learn(trainer, objective, made)
    assert metrics["pairs/accuracy"] == 0.5 and metrics["pairs/margin"] == 0.0
    if loss == "sigmoid":
        assert update.loss == pytest.approx(LN2, abs=1e-6)
    for _ in range(8):
        _, metrics = learn(trainer, objective, made)
    assert metrics["pairs/accuracy"] == 1.0 and metrics["pairs/margin"] > 0.1
    assert metrics["pairs/reward_chosen"] - metrics["pairs/reward_rejected"] == pytest.approx(metrics["pairs/margin"])
    assert objective.state["answers"] == 9 * 12
    assert objective.state["rewards"] != 0


def moved_a_little(trainer):
    """Give the adapter weights of its own, so that policy and reference differ."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.policy.trained_parameters().items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize("loss", ("aot", "aot_unpaired"))
def test_aot_matches_what_it_compares_over_the_whole_step(tiny_checkpoints, tmp_path, rows, loss):
    own = {
        "dpo": Dpo(loss=loss, beta=0.5),
        "data": {"max_prompt_tokens": 44},
        "learner": {"max_tokens_per_microbatch": 90},
    }
    trainer, objective, made = begun(recipe_of(DpoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, **own), rows)
    moved_a_little(trainer)
    plan = objective.prepare(trainer, made)
    sums = [(value, plan.reference[index]) for index, value in answer_sums(trainer, made).items()]
    policy_B2, reference_B2 = (torch.stack(each).double() for each in zip(*sums, strict=True))
    if loss == "aot":
        higher, lower = (each.diff(dim=1)[:, 0].neg().sort().values for each in (policy_B2, reference_B2))
    else:
        higher, lower = (policy_B2 - reference_B2).sort(dim=0).values.unbind(1)
    assert len(higher) == 6 and len(example_passes(trainer, made)) > 1  # of several microbatches
    expected = -torch.nn.functional.logsigmoid(0.5 * (higher - lower)).mean()
    assert example_update(trainer, objective, plan).loss == pytest.approx(float(expected), abs=1e-5)
    trainer.vision.end_step()


@pytest.mark.parametrize("alpha", (0.0, 0.3))
def test_ld_alpha_weighs_tokens_beyond_the_shorter_answer(tiny_checkpoints, tmp_path, rows, alpha):
    dpo = Dpo(loss="sigmoid", beta=0.5, ld_alpha=alpha)
    trainer, objective, made = begun(recipe_of(DpoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, dpo=dpo), rows)
    moved_a_little(trainer)
    plan = objective.prepare(trainer, made)
    expected, lengths = [], set()
    for each in example_passes(trainer, made):
        owners = each.packed.continuation_of_N
        own = logprobs_of(trainer, each.packed).double()
        with trainer.as_reference():
            ratios = own - logprobs_of(trainer, each.packed, of_reference=True).double()
        for pair in range(len(each.examples)):
            sides = [ratios[owners == 2 * pair + side] for side in (0, 1)]
            shared = min(map(len, sides))
            lengths |= {len(side) - shared for side in sides}
            chosen, rejected = (side[:shared].sum() + alpha * side[shared:].sum() for side in sides)
            expected.append(-torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)))
    assert max(lengths) > 0
    update = example_update(trainer, objective, plan)
    assert update.loss == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)
    trainer.vision.end_step()


def test_a_known_reference_gives_the_same_update(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(DpoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, dpo=Dpo(loss="ipo"))
    trainer, objective, made = begun(recipe, rows)
    learn(trainer, objective, made)
    plan = objective.prepare(trainer, made)
    known = reference_sums(trainer, made)
    assert {index: values.tolist() for index, values in plan.reference.items()} == {
        index: values.tolist() for index, values in known.items()
    }
    assert objective.prepare(trainer, made, known).reference is known


@pytest.mark.parametrize("kind", (SftRecipe, DpoRecipe))
def test_rows_that_share_their_pictures_give_the_same_gradient_together(
    tiny_checkpoints, tmp_path, rows, kind, monkeypatch
):
    pictured = max(rows, key=lambda row: len(row.images))
    several = []
    for number in range(4):
        sides = [
            replace(side, messages=(*side.messages[:-2], replace(side.messages[-2], content=text), side.messages[-1]))
            for side in pictured.sides
            for text in ["<image>" * len(side.images) + str(number)]
        ]
        several.append(replace(sides[0], id=f"row-{number}", rejected=sides[1]))
    found = []
    monkeypatch.setattr(sharing, "SHORTEST", 8)
    for joins, is_cut in ((False, False), (True, False), (True, True)):
        own = {"dpo": Dpo(loss="sigmoid", sft_coef=0.5)} if kind is DpoRecipe else {}
        recipe = recipe_of(kind, tiny_checkpoints["qwen2_5_vl"], tmp_path, data={"group_by_prefix": True}, **own)
        monkeypatch.setattr(
            PolicyPasses, "sharing_family", property(lambda passes, joins=joins: passes.family if joins else None)
        )
        trainer, objective, made = begun(recipe, several)
        if is_cut:  # one row to a microbatch
            trainer = replace(trainer, max_tokens=max(trainer.token_counter().with_items(row.items) for row in made))
            assert any(unit.prefixes for unit in trainer.example_units(objective.prepare(trainer, made).groups))
        gradients = []
        trainer.strategy.update = lambda norm, most, of=trainer, into=gradients: bool(into.append(gradient(of)) or 1)
        update, _ = learn(trainer, objective, made)
        found.append((update, gradients[0]))
    (apart, expected), *shared = found
    for together, computed in shared:
        assert together.loss == pytest.approx(apart.loss, abs=1e-6) and together.tokens == apart.tokens
        assert float((computed - expected).norm() / expected.norm()) < 1e-5
    computed = [update.pass_sums["packed/tokens"] for update, _ in found]
    assert computed[2] == computed[1] < computed[0]  # no token twice, in however many microbatches


def test_a_borrowed_answer_may_be_longer_than_a_row(tiny_checkpoints, tmp_path, rows):
    """The next row's answer is as long as a row may be, and the row that borrows it is still valid."""
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto(), learner=ROOMY)
    trainer = build_trainer(recipe)
    bare = replace(rows[0], images=(), messages=(Message(role="user", content="?"), rows[0].messages[-1]))
    long = replace(bare, messages=(bare.messages[0], replace(bare.messages[-1], content="7" * 180)))
    encode = ExampleEncoder(recipe=recipe, family=trainer.family, rows=[rows[2], long], order=file_order(2))
    assert recipe.data.max_prompt_tokens == 200
    own, borrowed = encode(rows[2], 0).conversations
    assert len(borrowed.token_ids_L) > 180 > len(own.token_ids_L)
    assert len(borrowed.prompt.token_ids_P) + len(borrowed.token_ids_L) > 200


def test_a_row_borrows_the_next_answer_that_can_be_used(tiny_checkpoints, tmp_path, rows):
    """The row is not to blame if the next one's answer has an end token."""
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto())
    bare = replace(rows[0], images=(), messages=(Message(role="user", content="?"), rows[0].messages[-1]))
    odd = replace(bare, messages=(bare.messages[0], Message(role="assistant", content="7<|im_end|>7")))
    family = build_trainer(recipe).family
    encode = ExampleEncoder(recipe=recipe, family=family, rows=[bare, odd, bare], order=file_order(3))
    own, borrowed = encode(bare, 0).conversations
    assert torch.equal(own.token_ids_L, borrowed.token_ids_L)
    with pytest.raises(DataError):
        encode(odd, 1)


def test_a_row_does_not_borrow_an_answer_to_its_own_question(tiny_checkpoints, tmp_path, rows):
    """Answers to one prompt often stand side by side; the loss needs one to another prompt."""
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto())
    bare = replace(rows[0], images=(), messages=(Message(role="user", content="?"), rows[0].messages[-1]))
    same = replace(bare, messages=(bare.messages[0], Message(role="assistant", content="8")))
    asking = replace(bare, messages=(Message(role="user", content="7?"), Message(role="assistant", content="4 4")))
    family = build_trainer(recipe).family
    encode = ExampleEncoder(recipe=recipe, family=family, rows=[bare, same, asking], order=file_order(3))
    _, borrowed = encode(bare, 0).conversations
    assert torch.equal(borrowed.token_ids_L, encode(asking, 2).conversations[0].token_ids_L)
    encode = ExampleEncoder(recipe=recipe, family=family, rows=[bare, same], order=file_order(2))
    _, borrowed = encode(bare, 0).conversations
    assert torch.equal(borrowed.token_ids_L, encode(same, 1).conversations[0].token_ids_L)  # no row asks anything else


def test_kto_starts_at_a_half_and_tells_labels_apart(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto(beta=0.5))
    trainer, objective, made = begun(recipe, rows)
    assert objective.prepare(trainer, made).divergence == 0
    update, metrics = learn(trainer, objective, made)
    assert update.loss == pytest.approx(0.5, abs=1e-6) and metrics["labels/desirable_fraction"] == 0.5
    for _ in range(8):
        update, metrics = learn(trainer, objective, made)
    assert metrics["labels/reward_desirable"] > metrics["labels/reward_undesirable"]
    assert update.loss < 0.5


def test_a_step_without_one_of_the_labels_has_no_mean_of_it(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto(beta=0.5))
    sums = {"labels/reward_desirable": 6.0, "labels/reward_undesirable": 0.0, "labels/desirable": 4.0, "labels/kl": 0.0}
    _, objective, _ = begun(recipe, rows)
    row = objective.metrics(sums, 4)
    assert row["labels/reward_desirable"] == 1.5 and "labels/reward_undesirable" not in row


def test_apo_zero_of_labels_computes_each_rows_own_answer_alone(tiny_checkpoints, tmp_path, rows):
    kto = Kto(beta=0.5, loss="apo_zero_unpaired")
    trainer, objective, made = begun(recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=kto), rows)
    assert {len(example.conversations) for group in made for example in group.examples} == {1}
    for _ in range(3):
        update, metrics = learn(trainer, objective, made)
        assert metrics["labels/kl"] == 0
    assert update.loss < 0.5
    plan = objective.prepare(trainer, made)
    assert plan.divergence == 0 and {len(sums) for sums in plan.reference.values()} == {1}


def test_ktos_divergence_is_that_of_other_rows_answers(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(KtoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, kto=Kto())
    trainer, objective, made = begun(recipe, rows)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.policy.trained_parameters().items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    plan = objective.prepare(trainer, made)
    examples = [example for bundle in made for example in bundle.examples]
    gaps = []
    for example in examples:
        (one,) = grouped_by_rank(trainer, [replace(example, conversations=example.conversations[1:])])
        (alone,) = example_passes(trainer, [one])
        own = float(logprobs_of(trainer, alone.packed).sum())
        with trainer.as_reference():
            gaps.append(own - float(logprobs_of(trainer, alone.packed, of_reference=True).sum()))
    assert plan.divergence == pytest.approx(max(0.0, sum(gaps) / len(gaps)), rel=1e-4, abs=1e-4)
    assert len(plan.groups) == len(examples) and all(len(b.items[0].continuations) == 1 for b in plan.groups)


def test_a_borrowed_answer_brings_its_boxes(rows):
    row, other = rows[0], rows[1]
    own = replace(
        row,
        messages=(replace(row.messages[0], content="<bbox> or what?"), replace(row.messages[-1], content="<bbox>")),
        images=(ImageSource(path="a.png"),),
        boxes=((0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 2.0, 2.0)),
        box_images=(0, 0),
    )
    lent = replace(
        other,
        messages=(*other.messages[:-1], replace(other.messages[-1], content="at <bbox>")),
        boxes=((5.0, 5.0, 6.0, 6.0),),
        box_images=(1,),
    )
    made = with_answer_of(own, lent)
    assert made.messages[-1].content == "at <bbox>" and made.messages[0] == own.messages[0]
    assert (made.boxes, made.box_images) == (((0.0, 0.0, 1.0, 1.0), (5.0, 5.0, 6.0, 6.0)), (0, 0))
    with pytest.raises(DataError):
        with_answer_of(replace(row, images=(), boxes=(), box_images=()), lent)


def test_dft_weighs_tokens_by_their_probability_and_held_out_rows_do_not(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(SftRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, sft={"loss": "dft"})
    trainer, objective, made = begun(recipe, rows)
    logprobs = torch.cat([logprobs_of(trainer, each.packed) for each in example_passes(trainer, made)]).double()
    update, _ = learn(trainer, objective, made)
    assert update.loss == pytest.approx(float(-(logprobs.exp() * logprobs).mean()), rel=1e-5)
    each = example_passes(trainer, made)[0]
    scores = trainer.learner(each.packed, trainer.vision.features(each.packed.images), 1.0)
    plan = objective.prepare(trainer, made)
    judged = objective.judge().loss_terms(each, scores, plan).loss
    assert float(judged.detach()) == pytest.approx(float(-scores.logprobs_N.detach().sum()) / plan.tokens, rel=1e-6)


@pytest.mark.parametrize("family", ("qwen2_5_vl", "gemma3"))
def test_noise_and_smoothing_do_not_depend_on_the_packing(tiny_checkpoints, tmp_path, rows, family):
    """One microbatch for all rows, one for each, and every form give the same loss and gradient."""
    found = {}
    for name in ("together", "apart", "repeated", "plain"):
        sft = {} if name == "plain" else {"neftune_alpha": 20, "label_smoothing": 0.1}
        learner = {"max_tokens_per_microbatch": 4000, "form": "repeated" if name == "repeated" else "auto"}
        recipe = recipe_of(SftRecipe, tiny_checkpoints[family], tmp_path, sft=sft, learner=learner)
        trainer, objective, made = begun(recipe, rows)
        if name == "apart":
            trainer = replace(trainer, max_tokens=max(item.shared_length for bundle in made for item in bundle.items))
        passes = len(example_passes(trainer, made))
        update, _ = learn(trainer, objective, made)
        found[name] = (passes, update.loss, gradient(trainer))
    assert found["together"][0] == 1 and found["apart"][0] > 3
    for name in ("apart", "repeated"):
        assert found[name][1] == pytest.approx(found["together"][1], abs=1e-5)
        assert torch.allclose(found[name][2], found["together"][2], rtol=1e-3, atol=1e-5)
    assert abs(found["plain"][1] - found["together"][1]) > 1e-3


def test_noise_is_another_in_another_epoch_and_the_same_when_asked_again(tiny_checkpoints, tmp_path, rows):
    recipe = recipe_of(SftRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, sft={"neftune_alpha": 5})
    trainer, objective, made = begun(recipe, rows)
    encode = ExampleEncoder(recipe=recipe, family=trainer.family, rows=rows, order=file_order(len(rows)))
    later = grouped_by_rank(trainer, [encode(row, index + 6) for index, row in enumerate(rows)])
    seeds = [objective.pass_options(example_passes(trainer, each)[0]).noise.seeds for each in (made, made, later)]
    assert seeds[0] == seeds[1] and not {*seeds[0]} & {*seeds[2]}
    other = objective_of(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 1})}))
    assert not {*other.pass_options(example_passes(trainer, made)[0]).noise.seeds} & {*seeds[0]}


def test_wpo_weighs_pairs_by_probability_and_held_out_pairs_not_at_all(tiny_checkpoints, tmp_path, rows):
    """As TRL does it, over all words of full logits."""
    dpo = Dpo(loss="sigmoid", beta=0.5, wpo=True)
    trainer, objective, made = begun(recipe_of(DpoRecipe, tiny_checkpoints["qwen2_5_vl"], tmp_path, dpo=dpo), rows)
    moved_a_little(trainer)
    plan = objective.prepare(trainer, made)
    weighed, plain = [], []
    for each in example_passes(trainer, made):
        with torch.no_grad():
            features = trainer.vision.features(each.packed.images)
            states = trainer.learner.scoring_states(each.packed, features, None)
            logprobs_NV = trainer.learner.head.distribution(states, 1.0).double()
        own = logprobs_NV.gather(1, each.packed.targets_N[:, None])[:, 0]
        aligned = own - logprobs_NV.exp().square().sum(-1).log()
        for place, example in enumerate(each.examples):
            mine = [each.packed.continuation_of_N == 2 * place + side for side in (0, 1)]
            ratios = [own[is_own].sum() - plan.reference[example.prompt.index][i] for i, is_own in enumerate(mine)]
            loss = -torch.nn.functional.logsigmoid(0.5 * (ratios[0] - ratios[1]))
            plain.append(loss)
            weighed.append(loss * torch.exp(sum(aligned[is_own].mean() for is_own in mine)))
    update, _ = learn(trainer, objective, made)
    assert update.loss == pytest.approx(float(torch.stack(weighed).mean()), rel=1e-4)
    assert abs(update.loss - float(torch.stack(plain).mean())) > 1e-3
