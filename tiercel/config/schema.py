"""The recipe: one frozen tree of typed sections. Every key's docstring is its line in docs/recipe.md.

Nothing here fills in a value that depends on another key, and nothing here imports torch.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tiercel.algorithms.section import Algorithm
from tiercel.sections import (
    SECTION_FORM,
    TEXT_FORM,
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    form_of,
)

RowFormat = Literal["auto", "tiercel", "swift", "vlm_r1", "sharegpt", "alpaca", "openai", "refcoco"]
Part = Literal["vision", "projector", "language"]
RewardName = Literal[
    "format", "exact", "normalised", "ocr", "number", "count", "math", "choice", "json", "iou", "giou", "ciou",
    "box_precision", "box_recall", "box_f1", "box_map", "point_in_box", "vlm_r1_rec", "length", "cosine",
    "soft_overlong", "repetition", "judge", "model",
]  # fmt: skip
TrackerName = Literal["tensorboard", "wandb", "trackio", "swanlab"]


class Source(Section):
    """Where a checkpoint comes from."""

    path: str
    """A local directory with a config.json, or a model id on the hub."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Where a model id is looked up; a local directory never asks."""
    revision: str | None = None
    """The commit, tag or branch of a hub model; null takes the newest."""


class Model(Source):
    """The checkpoint that is trained."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What the forward pass computes in. LoRA weights and their optimiser state are float32 in any case."""
    min_pixels: PositiveInt | None = None
    """An image with fewer pixels is enlarged to about this many; null takes the checkpoint's own value."""
    max_pixels: PositiveInt | None = None
    """An image with more pixels is reduced to at most this many; null takes the checkpoint's own value."""
    vision_cache_bytes: NonNegativeInt = 0
    """Memory for vision features kept across steps (frozen tower), least recently used out first."""
    reference: Literal["device", "cpu"] = "device"
    """Where the frozen copy of the weights that are trained whole lies, which algorithm.kl compares with: beside them,
    or in the host's memory, from which it is copied for the reference's pass."""


class Lora(Section):
    """Low-rank adapters by PEFT."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input. A shared prefix needs 0, for each completion would draw its own mask."""
    targets: str = "language"
    """Which linear layers: language, vision, projector, all, or a regular expression on module names."""
    init: str | None = None
    """Directory of an adapter to go on from, such as an SFT run's; it is then the KL reference as well."""


class MixedFile(Section):
    """Another file of training rows."""

    path: str
    """As data.train."""
    weight: PositiveFloat = 1.0
    """Its part of the rows, against the 1 of data.train."""
    format: RowFormat | None = None
    """Layout of its rows; null takes data.format."""
    image_root: str | None = None
    """Where its images resolve; null takes data.image_root, or else its own directory."""


class HeldOut(Section):
    """Rows of data.train and data.mix that are held out: never trained on, and chosen by their ids alone. Exactly one
    key is given. In place of the section data.eval may name a file, as data.train does."""

    fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of the usable training rows, to the nearest row."""
    count: PositiveInt | None = None
    """Number of rows."""


class Video(Section):
    """How videos become frames; families of Qwen and the local engine read them."""

    fps: PositiveFloat = 2.0
    """Frames taken of each second of a file; what a list of frames has where its row does not say."""
    max_frames: Annotated[int, Field(ge=2, strict=True)] = 32
    """A longer file is sampled more thinly, evenly; a longer list of frames is rejected."""
    min_pixels: PositiveInt = 128 * 28 * 28
    """A frame with fewer pixels is enlarged to about this many."""
    max_pixels: PositiveInt = 768 * 28 * 28
    """A frame with more pixels is reduced to at most this many."""


class Data(Section):
    """Rows and images."""

    train: str
    """Training rows: a .jsonl, .json or .parquet file, a directory that Hugging Face's datasets saved, or
    hf:ORGANISATION/NAME:SPLIT of the hub; with #N at the end, N of its rows."""
    mix: tuple[MixedFile, ...] = ()
    """More training rows, mixed with data.train by weight in one order. An epoch is as many rows as all files have."""
    eval: (
        Annotated[Annotated[str, Tag(TEXT_FORM)] | Annotated[HeldOut, Tag(SECTION_FORM)], Discriminator(form_of)] | None
    ) = None
    """Held-out rows, scored greedily at step 0 and every train.eval_every steps: named as data.train, or
    {fraction: 0.01} or {count: 100} of the training rows."""
    format: RowFormat = "auto"
    """Layout of the rows; auto decides per file from its first rows."""
    image_root: str | None = None
    """Images resolve under this directory; null takes the row file's directory."""
    image_roots: tuple[str, ...] = ()
    """Further directories under which an image may lie that is named by an absolute path. Any other path is refused;
    symbolic links are followed first."""
    shuffle: bool = True
    """Order of the rows in an epoch: a function of (seed, epoch, index); false keeps the file's order."""
    max_prompt_tokens: PositiveInt = 4096
    """A longer prompt, image tokens included, is rejected whole; it is never cut."""
    workers: NonNegativeInt = 2
    """Processes that decode and resize images ahead of time; any number gives the same batches."""
    max_bad_fraction: Fraction = 0.01
    """The run stops when more than this share of the rows was rejected."""
    max_image_pixels: PositiveInt = 100_000_000
    """An image whose header claims more pixels is rejected before it is decoded."""
    video: Video = Video()
    system: str | None = None
    """System message for rows that have none."""
    prompt: str | None = None
    """Text of every row's last user turn: {prompt} is the row's own, {NAME} its column NAME, {{ and }} are braces; null
    keeps the row's own."""
    train_turns: Literal["all", "last"] = "all"
    """SFT: which assistant turns are learnt, of those that the row itself does not leave out."""
    template: str | None = None
    """File with a Jinja chat template; null takes the checkpoint's own."""


