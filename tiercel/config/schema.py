"""The recipe: one frozen tree of typed sections. The docstring of each key is its line in docs/recipe.md.

Nothing here fills in a value that depends on another key, and nothing here imports torch.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tiercel.algorithms.preference_sections import Dpo, Kto, Ranking
from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.sft import Sft
from tiercel.algorithms.teacher import RowsTeacher, Teacher
from tiercel.config.data import Data
from tiercel.config.rollout import Rollout
from tiercel.config.strategies import STRATEGY_KINDS, StrategyKind, StrategyName
from tiercel.config_base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    RuleError,
    Section,
    Source,
)
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.external import ByCall
from tiercel.rewards.registry import RewardByName

Checkpointing = Literal[False, "selective", "full"]
Part = Literal["vision", "projector", "language"]
Quantization = Literal["nf4", "int8"]
LoraKind = Literal["lora", "rslora", "dora"]
Kind = Literal["sft", "dpo", "kto", "reward", "distill", "grpo"]  # a command, and the recipe that it reads
Purpose = Literal["sft", "pairs", "labels", "grpo"]  # what a row must have
TrackerName = Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"]


class Model(Source):
    """The checkpoint that is trained."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the forward pass. LoRA weights and their optimiser state are always float32."""
    quantize: Quantization | None = None
    """Hold the decoder's frozen linear layers in 4 bits (nf4) or 8 bits (int8), by bitsandbytes; needs lora."""
    min_pixels: PositiveInt | None = None
    """An image with fewer pixels is enlarged to about this many; null takes the checkpoint's own value."""
    max_pixels: PositiveInt | None = None
    """An image with more pixels is reduced to at most this many; null takes the checkpoint's own value."""
    vision_cache_bytes: NonNegativeInt = 0
    """Memory for vision features kept across steps (frozen tower), least recently used out first."""
    reference: Literal["device", "cpu"] = "device"
    """Place of the frozen copy of the weights that are trained whole, which algorithm.kl, DPO and KTO compare with:
    beside them, or in the host's memory, from which it is copied for the reference's pass."""


class Lora(Section):
    """Low-rank adapters by PEFT."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input. A shared prefix needs 0, because each completion would draw its own mask."""
    targets: str = "language"
    """Which linear layers: language, vision, projector, all, or a regular expression on module names. Experts are
    adapted only by an expression that matches the names of their weights."""
    init: str | None = None
    """Directory of an adapter to continue from, or of a run (an SFT run's, say), whose newest checkpoint is taken once;
    it is then the KL reference as well."""
    kind: LoraKind = "lora"
    """rslora multiplies by alpha / sqrt(rank), so that high ranks learn as fast (Kalajdzievski 2023); dora also trains
    the length of each row of a weight (Liu et al. 2024), and is slower; lora does neither."""
    start: Literal["loftq"] | None = None
    """loftq: a new adapter starts as the nearest matrices of its rank to what model.quantize rounded off (Li et al.
    2023); null: at zero."""


def _checkpointing(value: Any) -> Any:
    return "full" if value is True else value


class Learner(Section):
    """How the policy pass is computed; no key here changes its result."""

    form: Literal["auto", "split", "flex", "dense", "repeated"] = "auto"
    """split (CPU), flex (GPU), dense (a 4-D mask): prompt once per group; repeated: prompt once per completion; auto:
    by device, and repeated for a model that cannot share prompts."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = 16384
    """Token budget of one forward and backward pass; groups are packed up to it. auto: the largest that fits the memory
    by the plan; a run takes it once, says it in its log and keeps it when it goes on."""
    skip_zero_advantage: bool = True
    """Groups whose advantages are all 0 stay out of the pass if the loss has no KL term; they add nothing to it."""
    gradient_checkpointing: Annotated[Checkpointing, BeforeValidator(_checkpointing)] = False
    """Recompute decoder layers in the backward pass (non-reentrant) to save memory: full (also written true) all but
    their inputs; selective keeps attention and some of the largest matrix products, a third of the memory of false."""
    compile: bool | Literal["auto"] = "auto"
    """Fuse norms, rotary embeddings, MLPs and adapters of the decoder by torch.compile. auto: on a GPU with form flex
    if the strategy is single or ddp, without dropout and without selective checkpointing. false also leaves the layers
    of sampled tokens as they are, which the local engine compiles on a GPU."""


class PartRates(Section):
    """Peak learning rates of single parts; null takes optim.lr. All of them follow one schedule."""

    vision: PositiveFloat | None = None
    """The vision tower's."""
    projector: PositiveFloat | None = None
    """The projector's."""
    language: PositiveFloat | None = None
    """The language model's, its adapter included."""


