"""Python runs this at its start if this folder is on its path. The process then reads its fault plan."""

from benchmarks.faults.fault_plan import put_planned

put_planned()
