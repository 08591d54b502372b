"""Convert what learns from pairs, labels and teachers: losses of a pair, the reference, divergences."""

from tiercel.algorithms.preference_sections import (
    MATCHED,
    OF_DIVERGENCES,
    OF_MEANS,
    PAIR_LOSS_NAMES,
    SMOOTHED,
    WITH_SFT,
    WITHOUT_REFERENCE,
)
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.table import words_of
from tiercel.convert.values import number_of

LOSS_FLAGS = ("loss_type", "loss_weights", "pref_loss", "pref_bco_weight")
_SFT_FLAGS = ("rpo_alpha", "cpo_alpha", "pref_ftx")
_DIFFERS = {
    ("TRL", "bco_pair"): "TRL has no shift; tiercel has that of BCO, the mean reward so far",
    ("TRL", "mpo"): "TRL's bco_pair has no shift; tiercel's has that of BCO, the mean reward so far",
    ("TRL", "orpo"): "TRL's SFT term learns prompts too; tiercel's learns the chosen answers only",
    ("LLaMA-Factory", "orpo"): "LLaMA-Factory's SFT term weighs answers alike; tiercel's weighs tokens alike",
}
# A key and the value of its default, which make a section that a recipe must have.
_SECTIONS = {"kto": ("kto.beta", 0.1), "reward": ("ranking.margin", 0.0)}


def set_preferences(launch: Launch, draft: RecipeDraft) -> None:
    """Set the section that says what a recipe learns from, and the reference."""
    if launch.kind == "dpo":
        _pairs(launch, draft)
    elif launch.kind == "sft":
        _tokens(launch, draft)
    elif launch.kind == "distill":
        _teacher(launch, draft)
    elif launch.kind in _SECTIONS and (key := _SECTIONS[launch.kind])[0] not in draft.values:
        draft.set(*key, remark=f"{launch.framework}'s default too")
    if launch.kind == "reward" and launch.framework != "LLaMA-Factory":
        text = f"{launch.framework} reads it if rows have it; in tiercel ranking.margin_column names it"
        draft.note(text, subject="a column margin")
    _reference(launch, draft)


def compares(draft: RecipeDraft) -> bool:
    """Return whether the loss compares the policy with the one that the run starts from."""
    has_reference = draft.values.get("dpo.loss", "orpo") not in WITHOUT_REFERENCE
    return has_reference or draft.launch.kind == "kto" or bool(draft.values.get("algorithm.kl.coef"))


def needs_reference(draft: RecipeDraft) -> bool:
    """Return whether steps compute the reference's logprobs."""
    return compares(draft) and not draft.values.get("dpo.precompute_reference")


def pair_loss(launch: Launch) -> tuple[str, float] | None:
    """Return tiercel's name for the loss of a pair, and the weight of its SFT term; None if tiercel has no such
    loss."""
    terms = _terms(launch)
    sft = terms.pop("sft", 0.0)
    if set(terms) == {"sigmoid", "bco_pair"}:
        return "mpo", sft / sum(terms.values())
    name, weight = next(iter(terms.items())) if len(terms) == 1 else ("", 1.0)
    name = {"sigmoid_norm": "sigmoid", "aot_pair": "aot_unpaired"}.get(name, name)  # TRL's name before 1.0
    return (name, sft / weight) if name in PAIR_LOSS_NAMES and name != "mpo" else None


def _terms(launch: Launch) -> dict[str, float]:
    """Return the terms of the peer's loss with their weights, without those whose weight is 0."""
    if launch.method == "orpo":
        terms = {"orpo": 1.0, "sft": 1.0}
    elif launch.method in ("simpo", "cpo"):
        name = launch.text("loss_type") or ("simpo" if launch.method == "simpo" else "sigmoid")
        own = {"sigmoid": "cpo", "simpo": "simpo"}.get(name, f"cpo_{name}")
        terms = {own: 1.0, "sft": launch.real("cpo_alpha") or 0.0}
    elif launch.framework == "LLaMA-Factory":
        name, ftx = launch.text("pref_loss") or "sigmoid", launch.real("pref_ftx") or 0.0
        bco = 0.0 if name in WITHOUT_REFERENCE else launch.real("pref_bco_weight") or 0.0
        terms = {name: 1 / (1 + bco), "bco_pair": bco / (1 + bco), "sft": ftx + (name == "orpo")}
    else:
        names = launch.words("loss_type") or ("sigmoid",)
        weights = [float(number_of("--loss_weights", word)) for word in launch.words("loss_weights")]
        if len(weights) not in (0, len(names)):
            return {}
        terms = dict(zip(names, weights or [1.0] * len(names), strict=True))
        terms["sft"] = terms.get("sft", 0.0) + (launch.real("rpo_alpha") or 0.0)
    return {name: weight for name, weight in terms.items() if weight}