class Where(Section):
    """Rows that a reward applies to; to the others it does not, and leaves their sum."""

    column: str
    """Column of the row."""
    equals: tuple[str, ...]
    """The values of such rows, as text: 7 is "7", true is "true"."""


class Judge(Section):
    """Whom the reward `judge` asks."""

    url: str
    """Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str
    """The judge's name there."""
    prompt: str | None = None
    """File with the question: {prompt}, {completion} and {answer} are filled in; null takes tiercel's own, which asks
    for a grade from 0 to 10."""
    best: PositiveFloat = 10.0
    """The grade that is worth 1."""
    key: str | None = None
    """Name of the environment variable that holds the server's key, such as OPENAI_API_KEY."""
    concurrency: PositiveInt = 16
    """Requests at a time."""
    timeout: PositiveFloat = 60.0
    """Seconds that a request may take."""
    retries: NonNegativeInt = 3
    """Further tries of a request that the server did not answer, or was too busy for."""
    max_tokens: PositiveInt = 512
    """Length of the judge's reply."""


class RewardModel(Source):
    """The checkpoint of the reward `model`: a Hugging Face sequence-classification model."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What it is held in and computes in."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the rank's own GPU, where there is one; every rank holds a copy."""
    template: str | None = None
    """File with a Jinja chat template; null takes the one of the reward model's own tokenizer."""
    max_tokens: PositiveInt = 4096
    """A longer conversation is unscorable; it is never cut."""
    batch_tokens: PositiveInt = 16384
    """Tokens of a pass, padding included; it only bounds memory."""
    label: NonNegativeInt | None = None
    """Which of its scores is the reward, counted from 0; null where it has one."""


class Reward(Section):
    """One reward: a built-in by `name`, or your own function by `call`."""

    name: RewardName | None = None
    """A built-in reward."""
    call: str | None = None
    """Your own: file.py:function or package.module:function, taking a Sample, answering a number or None; a function
    written for TRL or a class written for ms-swift is taken too (docs/rewards.md)."""
    weight: FiniteFloat = 1.0
    """Factor of this reward in the sum."""
    pattern: str | None = None
    """format: regular expression the whole completion must match; null asks for <answer>...</answer> at the end."""
    tolerance: NonNegativeFloat | None = None
    """number: largest absolute difference that still counts as right; null asks for equality."""
    relative_tolerance: NonNegativeFloat | None = None
    """number: likewise, as a share of the right number; the larger of both counts."""
    choices: tuple[str, ...] | None = None
    """choice: the admissible answers; null takes the letters A to Z."""
    max_tokens: PositiveInt | None = None
    """length: 1 up to this many tokens, then falling linearly to 0 at twice as many; cosine: where its curve ends;
    soft_overlong: -1 from here on."""
    buffer: PositiveInt | None = None
    """soft_overlong: tokens before max_tokens over which it falls from 0 to -1."""
    ngram: PositiveInt | None = None
    """repetition: words of the runs that are compared; null takes 3."""
    threshold: Fraction | None = None
    """iou, giou, ciou: the value from which on the reward is 1, else 0; null gives the value itself. box_precision,
    box_recall, box_f1: the overlap from which on two boxes are a pair; null takes 0.5."""
    json_schema: str | None = None
    """json: file with a JSON schema that the answer must satisfy."""
    judge: Judge | None = None
    model: RewardModel | None = None
    where: Where | None = None
    answer_column: str | None = None
    """Column of the row that holds the right answer; null takes `answer`."""
    env: tuple[str, ...] | None = None
    """call: names of environment variables that your function needs though they look like secrets, such as
    OPENAI_API_KEY; it sees no other `*_KEY`, `*TOKEN*`, `*SECRET*` or `*PASSWORD*`."""
    correct_at: FiniteFloat | None = None
    """A row counts as right for eval/accuracy from this value on; null takes the built-in's own (iou 0.5, else 1)."""


