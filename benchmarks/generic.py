"""Which architectures of transformers are accepted without their own family, and in which form.

    make test-generic
    python -m benchmarks.generic llava qwen3

Each is a tiny random checkpoint in the real format, and its proof is that of a run's start
(packing/forward_equivalence_check.py). One more checkpoint is made inconsistent on purpose. The exit code is 1 if that
is accepted, or if one that must be accepted is not.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tests.generic_models import GENERIC, NAMED, save_generic_checkpoint
from tests.tiny_models import tiny_policy
from tiercel.errors import TiercelError
from tiercel.packing.forward_equivalence_check import check_forward_equivalence

INCONSISTENT = "llava, its processor with another patch size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one architecture."""

    architecture: str
    reads: str
    form: str  # shared, repeated or refused
    difference: float | None  # the largest of a logprob from a plain forward pass, in nats
    reason: str | None  # of `repeated` and of `refused`


def verdict(name: str, checkpoint: Path, *, reads_pictures: bool) -> Verdict:
    """Prove one checkpoint as the start of a run does."""
    reads = "pictures" if reads_pictures else "text"
    try:
        found = check_forward_equivalence(tiny_policy(checkpoint, noise=0.1))
    except TiercelError as error:
        reason = str(error).replace(str(checkpoint), "the checkpoint")
        return Verdict(architecture=name, reads=reads, form="refused", difference=None, reason=reason)
    form = "shared" if found.obstacle is None else "repeated"
    return Verdict(architecture=name, reads=reads, form=form, difference=found.difference, reason=found.obstacle)


def inconsistent(directory: Path) -> Path:
    """Make a checkpoint whose processor cuts pictures into patches of another size than its tower."""
    place = save_generic_checkpoint(GENERIC["llava"], directory / "consistent")
    copy = Path(shutil.copytree(place, directory / "inconsistent"))
    file = copy / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 28}))
    return copy


def main(names: Sequence[str]) -> int:
    """Prove the architectures and write the results. Returns the exit code."""
    verdicts = []
    with TemporaryDirectory() as place:
        for name in names:
            tiny = GENERIC[name]
            checkpoint = save_generic_checkpoint(tiny, Path(place) / name)
            verdicts.append(verdict(name, checkpoint, reads_pictures=tiny.processor is not None))
            print(f"{name}: {verdicts[-1].form} {verdicts[-1].reason or ''}")
        spoilt = verdict(INCONSISTENT, inconsistent(Path(place)), reads_pictures=True)
        print(f"{spoilt.architecture}: {spoilt.form} {spoilt.reason or ''}")
    rows = [[v.architecture, v.reads, v.form, _number(v.difference), v.reason or ""] for v in (*verdicts, spoilt)]
    head = ["architecture", "reads", "form", "largest difference of a logprob", "reason"]
    results = {"versions": versions(), "architectures": [asdict(v) for v in verdicts], "inconsistent": asdict(spoilt)}
    write_results(RESULTS / "generic.json", results, markdown_table(head, rows))
    missing = [v.architecture for v in verdicts if v.architecture in NAMED and v.form == "refused"]
    if missing:
        print(f"refused, but must be admitted: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing) or spoilt.form != "refused")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(GENERIC), help="architectures; all without")
    sys.exit(main(parser.parse_args().names))
