"""Shapes of a step that the null GPU runs at full size."""

from benchmarks.gpu.steps import Shape

GROUP = Shape(side=0, prompt_tokens=1180, completion_tokens=200, group_size=8, groups=1)
GROUP_TOKENS = GROUP.prompt_tokens + GROUP.tokens
