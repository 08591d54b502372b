"""Run the reward `model`: the score that a Hugging Face sequence-classification model gives a conversation, or the
value that a reward model of `tiercel reward` gives it (values.py).

Shape suffixes: R rows of a pass, T tokens of the longest, O labels. Imports torch and transformers, unlike the other
rewards, so batches.py only imports it if a recipe has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tiercel.devices import training_device
from tiercel.errors import DataError, EnvironmentProblem, ModelError, RecipeError, TrainingError
from tiercel.message_text import first_line
from tiercel.models.families.consistency import require_embeddings
from tiercel.models.rendering import TEMPLATE_FAULTS
from tiercel.models.weights.checkpoint_files import named_few, read_config, require_no_code, require_safetensors
from tiercel.models.weights.hub import resolve
from tiercel.models.weights.loading import DTYPES
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load
from tiercel.reward_types import RewardValue, Sample, Turn
from tiercel.rewards.external import ByModel, RewardModel
from tiercel.rewards.runtime.values import AnsweredPrompt, ValueModel, is_value_model, load_value_model
from tiercel.rewards.runtime.wire import LARGEST_VALUE
from tiercel.types import VISUAL_MARK, EncodedPrompt

NO_PADDING = -1  # no token has this id
LEFT_BY_TRAINING = "lm_head."  # of the language model that the reward model was made from; no score depends on it


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRewardModel:
    """A frozen model that scores conversations, and how it expects them."""

    path: Path
    model: Any
    tokenizer: Any
    template: str
    label: int
    pad_id: int | None  # None if the model knows no padding, so that only rows of equal length share a pass

    def token_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Apply the chat template. Raises one of TEMPLATE_FAULTS if it refuses the conversation."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=False, chat_template=self.template
        )

    @torch.no_grad()
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Score rows that are padded on the right, where the tokens of a causal model do not see the padding; the model
        takes its score at the last token that is not padding."""
        longest = max(map(len, rows))
        token_ids_RT = torch.full((len(rows), longest), 0 if self.pad_id is None else self.pad_id)
        mask_RT = torch.zeros_like(token_ids_RT)
        for number, row in enumerate(rows):
            token_ids_RT[number, : len(row)] = torch.tensor(row)
            mask_RT[number, : len(row)] = 1
        device = self.model.device
        try:
            scores_RO = self.model(input_ids=token_ids_RT.to(device), attention_mask=mask_RT.to(device)).logits
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            elsewhere = "" if device.type == "cpu" else ", or set model.device: cpu"
            raise TrainingError(
                f"reward model at {self.path}: out of memory: {first_line(error)}\nlower its model.batch_tokens (now "
                f"{len(rows)} conversations of {longest} tokens){elsewhere}"
            ) from error
        return scores_RO[:, self.label].tolist()


class ModelReward:
    """Scores by a model that is loaded once, before the first step; every rank has its own."""

    def __init__(self, reward: ByModel):
        self._options = reward.model
        self._loaded: LoadedRewardModel | ValueModel | None = None

    def start(self) -> None:
        """Load the model. Raises RecipeError if the checkpoint cannot be fetched or read, or is not a reward model."""
        try:
            self._loaded = load_reward_model(self._options)
        except (ModelError, EnvironmentProblem) as error:
            raise RecipeError([str(error)]) from error

    def score_answers(self, samples: Sequence[Sample], prompts: Sequence[EncodedPrompt]) -> tuple[RewardValue, ...]:
        """Score each sample, with the pictures of its prompt; a sample that cannot be encoded or is too long is a
        failure."""
        if not isinstance(self._loaded, ValueModel):
            return self.score(samples)
        if samples and samples[0].turns:
            raise TrainingError(
                f"reward model at {self._options.path}: one from `tiercel reward` does not accept turns with tools "
                "or an environment; remove it, or rollout.tools and rollout.environment"
            )
        answers = [
            AnsweredPrompt(text=each.completion, prompt=prompt) for each, prompt in zip(samples, prompts, strict=True)
        ]
        found = zip(samples, self._loaded.scores(answers), strict=True)
        return tuple(
            self._failure(sample, str(value)) if isinstance(value, DataError) else self._value(sample, value)
            for sample, value in found
        )

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        """Score each sample without pictures; a sample that the template refuses or that is too long is a failure."""
        assert isinstance(self._loaded, LoadedRewardModel), "start comes first"
        values: dict[int, RewardValue] = {}
        rows: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            try:
                rows[index] = self._loaded.token_ids(conversation(sample))
            except TEMPLATE_FAULTS as error:
                values[index] = self._failure(sample, f"the chat template refuses it: {error}")
        most = self._options.max_tokens
        for index in [index for index, row in rows.items() if not 1 <= len(row) <= most]:
            count = len(rows.pop(index))
            words = f"{count} tokens, above model.max_tokens ({most})" if count else "the chat template writes nothing"
            values[index] = self._failure(samples[index], words)
        lengths = {index: len(row) for index, row in rows.items()}
        for batch in batches(lengths, self._options.batch_tokens, is_padded=self._loaded.pad_id is not None):
            scores = self._loaded.scores([rows[index] for index in batch])
            for index, score in zip(batch, scores, strict=True):
                values[index] = self._value(samples[index], score)
        return tuple(values[index] for index in range(len(samples)))

    def close(self) -> None:
        """Free its memory."""
        self._loaded = None

    def _value(self, sample: Sample, score: float) -> RewardValue:
        is_number = abs(score) <= LARGEST_VALUE
        return RewardValue(value=score) if is_number else self._failure(sample, f"{score} is no reward")

    def _failure(self, sample: Sample, text: str) -> RewardValue:
        return RewardValue(value=None, failure=f"reward model at {self._options.path}, row {sample.id}: {text}")