class Optim(Section):
    """The optimiser and the size of a step. Batch sizes are global: the same on any number of ranks."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon"] = "adamw"
    """adamw keeps its moments in float32, adamw_8bit in 8 bits, by bitsandbytes; the paged ones keep theirs in memory
    that moves to the host if a GPU's is short, without DeepSpeed. muon, for full fine-tuning, updates the matrices
    of the layers by Muon, with steps of AdamW's size, and all else by AdamW."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    part_lr: PartRates = PartRates()
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up: constant, or falling to min_lr at train.steps. wsd (warm-up, stable, decay) stays at lr and
    falls linearly over the last decay_steps."""
    min_lr: NonNegativeFloat = 0.0
    """The rate that a schedule falls to."""
    decay_steps: PositiveInt | None = None
    """Steps of wsd over which the rate falls; null takes a tenth of the run."""
    warmup_steps: NonNegativeInt = 0
    """Steps of the run over which the rate rises linearly from 0; all updates of a step have one rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Muon's momentum."""
    prompts_per_step: PositiveInt = 16
    """Rows of one step: prompts of a rollout, or conversations of SFT."""
    minibatches: PositiveInt = 1
    """Parts that a rollout is split into, with an optimiser update for each."""
    rollout_epochs: PositiveInt = 1
    """Passes over the parts of a rollout. With more than one update per rollout the old logprobs are computed once,
    before the first."""
    max_grad_norm: NonNegativeFloat = 1.0
    """The gradient is scaled down to this norm if it is longer. 0: it is never scaled down."""

    @property
    def is_of_torch(self) -> bool:
        """Say whether torch has it; bitsandbytes has the others."""
        return self.name in ("adamw", "muon")

    @property
    def is_paged(self) -> bool:
        """Return whether moments move to the host's memory when a GPU's memory is short."""
        return self.name.startswith("paged")

    @property
    def moment_bits(self) -> int:
        """Return the number of bits in each of a weight's two moments."""
        return 8 if self.name.endswith("8bit") else 32


class Deepspeed(Section):
    """How ZeRO partitions, for train.strategy: deepspeed."""

    stage: Literal[2, 3] = 3
    """2: gradients and moments; 3: weights too."""
    offload_parameters: bool = False
    """Stage 3: the partitioned weights lie in the CPU's memory."""
    offload_optimizer: bool = False
    """The moments lie, and the update runs, on the CPU."""
    config: str | None = None
    """A DeepSpeed JSON file whose other settings are used; one that contradicts the recipe is refused."""


