"""Every fault by name."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.accident_resumes import accident_resumes
from benchmarks.faults.answered_secrets import answered_secrets
from benchmarks.faults.bombs import bombs
from benchmarks.faults.broken_servers import broken_servers
from benchmarks.faults.canaries import canaries
from benchmarks.faults.crashes import crashes
from benchmarks.faults.damage import damage
from benchmarks.faults.escapes import escapes
from benchmarks.faults.figure import Figure, Size
from benchmarks.faults.full_disks import full_disks
from benchmarks.faults.fuzzed_rows import fuzzed_rows
from benchmarks.faults.hostile_images import hostile_images
from benchmarks.faults.kills import kills
from benchmarks.faults.left_processes import left_processes
from benchmarks.faults.long_runs import long_runs
from benchmarks.faults.non_finite import non_finite
from benchmarks.faults.odd_runs import odd_runs
from benchmarks.faults.one_writer import one_writer
from benchmarks.faults.others_files import others_files
from benchmarks.faults.rewards import hostile_rewards
from benchmarks.faults.secrets import secrets
from benchmarks.faults.stalls import stalls
from benchmarks.faults.start_hangs import start_hangs
from benchmarks.faults.terminations import terminations
from benchmarks.faults.turn_kills import turn_kills
from benchmarks.faults.wrong_recipes import wrong_recipes

# (size, seed, an empty directory of its own) -> Figure
FAULTS: dict[str, Callable[[Size, int, Path], Figure]] = {
    "SIGKILL at random moments": kills,
    "SIGKILL between turns": turn_kills,
    "crash at every file operation of a save": crashes,
    "disk full at every file of a save": full_disks,
    "damaged checkpoint files": damage,
    "hostile run directories": odd_runs,
    "resumes after accidents": accident_resumes,
    "what is somebody's in a run": others_files,
    "one writer of a run": one_writer,
    "SIGTERM in each phase": terminations,
    "NaN or Inf on one rank": non_finite,
    "hostile rewards": hostile_rewards,
    "processes that rewards leave": left_processes,
    "a broken vLLM server": broken_servers,
    "a rank sleeps, stops, dies, skips": stalls,
    "a rank hangs at its start": start_hangs,
    "hostile images": hostile_images,
    "fuzzed rows": fuzzed_rows,
    "pickle canaries in every loadable slot": canaries,
    "path and URL escapes": escapes,
    "canary secrets": secrets,
    "secrets in answers": answered_secrets,
    "wrong recipes": wrong_recipes,
    "bombs": bombs,
    "memory over many steps": long_runs,
}
