"""What is left out of transformers: out of all that a server imports, and there once it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = """
import sys
from engine.compute.lean_transformers import prepare_transformers

prepare_transformers()
assert "torch" not in sys.modules
import engine.startup.build, engine.startup.doctor, engine.training.eagle_run
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MambaForCausalLM, MixtralForCausalLM

heavy = {"sympy", "torch._prims", "torch._dynamo.convert_frame", "torch._inductor"}
heavy.add("torch.distributed.tensor")
assert not heavy & set(sys.modules), heavy & set(sys.modules)

import inspect
inspect.getmodule(lambda: None)  # which looks at every module there is
assert not heavy & set(sys.modules)

import torch
from config import load_settings
from engine.compute.loading.outline import outline_model
from engine.compute.loading.support import Architecture, find_model_class
from tests.support.tiny_models import tiny_config

def layers(family):
    architecture = Architecture(config := tiny_config(family), find_model_class(config))
    return outline_model(architecture, torch.float32, load_settings([]).model).layers

assert torch.rand(2, generator=torch.Generator().manual_seed(0)).shape == (2,)
found = {family: layers(family) for family in ("llama", "mixtral", "gemma3", "starcoder2")}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert len(layers("mpt")) == len(found["llama"])  # which uses what C++ lacks
assert "torch._prims" in sys.modules
assert found == {family: layers(family) for family in found}
assert torch.Generator().manual_seed(0).initial_seed() == 0

from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    assert torch.arange(3)[torch.tensor(1)] == 1
from torch._dynamo.exc import Unsupported
import torch._dynamo
assert torch._dynamo.config.suppress_errors is False
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
from torch.distributed.tensor import DTensor
"""

EVERY_NAME = """
import sys
from engine.compute.lean_transformers import prepare_transformers

if "lean" in sys.argv:
    prepare_transformers()
import transformers
from transformers.utils.import_utils import define_import_structure

found = define_import_structure(f"{transformers.__path__[0]}/models", prefix="models")
for needed, modules in sorted(found.items(), key=lambda item: sorted(item[0])):
    print(sorted(needed), sorted((name, sorted(names)) for name, names in modules.items()))
print(sorted(dir(transformers)))
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


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert not result.returncode, result.stderr
    return result.stdout


def test_what_is_left_out_is_there_when_asked_for() -> None:
    run(LEFT_OUT)


@pytest.mark.slow
def test_a_transformers_that_is_there_already_stays_as_it_is() -> None:
    run(PLAIN_AFTERWARDS)


@pytest.mark.slow
def test_no_name_of_transformers_is_lost() -> None:
    plain, lean = run(EVERY_NAME), run(EVERY_NAME, "lean")
    assert "LlamaForCausalLM" in plain and lean == plain