class Profile(Section):
    """Steps that torch's profiler records."""

    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Numbers of the steps, as metrics.jsonl counts them. Each rank writes `profiles/step-NNNNNN-rankR.json.gz` into
    the run directory; Perfetto and Chrome open it. A recorded step is slower than others."""


class Train(Section):
    """Length, seed and intervals of the run."""

    steps: PositiveInt | None = None
    """Number of steps; exactly one of steps and epochs is given."""
    epochs: PositiveFloat | None = None
    """Passes over the training rows; the last step may run short. If you raise it after the run has ended with such a
    step, the rows that would have filled that step are left out."""
    seed: NonNegativeInt = 0
    """Order of the rows, sampling, adapter initialisation and dropout are functions of this."""
    strategy: Literal["auto", StrategyName] = "auto"
    """How ranks share the work. ddp: every rank holds the model; fsdp2: each holds its share; deepspeed: ZeRO; auto:
    one rank single, several ddp if the model fits each, else fsdp2, and it says why. None changes the result."""
    deepspeed: Deepspeed = Deepspeed()
    shard_size: PositiveInt | None = None
    """With fsdp2, ranks that hold one copy of the model together; each group of so many ranks has a copy. With those of
    a machine no weight crosses the network. null: all ranks."""
    context_parallel: PositiveInt = 1
    """Ranks that compute each microbatch together, for rows that are too long for one GPU: each has a part of the
    tokens, and in each layer the keys and values of all. So many consecutive ranks; the result does not change."""
    deterministic: bool = False
    """Only deterministic kernels, also on GPU; slower there."""
    save_every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """Checkpoints kept, newest first."""
    keep_best: Literal["eval/accuracy", "eval/reward/mean", "eval/loss"] | None = None
    """Also keep the checkpoint of the evaluation with the best value of this metric, saved at once; null keeps none."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; null evaluates at the start and at the end only."""
    log_every: PositiveInt = 1
    """Steps between progress lines; metrics.jsonl always has every step."""
    threads: PositiveInt | None = None
    """CPU threads of the process; null leaves torch's own number."""
    profile: Profile | None = None

    @property
    def strategy_kind(self) -> StrategyKind | None:
        """Return the properties of the strategy; None for auto, which the run decides."""
        return STRATEGY_KINDS.get(self.strategy)


class Reliability(Section):
    """When to give up."""

    stall_timeout: PositiveFloat = 600.0
    """Seconds without progress before the run is diagnosed and ended."""
    reward_timeout: PositiveFloat = 60.0
    """Seconds that your own reward may take for one batch, and your environment or tool for one answer."""
    reward_memory_gb: PositiveFloat = 8.0
    """Gigabytes of memory that your own reward and all processes that it starts may hold together; each process of an
    environment, too; Linux only."""
    reward_file_mb: PositiveFloat = 1024.0
    """Largest size, in megabytes, of each file that your own reward or environment writes."""
    max_failed_reward_fraction: Fraction = 0.1
    """The run stops when more than this share of a step's rewards failed."""
    max_skipped_updates: NonNegativeInt = 0
    """Number of updates with a non-finite loss or gradient that are skipped and counted before the run stops."""


class BaseRecipe(Section):
    """The sections that all recipes share."""

    kind: ClassVar[Kind]
    purpose: ClassVar[Purpose]
    teacher_key: ClassVar[str] = "algorithm.teacher"  # of the section of `taught_by`
    judge: ClassVar[Callable[[Any], list[Problem]]]  # set by rules.py, which imports the classes of this file

    model: Model
    lora: Lora | None = None
    freeze: tuple[Part, ...] = ("vision", "projector")
    """Parts whose own weights stay as they are. With `lora`, a vision tower or projector that is neither frozen nor
    adapted is trained whole; the language model's own weights always stay."""
    data: Data
    learner: Learner = Learner()
    optim: Optim = Optim()
    train: Train
    reliability: Reliability = Reliability()
    trackers: tuple[TrackerName, ...] = ()
    """Trackers that also get the rows of metrics.jsonl, and a few pictures with completions (docs/trackers.md); each
    needs its package."""
    output: str
    """The run directory; the same command again continues from its newest valid checkpoint."""

    @model_validator(mode="after")
    def _agrees_with_the_rules(self) -> Self:
        if problems := type(self).judge(self):
            raise RuleError(problems)
        return self

    @property
    def needs_reference(self) -> bool:
        """Return whether steps compare the policy with the one that the run started from."""
        return False

    @property
    def has_reference(self) -> bool:
        """Return whether steps or evaluations compare with it."""
        return self.needs_reference

    @property
    def runs_user_code(self) -> bool:
        """Return whether processes run the user's code: rewards, an environment or tools."""
        return False

    @property
    def taught_by(self) -> Teacher | None:
        """Return the teacher's section, or None if the loss has no term of a teacher."""
        return None

    @property
    def longest_row(self) -> int:
        """Return the largest number of tokens of a prompt with one answer. In KTO, a row's second answer is that of
        another row."""
        return self.data.max_prompt_tokens * (2 if self.purpose == "labels" else 1)

    @property
    def longest_row_keys(self) -> str:
        """Return the keys that limit it."""
        return "data.max_prompt_tokens"

    def smallest_microbatch(self, row_tokens: int) -> int:
        """Return the number of tokens that a microbatch must hold if no row has more than `row_tokens`. Each of the two
        answers of a pair may have the whole prompt. KTO's second answer is that of another row, which may be as long as
        a row beside a prompt that is as long; it shares the prompt unless the form repeats it."""
        repeats = self.purpose == "labels" and self.learner.form == "repeated"
        return row_tokens * (1 if self.purpose == "sft" else 3 if repeats else 2)