class Vllm(Section):
    """The engine of `rollout.engine: vllm`, in the ranks' own processes."""

    tensor_parallel: PositiveInt = 1
    """Ranks of one machine that share an engine, each with a part of every weight; 1 is an engine for each rank."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of a GPU's memory for the engine: its weights, its keys and values, its workspace."""
    sleep_level: Literal[0, 1, 2] = 0
    """While the learner works the engine keeps everything (0), moves its weights to the host's memory (1), or drops
    them and reads them from disk again (2); 1 and 2 free its keys and values."""


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["local", "vllm", "vllm-server"] = "local"
    """Who samples: local is the trained model itself, by transformers; vllm an engine beside it in each rank;
    vllm-server any number of `vllm serve` processes, which share the trainer's file system."""
    vllm: Vllm = Vllm()
    urls: tuple[str, ...] = ()
    """Addresses of the servers of vllm-server, such as http://127.0.0.1:8000. Their key is read from VLLM_API_KEY."""
    request_timeout: PositiveFloat = 300.0
    """Seconds that a server may take for the completions of one prompt."""
    patience: PositiveFloat = 600.0
    """Seconds without an answer from any server before the run ends; it can be resumed."""
    parity_tolerance: PositiveFloat | None = None
    """Largest difference between an engine's logprobs and the trainer's before the first step; null takes 1e-3 with
    model.dtype float32, 0.25 else."""
    parity_action: Literal["stop", "warn"] = "stop"
    """Where at a later step many of an engine's logprobs are far beyond the tolerance: stop ends the run before the
    update, warn goes on and says it."""
    lookahead: Annotated[int, Field(ge=0, le=1, strict=True)] = 0
    """1: vllm-server samples the next step's prompts while the learner works, from the policy that the learner starts
    from, so that completions are one version old; needs algorithm.correction."""
    prepacked_bytes: NonNegativeInt = 2_000_000_000
    """Memory on a CPU for copies of weights in the order that decoding reads fastest (local, float32); layers beyond it
    are decoded more slowly."""
    group_size: PositiveInt = 8
    """Completions sampled for each prompt."""
    min_new_tokens: NonNegativeInt = 1
    """End-of-turn tokens are masked before this many tokens."""
    max_new_tokens: PositiveInt = 256
    """A completion without an end by then is truncated and counted."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by this, in sampling and in learning alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegativeInt = 0
    """Only the k likeliest tokens; 0 is off."""
    resample_tries: NonNegativeInt = 0
    """Dynamic sampling (DAPO 2025): where fewer than optim.prompts_per_step groups have rewards that differ, so many
    further rollouts at most, of other rows, fill the step; groups that are good already are kept. 0 is off."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""


class Learner(Section):
    """How the policy pass is computed; no key here changes its result."""

    form: Literal["auto", "split", "flex", "dense", "repeated"] = "auto"
    """split (CPU), flex (GPU), dense (a 4-D mask): prompt once per group; repeated: prompt once per completion; auto:
    by device, and repeated for a model that cannot share prompts."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one forward and backward pass; groups are packed up to it."""
    skip_zero_advantage: bool = True
    """Groups whose advantages are all 0 stay out of the pass where the loss has no KL term; they add nothing to it."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass (non-reentrant) to save memory."""


