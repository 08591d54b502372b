"""tiercel trains vision-language models after pretraining; each image and each prompt is computed once.

import tiercel as tc

run = tc.grpo(model="Qwen/Qwen2.5-VL-3B-Instruct", data=rows, rewards=[right, "format"], lora={"rank": 64},
              steps=200, output="runs/x")
tc.load(run).generate("Where is the cup?", images=["a.png"]).text
"""

import sys
from importlib import import_module
from typing import Any

from tiercel.old_import_paths import MovedModules

sys.meta_path.append(MovedModules())

__version__ = "0.1.0"
__all__ = ["Recipe", "Run", "distill", "dpo", "evaluate", "grpo", "kto", "load", "reward", "sft"]
_HOMES = {
    **dict.fromkeys(("distill", "dpo", "grpo", "kto", "reward", "sft"), "verbs"),
    **dict.fromkeys(("evaluate", "load"), "model"),
    "Recipe": "recipe",
    "Run": "run",
}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used, so that `import tiercel` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("tiercel.doctor.packages").imported(f"tiercel.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
