"""What is left out of transformers: out of all that a server imports, and there once it is asked for."""

from __future__ import annotations

import subprocess
import sys

LEFT_OUT = """
import sys
from engine.compute.lean_transformers import prepare_transformers

prepare_transformers()
assert "torch" not in sys.modules
import engine.startup.build, engine.startup.doctor, engine.training.eagle_run
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MambaForCausalLM, MixtralForCausalLM

heavy = {"sympy", "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)

import inspect
inspect.getmodule(lambda: None)  # which looks at every module there is
assert not heavy & set(sys.modules)

import torch
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    assert torch.arange(3)[torch.tensor(1)] == 1
from torch._dynamo.exc import Unsupported
import torch._dynamo
assert torch._dynamo.config.suppress_errors is False
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
from torch.distributed.tensor import DTensor
"""

PLAIN_AFTERWARDS = """
import torch._dynamo, transformers
from transformers.utils.import_utils import is_torch_distributed_available
from engine.compute.lean_transformers import prepare_transformers

before = is_torch_distributed_available()
prepare_transformers()
assert transformers.utils.is_torch_distributed_available() == before
assert torch._dynamo.config.suppress_errors is False
"""


def run(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert not result.returncode, result.stderr


def test_what_is_left_out_is_there_when_asked_for() -> None:
    run(LEFT_OUT)


def test_a_transformers_that_is_there_already_stays_as_it_is() -> None:
    run(PLAIN_AFTERWARDS)
