from tiercel.api.model import evaluate as evaluate
from tiercel.api.model import load as load
from tiercel.api.recipe import Recipe as Recipe
from tiercel.api.run import Run as Run
from tiercel.api.verbs import distill as distill
from tiercel.api.verbs import dpo as dpo
from tiercel.api.verbs import grpo as grpo
from tiercel.api.verbs import kto as kto
from tiercel.api.verbs import reward as reward
from tiercel.api.verbs import sft as sft

__version__: str