class PartRates(Section):
    """Peak learning rates of single parts; null takes optim.lr. All of them follow one schedule."""

    vision: PositiveFloat | None = None
    """The vision tower's."""
    projector: PositiveFloat | None = None
    """The projector's."""
    language: PositiveFloat | None = None
    """The language model's, its adapter included."""


class Optim(Section):
    """AdamW and the size of a step. Batch sizes are global: the same on any number of ranks."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    part_lr: PartRates = PartRates()
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to 0 at train.steps."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps over which the rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    prompts_per_step: PositiveInt = 16
    """Rows of one step: prompts of a rollout, or conversations of SFT."""
    minibatches: PositiveInt = 1
    """Parts that a rollout is split into, with an optimiser update for each."""
    rollout_epochs: PositiveInt = 1
    """Passes over the parts of a rollout. With more than one update per rollout the old logprobs are computed once,
    before the first."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient is scaled down to this norm where it is longer."""


class Deepspeed(Section):
    """How ZeRO partitions, for train.strategy: deepspeed."""

    stage: Literal[2, 3] = 3
    """2: gradients and moments; 3: weights too."""
    offload_parameters: bool = False
    """Stage 3: the partitioned weights lie in the CPU's memory."""
    offload_optimizer: bool = False
    """Moments, and the update, on the CPU."""
    config: str | None = None
    """A DeepSpeed JSON file whose further settings are taken over; one that contradicts the recipe is refused."""


class Train(Section):
    """Length, seed and intervals of the run."""

    steps: PositiveInt | None = None
    """Steps to make; exactly one of steps and epochs is given."""
    epochs: PositiveFloat | None = None
    """Passes over the training rows; the last step may run short."""
    seed: NonNegativeInt = 0
    """Order of the rows, sampling, adapter initialisation and dropout are functions of this."""
    strategy: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = "auto"
    """How ranks share the work. ddp: every rank holds the model; fsdp2: each holds its share; deepspeed: ZeRO; auto:
    one rank single, several ddp where the model fits each, else fsdp2, and it says why. None changes the result."""
    deepspeed: Deepspeed = Deepspeed()
    deterministic: bool = False
    """Only deterministic kernels, also on GPU; slower there."""
    save_every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """Checkpoints kept, newest first."""
    keep_best: Literal["eval/accuracy", "eval/reward/mean", "eval/loss"] | None = None
    """One more is kept: that of the evaluation with the best value of this metric, saved at once; null keeps none."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; null evaluates at the start and at the end only."""
    log_every: PositiveInt = 1
    """Steps between progress lines; metrics.jsonl has every step in any case."""
    threads: PositiveInt | None = None
    """CPU threads of the process; null leaves torch's own number."""


class Reliability(Section):
    """When to give up."""

    stall_timeout: PositiveFloat = 600.0
    """Seconds without progress before the run is diagnosed and ended."""
    reward_timeout: PositiveFloat = 60.0
    """Seconds one batch of your own reward's calls may take."""
    reward_memory_gb: PositiveFloat = 8.0
    """Gigabytes of the machine's memory that your own reward and all that it starts may hold together; Linux only."""
    reward_file_mb: PositiveFloat = 1024.0
    """Megabytes that each file may have that your own reward writes."""
    max_failed_reward_fraction: Fraction = 0.1
    """The run stops when more than this share of a step's rewards failed."""
    max_skipped_updates: NonNegativeInt = 0
    """Updates whose loss or gradient is not finite that are left out and counted before the run stops."""


class BaseRecipe(Section):
    """What SFT and GRPO recipes share."""

    model: Model
    lora: Lora | None = None
    freeze: tuple[Part, ...] = ("vision", "projector")
    """Parts whose own weights stay as they are. Beside `lora` a vision tower or projector that is neither frozen nor
    adapted is trained whole; the language model's own weights always stay."""
    data: Data
    learner: Learner = Learner()
    optim: Optim = Optim()
    train: Train
    reliability: Reliability = Reliability()
    trackers: tuple[TrackerName, ...] = ()
    """Who else gets the rows of metrics.jsonl, and a few pictures with completions (docs/trackers.md); each needs its
    package."""
    output: str
    """The run directory; the same command again goes on from its newest valid checkpoint."""


class SftRecipe(BaseRecipe):
    """Recipe of `tiercel sft`: trains on the assistant turns."""


class GrpoRecipe(BaseRecipe):
    """Recipe of `tiercel grpo`: samples after the last user turn."""

    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)]
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
