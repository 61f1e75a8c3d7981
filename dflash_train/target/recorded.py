"""Reading rows of one size fast: decoder layers that follow each other compiled as one, and the whole pass as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dflash_train.kernels.graphs import Body, Graphs
from dflash_train.types import PackedBatch


@contextmanager
def watch(layers: nn.ModuleList) -> Iterator[list[bool]]:
    """While a backbone runs over its layers: whether each was given, as its first argument, the very tensor that the one before it returned."""
    follows: list[bool] = []
    last: list[Any] = [None]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        follows.append(bool(args) and args[0] is last[0])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        last[0] = output

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield follows
    finally:
        for handle in handles:
            handle.remove()


def compiled_layers(layers: nn.ModuleList, follows: list[bool], captured: Container[int], most: int) -> nn.ModuleList:
    """The layers, compiled in groups of at most `most` that follow each other. The output of a captured layer is that of a group: within one, what
    a layer adds and the norm of the next are one kernel."""
    groups: list[list[nn.Module]] = []
    for i, layer in enumerate(layers):
        if i and follows[i] and i - 1 not in captured and len(groups[-1]) < most:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    members: list[nn.Module] = []
    for group in groups:
        calls: list[Call] = []
        forward = torch.compile(_one_after_the_other, dynamic=False)
        members += [Member(layer, group, calls, forward if layer is group[-1] else None) for layer in group]
    return nn.ModuleList(members)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _one_after_the_other(layers: list[nn.Module], calls: list[Call]) -> Any:
    hidden = None
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        hidden = layer.forward(*(args if hidden is None else (hidden, *args[1:])), **kwargs)
    return hidden


class Member(nn.Module):
    """A decoder layer of a group that is compiled as one and left alone where else it is used: called, it keeps what it was called with and hands its
    input on; the last of the group runs them all. The hooks of the layer itself do not run."""

    def __init__(self, layer: nn.Module, group: list[nn.Module], calls: list[Call], forward: Callable | None):
        super().__init__()
        self.layer = layer
        self._group, self._calls, self._all = group, calls, forward

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(
                super().__getattr__("layer"), name
            )  # what backbones ask of their layers, such as attention_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert not self._calls or args[0] is self._calls[-1][0][0], "these layers do not follow each other"
        self._calls.append((args, kwargs))
        if self._all is None:
            return args[0]
        calls = list(self._calls)
        self._calls.clear()
        return self._all(self._group, calls)


class Documents(NamedTuple):
    """How many documents, and how long at most, a graph reads. alike: every row is one document, which another attention kernel reads."""

    count: int
    longest: int
    alike: bool


def documents_of(batch: PackedBatch) -> Documents:
    """Those of a graph that reads a batch: as few kinds as cost little, for a graph serves shorter and fewer documents as well."""
    B, T = batch.token_ids_BT.shape
    count = len(batch.starts_D) - 1
    if count * batch.longest == B * T and count == B:
        return Documents(B, T, True)
    return Documents(max(8, _power(count)), min(T, max(256, _power(batch.longest))), False)


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


# (token ids (1, T), positions (1, T), starts int32 (documents + 1,), documents, where features (1, T, F) go or None) -> features
Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents, torch.Tensor | None], torch.Tensor]


class Recorder:
    """`read` for so many tokens through CUDA graphs, one per kind of documents, recorded when it is first wanted.

    A graph is given its tensors in places that stay; beyond the last document, empty ones. Reads of several streams wait for each other.
    """

    def __init__(self, read: Read, tokens: int, device: torch.device):
        self.read, self.tokens = read, tokens
        self.graphs: dict[Documents, Body] = {}  # what replays them
        self.why_not: str | None = None
        self._graphs = Graphs(device)
        # Not filled: the streams that read are others than this one, and do not wait for it.
        self._ids, self._positions = (torch.empty(1, tokens, dtype=torch.long, device=device) for _ in range(2))
        self._starts: dict[int, torch.Tensor] = {}
        self._features: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def __call__(self, batch: PackedBatch) -> torch.Tensor | None:
        """Features (1, T, F); None where no graph can be recorded: `why_not` says why."""
        here = torch.cuda.current_stream(self._ids.device)
        if self._done is not None:
            here.wait_event(self._done)
        documents = documents_of(batch)
        if documents.count not in self._starts:
            self._starts[documents.count] = torch.zeros(documents.count + 1, dtype=torch.int32, device=self._ids.device)
        starts, given = self._starts[documents.count], len(batch.starts_D)
        self._ids.copy_(batch.token_ids_BT.view(1, -1), non_blocking=True)
        self._positions.copy_(batch.position_ids_BT.view(1, -1), non_blocking=True)
        starts[:given].copy_(batch.starts_D, non_blocking=True)
        starts[given:].fill_(self.tokens)
        if documents not in self.graphs and not self._record(documents, starts):
            return None
        self.graphs[documents]()
        assert self._features is not None
        out = self._features.clone()
        self._done = here.record_event()
        return out

    def _record(self, documents: Documents, starts: torch.Tensor) -> bool:
        arguments = self._ids, self._positions, starts, documents
        if self._features is None:
            self._features = torch.empty_like(self.read(*arguments, None))
            self.why_not = self._graphs.rehearse(lambda: self.read(*arguments, self._features))
            if self.why_not is not None:
                return False
        else:
            self.read(*arguments, None)  # what is planned at a first call is so now
        self.graphs[documents] = self._graphs.record(lambda: self.read(*arguments, self._features))
        return True
