"""Gluon's kernels without a GPU: what the attention kernels say, done by torch, one program after the other, its warp groups as threads.

`with interpreted() as kernels:` gives dflash_train.kernels.attention_gluon over these stand-ins; Triton need not be there. Reads and writes
outside of a tensor raise, waits that nobody ends raise, and a product reads what shared memory holds when it is asked for. What this does not
show: layouts, and what a GPU still has in flight.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

import dflash_train.kernels as package
import dflash_train.kernels.attention  # noqa: F401 (what is imported beside the stand-ins goes with them)

NAME = "dflash_train.kernels.attention_gluon"
HERE = threading.local()  # .program, .grid: those of the program that runs
CHANGED = threading.Condition()  # barriers change under it
PATIENCE = 30  # seconds


class Pointer:
    def __init__(self, tensor, at=0):
        self.storage, self.at = tensor.view(-1) if isinstance(tensor, torch.Tensor) else tensor.storage, at
        self.dtype = SimpleNamespace(element_ty=self.storage.dtype)

    def __add__(self, offset):
        return Pointer(self, self.at + offset)

    def places(self, mask):
        at = torch.as_tensor(self.at)
        at = (
            at
            if mask is None
            else torch.broadcast_to(at, torch.broadcast_shapes(at.shape, mask.shape))[mask.expand_as(at)]
        )
        if at.numel() and not (0 <= int(at.min()) and int(at.max()) < self.storage.numel()):
            raise IndexError(f"{int(at.min())} ... {int(at.max())} of {self.storage.numel()}")
        return at


def load(pointer):
    return pointer.storage[pointer.places(None)]


def store(pointer, value, mask=None):
    value = torch.broadcast_to(value, torch.as_tensor(pointer.at).shape)
    pointer.storage[pointer.places(mask)] = value if mask is None else value[mask.expand_as(value)]


class Memory:
    """Shared memory; not a number until something is written."""

    def __init__(self, dtype, shape, data=None):
        fill = torch.nan if dtype.is_floating_point else 0
        self.data = torch.full(shape, fill, dtype=dtype) if data is None else data
        self.dtype = self.data.dtype

    def index(self, i):
        return Memory(self.dtype, None, self.data[int(i)])

    def permute(self, order):
        return Memory(self.dtype, None, self.data.permute(order))

    def reshape(self, shape):
        return Memory(self.dtype, None, self.data.view(shape))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Barrier:
    count = pending = phase = transfers = 0

    def settle(self):
        if self.pending == 0 and self.transfers == 0:
            self.pending, self.phase = self.count, self.phase + 1
            CHANGED.notify_all()


class Barriers:
    def __init__(self, shape):
        self.made = [Barrier() for _ in range(shape[0])]

    def index(self, i):
        return self.made[int(i)]


def one(barrier) -> Barrier:
    return barrier.made[0] if isinstance(barrier, Barriers) else barrier


def init(barrier, count):
    barrier = one(barrier)
    barrier.count = barrier.pending = count


def expect(barrier, size):
    with CHANGED:
        barrier = one(barrier)
        barrier.transfers += size
        barrier.pending -= 1
        barrier.settle()


def arrive(barrier, count):
    with CHANGED:
        barrier.pending -= count
        assert barrier.pending >= 0, "a barrier met by too many"
        barrier.settle()


def wait(barrier, parity):
    barrier = one(barrier)
    with CHANGED:  # done once the phase of this parity has passed, the one before the first being odd
        if not CHANGED.wait_for(lambda: barrier.phase % 2 != int(parity), PATIENCE):
            raise TimeoutError("a barrier that nobody meets")


def copy(table, at, barrier, into):
    base, (rows, columns) = table.base, table.block_shape
    whole = base.as_strided(table.shape, table.strides)
    row, column = (int(i) for i in at)
    assert row >= 0 and 0 <= column, at
    part = whole[row : row + rows, column : column + columns]
    into.data.zero_()
    into.data[: part.shape[0], : part.shape[1]] = part
    with CHANGED:
        barrier = one(barrier)
        barrier.transfers -= rows * columns * base.element_size()
        barrier.settle()


def multiply(a, b, acc, use_acc=True, is_async=False):
    a, b = (x.data if isinstance(x, Memory) else x for x in (a, b))
    return a.float() @ b.float() + (acc if use_acc else 0)


class Table(SimpleNamespace):
    def __init__(self, base, shape, strides, block_shape, layout):
        assert (
            base.data_ptr() % 16 == 0
            and all(s * base.element_size() % 16 == 0 for s in strides[:-1])
            and strides[-1] == 1
        )
        super().__init__(
            base=base, shape=shape, strides=strides, block_shape=block_shape, layout=layout, dtype=base.dtype
        )


def warp_specialize(functions, warps, registers):
    failed = []
    program, grid = HERE.program, HERE.grid

    def run(function, arguments):
        HERE.program, HERE.grid = program, grid
        try:
            with torch.no_grad():
                function(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            HERE.grid = grid
            for x in range(grid[0]):
                for y in range(grid[1]):
                    HERE.program = torch.tensor(x), torch.tensor(y)
                    self.function(*given, **constants)

        return launch


def tensors(function):
    """Numbers may be Python's own."""
    return lambda *x: function(*(v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in x))


def stand_ins() -> dict[str, ModuleType]:
    nothing = lambda *a, **k: None  # noqa: E731
    language = ModuleType("language")
    for name in ("int32", "int64", "float16", "bfloat16", "float32"):
        setattr(language, name, getattr(torch, name))
    vars(language).update(
        constexpr=lambda x: x, static_range=range, program_id=lambda i: HERE.program[i], num_programs=lambda i: HERE.grid[i],
        load=load, store=store, arange=lambda a, b, layout: torch.arange(a, b), zeros=lambda shape, dtype, layout: torch.zeros(shape),
        where=tensors(torch.where), minimum=tensors(torch.minimum), maximum=tensors(torch.maximum), cdiv=lambda a, b: -(-a // b),
        min=lambda x, axis: x.amin(axis), max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
        convert_layout=lambda x, layout: x, warp_specialize=warp_specialize,
        allocate_shared_memory=lambda dtype, shape, layout: Barriers(shape) if layout == "barrier" else Memory(dtype, shape),
        NVMMADistributedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing, BlockedLayout=nothing,
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
    )  # fmt: skip
    hopper = ModuleType("hopper")
    vars(hopper).update(
        fence_async_shared=nothing,
        mbarrier=SimpleNamespace(init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=lambda: "barrier"),
        tma=SimpleNamespace(async_copy_global_to_shared=copy), warpgroup_mma=multiply,
        warpgroup_mma_wait=lambda left, deps: deps[0] if len(deps) == 1 else deps,
    )  # fmt: skip
    tables = ModuleType("tables")
    tables.TensorDescriptor = Table
    gluon = ModuleType("gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = Kernel, lambda f: f, language
    root = "triton.experimental.gluon"
    others = ("triton", "triton.experimental", f"{root}.nvidia", f"{root}.language.nvidia")
    return {
        **{name: ModuleType(name) for name in others},
        root: gluon, f"{root}.language": language, f"{root}.language.nvidia.hopper": hopper, f"{root}.nvidia.hopper": tables,
    }  # fmt: skip


@contextlib.contextmanager
def interpreted():
    with mock.patch.dict(sys.modules, stand_ins()):
        kernels = importlib.import_module(NAME)
    sys.modules[NAME] = kernels
    try:
        yield kernels
    finally:
        del sys.modules[NAME], package.attention_gluon
