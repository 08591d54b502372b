"""Compiled decoder layers: traced as on a GPU, but run on a CPU operation by operation (`aot_eager`)."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as pytorchs

from tests.learner.items import item
from tests.models.test_families import items_of, policy_of
from tests.tiny_models import save_tiny_checkpoint
from tiercel.errors import TrainingError
from tiercel.learner import learner as learner_module
from tiercel.learner.compiling import LAYER_GRAPHS, CompiledLayers
from tiercel.learner.layout import pack
from tiercel.learner.learner import Learner
from tiercel.models.vision import VisionStore
