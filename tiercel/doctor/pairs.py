"""Versions that are known to fail, together or by themselves: what happens, and the remedy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from tiercel.doctor.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class BadPair:
    """Versions that fail together. `is_bad` gets the installed versions of `packages` in their order; it is called only
    where all are installed."""

    packages: tuple[str, ...]
    is_bad: Callable[..., bool]
    status: Literal["warning", "broken"]
    happens: str
    remedy: str


def judge_pairs(version_of: Callable[[str], Version | None]) -> list[Verdict]:
    """Return a verdict for each entry that the installed versions match, or one that says that none does."""
    verdicts = []
    for pair in KNOWN_BAD_PAIRS:
        versions = [version for name in pair.packages if (version := version_of(name)) is not None]
        if len(versions) < len(pair.packages) or not pair.is_bad(*versions):
            continue
        installed = ", ".join(f"{name} {version}" for name, version in zip(pair.packages, versions, strict=True))
        name, found = " and ".join(pair.packages), f"{installed}: {pair.happens}"
        verdicts.append(Verdict(name=name, status=pair.status, found=found, remedy=pair.remedy))
    return verdicts or [Verdict(name="known bad pairs", status="ok", found=f"none of {len(KNOWN_BAD_PAIRS)}")]


def _is_other_minor(torch: Version, torchvision: Version) -> bool:
    """Whether the two are of different releases: torch 2.N needs torchvision 0.(N + 15). Pre-releases, which containers
    have, are built for each other."""
    if torch.is_prerelease or torchvision.is_prerelease or torch.major != 2 or torchvision.major != 0:
        return False
    return torchvision.minor != torch.minor + 15


def _has_slow_conv3d(torch: Version, cudnn: Version) -> bool:
    return torch.release[:2] == (2, 9) and (torch.micro == 0 or cudnn < Version("9.15"))


KNOWN_BAD_PAIRS: tuple[BadPair, ...] = (
    # https://github.com/pytorch/vision/issues/2148 https://github.com/pytorch/pytorch/issues/157648
    BadPair(
        packages=("torch", "torchvision"),
        is_bad=_is_other_minor,
        status="broken",
        happens="not from the same release; its import fails (operator torchvision::nms does not exist), and so does "
        "what transformers loads with it",
        remedy="pip install --upgrade torch torchvision, both in one command, or pip uninstall torchvision, which "
        "tiercel does not need",
    ),
    # https://github.com/pytorch/pytorch/issues/122494
    BadPair(
        packages=("torch", "torchvision"),
        is_bad=lambda torch, torchvision: torch.local == "cpu" and torchvision.local != "cpu",
        status="warning",
        happens="torch is built for the CPU but torchvision perhaps for CUDA; its import then fails: operator "
        "torchvision::nms does not exist",
        remedy="if torchvision does not import below: install torchvision from the index torch came from, or pip "
        "uninstall torchvision, which tiercel does not need",
    ),
    # https://github.com/vllm-project/vllm/issues/4392 https://github.com/pytorch/pytorch/issues/133548
    BadPair(
        packages=("nvidia-cublas-cu12",),
        is_bad=lambda cublas: cublas < Version("12.4.5.8"),
        status="warning",
        happens="matrix products in bfloat16 and float16 end the process with SIGFPE on some cards, including the H20",
        remedy="pip install --upgrade torch, which brings a newer one, or pip install 'nvidia-cublas-cu12>=12.4.5.8'",
    ),
    # https://github.com/pytorch/pytorch/issues/166643 https://github.com/pytorch/pytorch/issues/174051
    *(
        BadPair(
            packages=("torch", f"nvidia-cudnn-{cuda}"),
            is_bad=_has_slow_conv3d,
            status="warning",
            happens="Conv3d in bfloat16, the first layer of Qwen's vision towers, runs without cuDNN: 10 to 20 times "
            "the time and several times the memory",
            remedy=f"install torch 2.10 or later; otherwise torch 2.9.1 with 'nvidia-cudnn-{cuda}>=9.15'",
        )
        for cuda in ("cu12", "cu13")
    ),
    # https://github.com/pytorch/pytorch/pull/174338
    *(
        BadPair(
            packages=(f"nvidia-nccl-{cuda}",),
            is_bad=lambda nccl: nccl.release[:3] == (2, 29, 2),
            status="warning",
            happens="collectives between GPUs may hang",
            remedy=f"pip install 'nvidia-nccl-{cuda}>=2.29.3', or the version that torch asks for",
        )
        for cuda in ("cu12", "cu13")
    ),
    # https://github.com/pytorch/pytorch/issues/132179
    BadPair(
        packages=("torch", "numpy"),
        is_bad=lambda torch, numpy: torch < Version("2.3") and numpy >= Version("2"),
        status="broken",
        happens='"Numpy is not available": this torch was built for NumPy 1',
        remedy="pip install --upgrade torch",
    ),
    # https://github.com/huggingface/trl/pull/4820 https://github.com/huggingface/peft/pull/2735
    BadPair(
        packages=("peft", "transformers"),
        is_bad=lambda peft, transformers: peft < Version("0.18") and transformers >= Version("5"),
        status="broken",
        happens="peft fails at import: cannot import name 'HybridCache' from 'transformers'",
        remedy="pip install 'peft>=0.18'",
    ),
    # https://github.com/PrunaAI/pruna/pull/630
    BadPair(
        packages=("peft", "torchao"),
        is_bad=lambda peft, torchao: peft >= Version("0.18.1") and torchao < Version("0.16"),
        status="broken",
        happens='every LoRA layer fails with "Found an incompatible version of torchao", whether it is used or not',
        remedy="pip uninstall torchao, which tiercel does not need, or pip install 'torchao>=0.16'",
    ),
    # https://github.com/unslothai/unsloth/pull/11168
    BadPair(
        packages=("peft", "torchao"),
        is_bad=lambda peft, torchao: peft < Version("0.19") and torchao >= Version("0.18"),
        status="broken",
        happens="every LoRA layer fails with \"cannot import name 'LinearActivationQuantizedTensor'\"",
        remedy="pip install --upgrade peft, or pip uninstall torchao, which tiercel does not need",
    ),
    # https://github.com/deepspeedai/DeepSpeed/issues/7718 https://github.com/huggingface/trl/issues/4540
    BadPair(
        packages=("deepspeed",),
        is_bad=lambda deepspeed: Version("0.17.6") <= deepspeed < Version("0.18.3"),
        status="broken",
        happens="wrong gradients under ZeRO-2, without an error",
        remedy="pip install 'deepspeed>=0.18.3', or train with another train.strategy",
    ),
    # https://github.com/deepspeedai/DeepSpeed/issues/5337 https://github.com/deepspeedai/DeepSpeed/issues/5603
    BadPair(
        packages=("deepspeed", "torch"),
        is_bad=lambda deepspeed, torch: deepspeed < Version("0.14.3") and torch >= Version("2.4"),
        status="broken",
        happens="deepspeed fails at import: cannot import name 'log' from 'torch.distributed.elastic'",
        remedy="pip install --upgrade deepspeed",
    ),
    # https://github.com/Dao-AILab/flash-attention/issues/1783 https://github.com/huggingface/open-r1/issues/684
    BadPair(
        packages=("flash-attn", "torch"),
        is_bad=lambda flash, torch: flash >= Version("2.8") and torch < Version("2.7"),
        status="warning",
        happens="flash_attn fails at import with an undefined symbol",
        remedy="pip install --upgrade torch, or pip uninstall flash-attn, which tiercel does not need",
    ),
    # https://github.com/Dao-AILab/flash-attention/issues/1644
    BadPair(
        packages=("flash-attn", "torch"),
        is_bad=lambda flash, torch: flash < Version("2.8") and torch >= Version("2.7"),
        status="warning",
        happens="wheels of this flash_attn were built for an older torch and fail at import with an undefined symbol",
        remedy="pip install --upgrade flash-attn, or pip uninstall flash-attn, which tiercel does not need",
    ),
)
