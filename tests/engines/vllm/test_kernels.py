"""What a compiled server leaves to its compiler runs the engine's own kernels in a loop of ours, and only there."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from blendstore_vllm.kernels import EngineKernels


@pytest.fixture(params=["none", "all"])
def layers(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Any]]]:
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=[request.param]))
    with set_current_vllm_config(config):
        yield request.param, [RMSNorm(16), SiluAndMul(), nn.Linear(4, 4)]


def test_kernels_are_taken_for_a_loop_and_given_back(layers: tuple[str, list[Any]]) -> None:
    mode, modules = layers
    ops = [module for module in modules if isinstance(module, CustomOp)]
    before = [module._forward_method for module in ops]
    kernels = EngineKernels(nn.ModuleList(modules))
    assert kernels.replaced == (len(ops) if mode == "none" else 0)
    assert [module._forward_method for module in ops] == before
    with pytest.raises(ValueError, match="in the loop"), kernels.on():
        for module in ops:
            assert module._forward_method == module.dispatch_forward(False) or mode == "none"
            if mode == "none":
                assert module._forward_method.__name__ == "forward_cpu"
        raise ValueError("in the loop")
    assert [module._forward_method for module in ops] == before
    assert not any(module._enforce_enable for module in ops)