def conversation(sample: Sample) -> list[Turn]:
    """List the turns of the prompt without the marks of their pictures, and the completion."""
    prompt = sample.messages or (Turn(role="user", content=sample.prompt),)
    return [
        *(Turn(role=turn.role, content=without_images(turn.content)) for turn in prompt),
        Turn(role="assistant", content=sample.completion),
    ]


def without_images(content: str) -> str:
    return VISUAL_MARK.sub("", content).strip() if VISUAL_MARK.search(content) else content


def batches(lengths: dict[int, int], budget: int, *, is_padded: bool) -> list[list[int]]:
    """Group rows by index, those of similar lengths together: each pass has at most `budget` tokens, including padding.
    Without padding, all rows of a pass have the same length."""
    found: list[list[int]] = []
    for index in sorted(lengths, key=lambda index: lengths[index]):
        length = lengths[index]  # the longest so far
        fits = found and (len(found[-1]) + 1) * length <= budget
        if fits and (is_padded or lengths[found[-1][0]] == length):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def load_reward_model(options: RewardModel) -> LoadedRewardModel | ValueModel:
    """Load a reward model from safetensors only; no code of the checkpoint is run, and no weights are made up. Raises
    ModelError, EnvironmentProblem."""
    path = resolve(options)
    require_no_code(path, read_config(path))
    if is_value_model(options, path):
        return load_value_model(options, path)
    if options.min_pixels or options.max_pixels:
        key = "min_pixels" if options.max_pixels is None else "max_pixels"
        raise ModelError(
            f"model.{key} is set, but the sequence classifier {path} does not see pictures here; remove it"
        )
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{path} is an adapter; set path to the checkpoint that it is for, and adapter to this one")
    require_safetensors(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # for broken files, tokenizers raises Exception itself
        raise ModelError(f"{path}: config or tokenizer cannot be read: {type(error).__name__}: {error}") from error
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(
            f"{path} is a {config.model_type} model, of which transformers has no sequence classifier; use a "
            "checkpoint of one, or a reward model of `tiercel reward`"
        )
    template = _chat_template(path, tokenizer, options)
    require_embeddings(path, tokenizer, config.get_text_config().vocab_size)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and options.max_tokens > positions:
        raise ModelError(
            f"model.max_tokens: is {options.max_tokens}, but {path} reads at most {positions} tokens; use "
            f"{positions} or less"
        )
    with memory_to_load(path, "take a smaller reward model, or a machine with more memory"):
        model = _load_weights(path, options)
    label = _label(path, config.num_labels, options.label)  # once the weights fit: any config has a number of labels
    pad_id = config.get_text_config().pad_token_id
    if pad_id is None or not 0 <= pad_id < model.get_input_embeddings().num_embeddings:
        pad_id = None
        # So that it takes the last token, also of several rows.
        model.config.get_text_config().pad_token_id = NO_PADDING
    return LoadedRewardModel(path=path, model=model, tokenizer=tokenizer, template=template, label=label, pad_id=pad_id)


def _load_weights(path: Path, options: RewardModel) -> Any:
    """Load the frozen weights onto their device. Refuse weights that would be drawn at random, and weights that would
    be left out."""
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=DTYPES[options.dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, ValueError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{path}: its weights cannot be read: {error}") from error
    if missing := found["missing_keys"]:
        raise ModelError(
            f"{path} is not a reward model: it has no weights for {named_few(missing)}, and random ones would make "
            "random rewards; use a checkpoint that was trained as a sequence classifier"
        )
    if left := [name for name in found["unexpected_keys"] if not name.startswith(LEFT_BY_TRAINING)]:
        raise ModelError(
            f"{path}: transformers' {type(model).__name__} does not have its {named_few(left)}, and would score "
            "without them; use a checkpoint in transformers' own format"
        )
    model.requires_grad_(False)
    model.config.get_text_config().use_cache = False  # no token follows
    device = training_device() if options.device == "auto" else torch.device("cpu")
    try:
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{path} does not fit into the GPU's memory beside what is already there: {first_line(error)}; set "
            "model.device: cpu, or use a smaller model"
        ) from error


def _chat_template(path: Path, tokenizer: Any, options: RewardModel) -> str:
    if options.template is not None:
        try:
            return Path(options.template).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ModelError(f"model.template: {options.template} cannot be read: {error}") from error
    if not isinstance(tokenizer.chat_template, str):
        raise ModelError(
            f"{path}: its tokenizer has no chat template, so the format of a conversation is unknown; set "
            "model.template to a file with the one that it was trained with"
        )
    return tokenizer.chat_template


def _label(path: Path, count: int, given: int | None) -> int:
    """Choose the score. Raises ModelError unless the model has only one, or the recipe names one of several."""
    if given is None and count > 1:
        raise ModelError(
            f"{path} returns {count} scores; choose the one that is the reward with model.label, from 0 to {count - 1}"
        )
    if given is not None and given >= count:
        raise ModelError(f"model.label: is {given}, but {path} returns {count}, counted from 0")
    return given or 0
