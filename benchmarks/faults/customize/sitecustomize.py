"""Python runs this as it starts, where this folder is on its path: the process takes up its fault plan."""

from benchmarks.faults.fault_plan import put_planned

put_planned()
