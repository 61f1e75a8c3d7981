"""CUDA graphs where there is no GPU: what is said of work that cannot be recorded. tests/gpu records."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from dflash_train.kernels import graphs


@pytest.fixture
def modes(monkeypatch) -> list:
    """The detector's modes, in the order in which they were set."""
    found: list = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def test_what_waits_is_told_and_the_detector_put_back(modes):
    def body() -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nmore of it")

    assert graphs.waits(body) == "called a synchronizing CUDA operation"
    assert graphs.waits(lambda: None) is None
    assert modes == ["error", 0] * 2


def test_another_error_of_a_rehearsal_is_raised(modes):
    def body() -> None:
        raise RuntimeError("expected two tensors")

    with pytest.raises(RuntimeError, match="two tensors"):
        graphs.waits(body)
    assert modes == ["error", 0]


@pytest.mark.parametrize("leaving", [None, "operation failed due to a previous error during capture"])
def test_a_recording_that_fails_names_its_first_error_and_the_knob(leaving, monkeypatch):
    @contextmanager
    def recording(*arguments, **more):
        try:
            yield
        finally:
            if leaving:
                raise RuntimeError(leaving)

    def body() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    made = object.__new__(graphs.Graphs)
    made.pool = made.stream = None
    with pytest.raises(ValueError, match="not permitted when stream is capturing; engine.cuda_graphs=false"):
        made.record(body)


def test_too_little_memory_is_not_taken_for_that(monkeypatch):
    @contextmanager
    def recording(*arguments, **more):
        yield

    def body() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    made = object.__new__(graphs.Graphs)
    made.pool = made.stream = None
    with pytest.raises(torch.OutOfMemoryError):
        made.record(body)
