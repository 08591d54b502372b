"""A cell that trains: test_verbs.py ends it by Ctrl-C."""

import sys
import time

import tiercel as tc

sys.ps1 = ">>> "  # as at a prompt


def slow(completion):
    time.sleep(0.05)
    return float(len(completion) % 3)


if __name__ == "__main__":
    run = tc.grpo(sys.argv[1], rewards=[slow], steps=1000, output=sys.argv[2])
    print("steps", run.steps, flush=True)
    run = run.resume(steps=run.steps + 1)
    print("then", run.steps, flush=True)