class OfflineRecipe(BaseRecipe):
    """A recipe that learns from answers in its rows, and does not sample."""


class SftRecipe(OfflineRecipe):
    """Recipe of `tiercel sft`: trains on the assistant turns."""

    kind = "sft"
    purpose = "sft"
    sft: Sft = Sft()


class DpoRecipe(OfflineRecipe):
    """Recipe of `tiercel dpo`: trains on pairs of a chosen and a rejected answer."""

    kind = "dpo"
    purpose = "pairs"
    dpo: Dpo

    @property
    def needs_reference(self) -> bool:
        """Return whether steps compute the reference's logprobs."""
        return self.has_reference and not self.dpo.precompute_reference

    @property
    def has_reference(self) -> bool:
        """Return whether the loss has a reference, computed in each step or before them."""
        return self.dpo.has_reference


class KtoRecipe(OfflineRecipe):
    """Recipe of `tiercel kto`: trains on answers that are labelled good or bad."""

    kind = "kto"
    purpose = "labels"
    kto: Kto

    @property
    def needs_reference(self) -> bool:
        """Return True: steps compute the reference's logprobs."""
        return True


class RewardRecipe(OfflineRecipe):
    """Recipe of `tiercel reward`: trains a model that gives an answer a value, on pairs."""

    kind = "reward"
    purpose = "pairs"
    ranking: Ranking


class GrpoRecipe(BaseRecipe):
    """Recipe of `tiercel grpo`: samples after the last user turn."""

    kind: ClassVar[Kind] = "grpo"
    purpose = "grpo"
    learns_from_rewards: ClassVar[bool] = True  # whether completions have advantages
    rewards: Annotated[tuple[Annotated[RewardEntry, RewardByName()], ...], Field(min_length=1)]
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()

    @property
    def needs_reference(self) -> bool:
        """Return whether there is a KL penalty."""
        return self.algorithm.kl.coef > 0

    @property
    def runs_user_code(self) -> bool:
        """Return whether a reward, an environment or tools are the user's own code."""
        return self.rollout.has_turns or any(isinstance(reward, ByCall) for reward in self.rewards)

    @property
    def taught_by(self) -> Teacher | None:
        """Return the teacher's section, or None if the loss has no term of a teacher."""
        return self.algorithm.teacher

    @property
    def longest_row(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.longest

    @property
    def longest_row_keys(self) -> str:
        return f"data.max_prompt_tokens and {self.rollout.longest_key} together"

    def smallest_microbatch(self, row_tokens: int) -> int:
        """Return the number of tokens of a prompt and its longest completion."""
        return row_tokens + self.rollout.longest


class DistillRecipe(GrpoRecipe):
    """Recipe of `tiercel distill`: samples after the last user turn, and learns what a teacher says of it. Rewards only
    measure."""

    kind = "distill"
    teacher_key = "teacher"
    learns_from_rewards = False
    rewards: tuple[Annotated[RewardEntry, RewardByName()], ...] = ()
    teacher: RowsTeacher

    @property
    def taught_by(self) -> Teacher | None:
        """Return the teacher's section."""
        return self.teacher


Recipe = OfflineRecipe | GrpoRecipe
