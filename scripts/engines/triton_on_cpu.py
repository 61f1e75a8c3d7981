"""Lets vLLM's CPU build run its Triton kernels: a stand-in driver named "cpu", and Triton's own interpreter.

Import before vllm. No file of vLLM or Triton is changed. Kernels run one program at a time in numpy: right, and slow.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter


class CPUDriver:
    """What vLLM and Triton ask a driver for before the interpreter takes over."""

    class utils:  # noqa: N801  (an attribute of that name is looked up)
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            names = (
                "max_num_regs",
                "multiprocessor_count",
                "warpSize",
                "sm_clock_rate",
                "mem_clock_rate",
                "mem_bus_width",
            )
            return {name: 1 for name in names} | {"max_shared_mem": 2**20}

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        return lambda kernel, **_: kernel()


class CPUBackend:
    compiler, driver = None, CPUDriver


def install() -> None:
    triton.backends.backends["cpu"] = CPUBackend
    driver.set_active(CPUDriver())
    builder = interpreter.InterpreterBuilder
    # The interpreter passes masks on as the integers that some kernels compute them in; numpy wants booleans.
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), position))


def _with_boolean_mask(method, position: int):
    def call(self, *args):
        mask = args[position]
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return method(self, *args)

    return call


install()