def _pairs(launch: Launch, draft: RecipeDraft) -> None:
    terms = _terms(launch)
    if (found := pair_loss(launch)) is None:
        return
    loss, sft = found
    draft.put("dpo.loss", loss, *LOSS_FLAGS)
    if sft != float(loss in WITH_SFT) or {*_SFT_FLAGS} & {*launch.flags}:
        is_mean = launch.framework == "LLaMA-Factory"
        remark = "tiercel weighs the mean over tokens, LLaMA-Factory that over answers" if is_mean else ""
        draft.put("dpo.sft_coef", round(sft, 6), *_SFT_FLAGS, *LOSS_FLAGS, remark=remark)
    if "sigmoid_norm" in terms:
        draft.set("dpo.length_normalised", True, "loss_type", remark="sigmoid_norm")
    if loss == "mpo" and abs(terms["bco_pair"] / terms["sigmoid"] - 0.25) > 1e-6:
        text = "tiercel's mpo is 0.8 sigmoid and 0.2 bco_pair; dpo.sft_coef is relative to them"
        draft.note(text, *LOSS_FLAGS, subject="mpo")
    if (launch.framework, loss) in _DIFFERS:
        draft.note(_DIFFERS[launch.framework, loss], subject=f"dpo.loss: {loss}")
    _divergence(launch, draft, loss)
    if (weight := launch.real("ld_alpha")) is not None and loss not in OF_MEANS and "sigmoid_norm" not in terms:
        draft.set("dpo.ld_alpha", weight, "ld_alpha")
    if loss == "exo_pair" and not launch.real("label_smoothing"):
        draft.set("dpo.label_smoothing", 0.001, "loss_type", remark="0 has no logarithm; that of its paper")
    smoothed = ("robust", "exo_pair", *MATCHED) if launch.framework == "TRL" and launch.method == "dpo" else SMOOTHED
    referred = () if loss in WITHOUT_REFERENCE else (loss,)
    takers = {"gamma": ("simpo",), "label_smoothing": smoothed, "precompute_reference": referred, "tau": ("discopop",)}
    draft.drop(*[f"dpo.{key}" for key, losses in takers.items() if loss not in losses])


def _tokens(launch: Launch, draft: RecipeDraft) -> None:
    """Set the loss of SFT's tokens."""
    if token_loss(launch) == "dft":
        draft.set("sft.loss", "dft", "loss_type")
    if draft.values.get("sft.loss") == "dft" and "sft.label_smoothing" in draft.values:
        text = f"{launch.framework}'s dft does not read it either"
        draft.note(text, *draft.drop("sft.label_smoothing"), is_change=False)
    draft.drop(*[key for key in ("sft.neftune_alpha", "sft.label_smoothing") if draft.values.get(key) == 0])


def token_loss(launch: Launch) -> str | None:
    """Return tiercel's name for SFT's loss of tokens; None if tiercel has no such loss."""
    names = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"} if launch.framework == "TRL" else {}
    return names.get(launch.text("loss_type") or "nll")


def _divergence(launch: Launch, draft: RecipeDraft, loss: str) -> None:
    """Set the divergence from the reference; the peer's coefficient is 1 - dpo.divergence_alpha."""
    flags = ("f_divergence_type", "f_alpha_divergence_coef")
    given = launch.text("f_divergence_type") or "reverse_kl"
    coef = launch.real("f_alpha_divergence_coef") if given == "alpha_divergence" else None
    name = {1.0: "reverse_kl", 0.0: "forward_kl"}.get(0.5 if coef is None else coef, "alpha")
    name = words_of("f_divergence_type").get(given, name)
    if name == "reverse_kl":
        return
    if loss not in OF_DIVERGENCES or draft.values.get("dpo.length_normalised"):
        draft.note(f"has no place in dpo.loss: {loss}; the reverse KL is taken", *flags)
        return
    draft.set("dpo.divergence", name, *flags)
    if name == "alpha" and coef not in (None, 0.5):
        remark = f"1 - {launch.framework}'s coefficient"
        draft.set("dpo.divergence_alpha", round(1 - coef, 12), flags[1], remark=remark)


def _teacher(launch: Launch, draft: RecipeDraft) -> None:
    mix = launch.real("beta")
    end = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(0.5 if mix is None else mix)
    draft.set("teacher.divergence", end or "jsd", "beta", remark="the divergence of GKD")
    if end is None:
        draft.set("teacher.mix", mix, "beta")
    share = round(1 - (launch.real("lmbda") or 0.0), 12)
    remark = f"1 - lmbda; tiercel draws for each prompt, {launch.framework} for each batch"
    if share == 0:
        remark = f"in {launch.framework} too, the student samples every completion"
    draft.set("teacher.rows_share", share, "lmbda", remark=remark)
    draft.set("algorithm.normalise", "token", remark=f"{launch.framework} takes the mean over tokens")


def _reference(launch: Launch, draft: RecipeDraft) -> None:
    """Add a note on which policy is the reference."""
    if launch.words("ref_adapters") and launch.words("ref_adapters") == launch.words("adapters"):
        draft.note("lora.init is the KL reference as well", "ref_adapters", is_change=False)
    elif "lora.init" in draft.values and not launch.words("ref_adapters") and compares(draft):
        text = f"{launch.framework}'s reference is the model without this adapter; tiercel's is lora.init as well"
        draft.note(text, "adapters", "adapter_name_or_path", "resume_from_checkpoint")
