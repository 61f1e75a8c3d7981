"""Continuous batching for one GPU: a fixed number of slots, each with its own part of a static cache; a finished answer's slot is filled
with the next prompt while the others go on.

A decoding step has static shapes and decides on the device who has finished, so it is captured as a CUDA graph and replayed a period of
`PERIOD` steps at a time. While one period runs, the host reads what the period before it finished; the GPU does not wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_train.drafter.spec import DrafterSpec
from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.padded import ends, sampling_tensors
from dflash_train.kernels.sample import sample
from dflash_train.target.varlen import NO_MASK_SHAPE, difference, enable_varlen, reference

PERIOD = 8
PREFILL_TOKENS = 16384
SMALLEST = 32
# Where prompts come one at a time they are padded to so many tokens together, so that reading them is a graph too: launched one by one from
# Python, the operations of a small target take ten times as long as they run, and every other answer waits for them.
PROMPT_SIZES = (128, 256, 512, 1024)
PROMPT_ROWS = 8


class SlotCache:
    """Keys and values of all slots, per layer (slots x length, Hkv, D); allocated by a layer's first update.

    `places` int64 (T,): where the tokens of this forward go. During a prefill the layer attends to what it just computed, later to the cache.
    """

    def __init__(self, slots: int, length: int):
        self.size = slots * length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.places: torch.Tensor = torch.empty(0, dtype=torch.long)
        self.prefill = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            self.layers[layer] = tuple(x.new_zeros(self.size, x.shape[1], x.shape[3]) for x in (key, value))
        for kept, new in zip(self.layers[layer], (key, value), strict=True):
            kept.index_copy_(0, self.places, new[0].transpose(0, 1))
        return (key, value) if self.prefill else self.layers[layer]


@dataclass
class _Occupant:
    key: int
    request: Request
    since: int  # the first period that this occupant takes part in


@dataclass
class _Snapshot:
    """What a period left behind, on its way to the host: per slot whether it is done, and where answers are streamed how many tokens it
    has said, how many of them are told already, and those that are not."""

    period: int
    flags: torch.Tensor
    news: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    event: torch.cuda.Event | None


class Slots:
    """Decodes requests of at most `length` tokens, prompt and answer together, and `max_new` of answer.

    period: steps between two looks of the host. smallest: fewest slots that a step is made for. streaming: `take_news` says what came.
    """

    ahead = 0  # places behind `length` that a step may write to
    draws = 1  # uniform draws per step at a temperature
    most_per_step = 1  # tokens of one slot
    greedy_apart = False  # whether a step in which every request is greedy has a graph of its own

    def __init__(
        self,
        model: nn.Module,
        stop_ids: set[int],
        *,
        slots: int,
        length: int,
        max_new: int,
        graphs: bool = True,
        period: int = PERIOD,
        smallest: int = SMALLEST,
        streaming: bool = False,
    ):
        self.stop_ids, self.steps_per_period, self.smallest, self.streaming = stop_ids, period, smallest, streaming
        self.model, self.length_limit, self.max_new = model, length, max_new
        self.stride = length + self.ahead
        self.device = next(model.parameters()).device
        self.slots, self.scratch = slots, slots  # the slot behind the others takes what must go nowhere
        self.use_graphs = graphs and self.device.type == "cuda"
        count = slots + 1
        new = lambda dtype, *shape: torch.zeros(count, *shape, dtype=dtype, device=self.device)  # noqa: E731
        self.token, self.length, self.count, self.limit, self.told = (new(torch.long) for _ in range(5))
        self.temperature, self.top_p, self.top_k = new(torch.float32), new(torch.float32), new(torch.long)
        self.uniform, self.out = new(torch.float32, max_new * self.draws), new(torch.int32, max_new + 1)
        self.done = torch.ones(count, dtype=torch.bool, device=self.device)
        self.endless = new(torch.bool)
        self.stop = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.device)
        self.no_mask = torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=self.device)
        self.cache = SlotCache(count, self.stride)
        self.occupants: list[_Occupant | None] = [None] * slots
        self.free = list(range(slots - 1, -1, -1))
        self.waiting: deque[tuple[int, Request]] = deque()
        self.period = 0
        self.snapshots: deque[_Snapshot] = deque()
        self.news: list[tuple[int, list[int]]] = []
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.prompt_sizes = PROMPT_SIZES if self.streaming and self.use_graphs else ()
        self.prompt_graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.use_graphs else None
        self.side, self.recording = (
            torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in range(2)
        )
        self.capture_seconds = 0.0
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + sum(occupant is not None for occupant in self.occupants)

    def submit(self, key: int, request: Request) -> None:
        assert len(request.prompt_ids) + request.max_new_tokens <= self.length_limit
        assert request.max_new_tokens <= self.max_new
        self.waiting.append((key, request))

    def cancel(self, key: int) -> bool:
        """End a request now. True if it had not begun; else `advance` still returns what it has said, as it does of all others."""
        for item in self.waiting:
            if item[0] == key:
                self.waiting.remove(item)
                return True
        for slot, occupant in enumerate(self.occupants):
            if occupant is not None and occupant.key == key:
                self.done[slot] = True
        return False

    def take_news(self) -> list[tuple[int, list[int]]]:
        """(key, tokens) said since the last call, in order; also of answers that `advance` has returned. Only with `streaming`."""
        news, self.news = self.news, []
        return news

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Decoded]]:
        """Fill free slots, start a period, and return the answers that the period before it finished; may be none yet."""
        begin = self._mark()
        self._admit()
        running = any(occupant is not None for occupant in self.occupants)
        if running:
            self._run_period()
            if begin is not None and not self.streaming:  # a server runs for weeks
                self.spans.append((begin, self._mark()))
        return self._harvest() if len(self.snapshots) > (running and begin is not None) else []

    def idle_share(self) -> float | None:
        """Share of the time since the first period in which the GPU had nothing queued."""
        if len(self.spans) < 2:
            return None
        torch.cuda.synchronize(self.device)
        busy = sum(begin.elapsed_time(end) for begin, end in self.spans)
        return max(0.0, 1 - busy / self.spans[0][0].elapsed_time(self.spans[-1][1]))

    # --- what happens on the device ---

    def _prefill(self, slots: list[int], requests: list[Request]) -> torch.Tensor:
        """Read prompts into their slots; returns the logits (rows, V) of their last tokens."""
        lengths = [len(request.prompt_ids) for request in requests]
        size = next((size for size in self.prompt_sizes if size >= sum(lengths) and len(slots) <= PROMPT_ROWS), None)
        prompts = prompt_tensors(slots, [request.prompt_ids for request in requests], self.stride)
        if size is None:
            return self._read(*self._put(*prompts), max(lengths))
        prompts = padded_prompts(prompts, size, self.scratch * self.stride, self.stride)
        if not self.use_graphs:
            return self._read(*self._put(*prompts), size)[: len(slots)]
        graph, static, logits = self._prompt_graph(size)
        for kept, new in zip(static, self._put(*prompts), strict=True):
            kept.copy_(new)
        graph.replay()
        return logits[: len(slots)]

    def _read(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        places_T: torch.Tensor,
        last_R: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Prompts laid side by side through the model; the logits (R, V) at `last_R`."""
        self.cache.places, self.cache.prefill = places_T, True
        logits = self.model(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self.no_mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=last_R,
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
            max_length_q=longest,
            max_length_k=longest,
        ).logits[0]
        self.cache.prefill = False
        return logits

    def _prompt_graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]:
        """The reading of prompts of together at most `size` tokens: graph, what it reads, and the logits that it writes."""
        if size not in self.prompt_graphs:
            nothing = prompt_tensors([], [], self.stride)
            static = self._put(*padded_prompts(nothing, size, self.scratch * self.stride, self.stride))
            graph, logits = self._recorded(lambda: self._read(*static, size))
            self.prompt_graphs[size] = graph, static, logits
        return self.prompt_graphs[size]

    def _recorded(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what `run` does, and what it returned, which every replay fills anew. It runs once before, so that what is compiled and planned at
        a first call is so then."""
        started, graph = time.monotonic(), torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.device)
        self.recording.wait_stream(here)
        with torch.cuda.stream(self.recording):
            run()
        here.wait_stream(self.recording)
        # On a stream of this GPU: left out, it is one of all of a process's graphs, on the GPU of the first of them. Other threads may pin memory meanwhile.
        with torch.cuda.graph(graph, self.pool, self.recording, capture_error_mode="thread_local"):
            made = run()
        self.capture_seconds += time.monotonic() - started
        return graph, made

    def _decode(self, slot_N: torch.Tensor) -> torch.Tensor:
        """One token of each slot through the model: logits (N, V)."""
        length_N = self.length[slot_N]
        begins_N = slot_N * self.stride
        self.cache.places = begins_N + length_N
        return self.model(
            input_ids=self.token[slot_N][None],
            position_ids=length_N[None],
            attention_mask=self.no_mask,
            past_key_values=self.cache,
            use_cache=True,
            cu_seq_lens_q=torch.arange(len(slot_N) + 1, dtype=torch.int32, device=self.device),
            cu_seq_lens_k=torch.cat([begins_N, begins_N[-1:]]).int(),
            max_length_q=1,
            max_length_k=self.stride,
            seqused_k=(length_N + 1).int(),
        ).logits[0]

    def _emit(self, slot_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
        """Choose the next token of each slot, unless it is done."""
        done_N, count_N = self.done[slot_N], self.count[slot_N]
        column_N = count_N.clamp(max=self.max_new - 1)
        next_N = sample(
            logits_NV, self.uniform[slot_N, column_N], self.temperature[slot_N], self.top_p[slot_N], self.top_k[slot_N]
        )
        next_N = torch.where(done_N, self.token[slot_N], next_N)
        self.out[slot_N, column_N] = torch.where(done_N, self.out[slot_N, column_N], next_N.int())
        count_N = count_N + ~done_N
        self.token[slot_N], self.count[slot_N] = next_N, count_N
        stopped_N = (next_N[:, None] == self.stop).any(-1) & ~self.endless[slot_N]
        self.done[slot_N] = done_N | stopped_N | (count_N >= self.limit[slot_N])

    def _step(self, slot_N: torch.Tensor, sampled: bool) -> None:
        """One step of these slots; sampled: some of them may have a temperature."""
        logits_NV = self._decode(slot_N)
        self.length[slot_N] = self.length[slot_N] + ~self.done[slot_N]
        self._emit(slot_N, logits_NV)

    # --- what the host decides ---

    def _put(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies on the device that do not wait for what is queued there."""
        if self.device.type != "cuda":
            return list(tensors)
        return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _admit(self) -> None:
        while self.waiting and self.free:
            slots: list[int] = []
            requests: list[Request] = []
            tokens = 0
            while self.waiting and self.free:
                key, request = self.waiting[0]
                if requests and tokens + len(request.prompt_ids) > PREFILL_TOKENS:
                    break
                self.waiting.popleft()
                slot = self.free.pop()
                self.occupants[slot] = _Occupant(key, request, self.period)
                slots.append(slot)
                requests.append(request)
                tokens += len(request.prompt_ids)
            self._seat(slots, requests)

    def _seat(self, slots: list[int], requests: list[Request]) -> None:
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        limits = torch.tensor([request.max_new_tokens for request in requests])
        endless = torch.tensor([request.ignore_eos for request in requests])
        sampling = sampling_tensors(requests, torch.device("cpu"))
        slot_N, length_N, limit_N, endless_N, temperature_N, top_p_N, top_k_N = self._put(
            torch.tensor(slots), lengths, limits, endless, *sampling
        )
        logits_NV = self._prefill(slots, requests)
        self._clear(slot_N)
        self.length[slot_N], self.limit[slot_N], self.endless[slot_N] = length_N, limit_N, endless_N
        self.temperature[slot_N], self.top_p[slot_N], self.top_k[slot_N] = temperature_N, top_p_N, top_k_N
        self.count[slot_N], self.told[slot_N], self.done[slot_N] = 0, 0, False
        if any(request.temperature > 0 for request in requests):
            (self.uniform[slot_N],) = self._put(self._draws_of(requests))
        self._emit(slot_N, logits_NV)

    def _draws_of(self, requests: list[Request]) -> torch.Tensor:
        draws = torch.zeros(len(requests), self.max_new * self.draws)
        for row, request in zip(draws, requests, strict=True):
            if request.temperature > 0:
                count = request.max_new_tokens * self.draws
                row[:count] = torch.rand(count, generator=torch.Generator().manual_seed(request.seed))
        return draws

    def _clear(self, slot_N: torch.Tensor) -> None:
        """Reset what a variant keeps per slot."""

    def _sizes(self) -> list[int]:
        """Numbers of slots that a step is made for, falling: all, half of them, and so on."""
        sizes = [self.slots]
        while sizes[-1] // 2 >= self.smallest:
            sizes.append(sizes[-1] // 2)
        return sizes

    @torch.inference_mode()
    def warm_up(self, sampled: bool = False) -> None:
        """Capture all graphs now, for greedy requests or for others."""
        for size in self._sizes() if self.use_graphs else []:
            self._graph(size, sampled)
        for size in reversed(self.prompt_sizes if self.use_graphs else ()):
            self._prompt_graph(size)

    def _run_period(self) -> None:
        taken = [slot for slot, occupant in enumerate(self.occupants) if occupant is not None]
        sampled = any(occupant is not None and occupant.request.temperature > 0 for occupant in self.occupants)
        size = next(size for size in reversed(self._sizes()) if size >= len(taken))
        chosen = torch.tensor(taken + [self.scratch] * (size - len(taken)))
        (slot_N,) = self._put(chosen)
        if self.use_graphs:
            graph, static_N = self._graph(size, sampled)
            static_N.copy_(slot_N, non_blocking=True)
            for _ in range(self.steps_per_period):
                graph.replay()
        else:
            for _ in range(self.steps_per_period):
                self._step(slot_N, sampled)
        flags, news = self._to_host(self.done), self._not_told() if self.streaming else None
        self.snapshots.append(_Snapshot(self.period, flags, news, self._mark()))
        self.period += 1

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of every slot's values that is there once an event behind it has come."""
        copy = torch.empty(self.slots, *values.shape[1:], dtype=values.dtype, pin_memory=self.device.type == "cuda")
        return copy.copy_(values[: self.slots], non_blocking=True)

    def _not_told(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        most = self.steps_per_period * self.most_per_step + 1  # and the token that the prompt gave
        columns = (self.told[:, None] + torch.arange(most, device=self.device)).clamp(max=self.max_new)
        news = tuple(self._to_host(x) for x in (self.told, self.count, self.out.gather(1, columns)))
        self.told.copy_(self.count)
        return news

    def _graph(self, size: int, sampled: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The step for so many slots, captured when it is first wanted."""
        sampled = sampled or not self.greedy_apart
        if (size, sampled) not in self.graphs:
            static_N = torch.full((size,), self.scratch, dtype=torch.long, device=self.device)
            # on the scratch slot, which is done: nothing changes
            graph, _ = self._recorded(lambda: self._step(static_N, sampled))
            self.graphs[size, sampled] = graph, static_N
        return self.graphs[size, sampled]

    def _harvest(self) -> list[tuple[int, Decoded]]:
        if not self.snapshots:
            return []
        snapshot = self.snapshots.popleft()
        if snapshot.event is not None:
            snapshot.event.synchronize()
        theirs = {
            slot: occupant
            for slot, occupant in enumerate(self.occupants)
            if occupant is not None and occupant.since <= snapshot.period
        }
        if snapshot.news is not None:
            told, count, tokens = (x.tolist() for x in snapshot.news)
            self.news += [
                (occupant.key, tokens[slot][: count[slot] - told[slot]])
                for slot, occupant in theirs.items()
                if count[slot] > told[slot]
            ]
        finished = [slot for slot in snapshot.flags.nonzero()[:, 0].tolist() if slot in theirs]
        if not finished:
            return []
        columns = self._fetch(finished, snapshot.event)
        answers = []
        for slot, *values in zip(finished, *columns, strict=True):
            self.occupants[slot] = None
            self.free.append(slot)
            answers.append((theirs[slot].key, self._decoded(theirs[slot].request, *values)))
        return answers

    def _results(self) -> tuple[torch.Tensor, ...]:
        """Per slot, what `_decoded` is given."""
        return self.out, self.count

    def _decoded(self, request: Request, ids: list[int], count: int) -> Decoded:
        return Decoded(ids[:count], "stop" if ends(request, ids[count - 1], self.stop_ids) else "length")

    def _fetch(self, slots: list[int], event: torch.cuda.Event | None) -> list[list[Any]]:
        """Results of slots that are done; their state does not change any more, so another stream may read it."""
        if self.side is None:
            index = torch.tensor(slots)
            return [result[index].tolist() for result in self._results()]
        with torch.cuda.stream(self.side):
            self.side.wait_event(event)
            index = torch.tensor(slots).pin_memory().to(self.device, non_blocking=True)
            return [result.cpu().tolist() for result in [result[index] for result in self._results()]]


def prompt_tensors(slots: list[int], prompts: list[list[int]], stride: int) -> list[torch.Tensor]:
    """On the host: ids, positions and places (T,) of prompts side by side, where each one's last token stands (rows,), and int32 (rows + 1,)
    where each begins."""
    lengths = torch.tensor([len(ids) for ids in prompts], dtype=torch.long)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.tensor([token for ids in prompts for token in ids], dtype=torch.long)
    positions = torch.arange(len(ids)) - ends[:-1].repeat_interleave(lengths)
    base = torch.tensor(slots, dtype=torch.long).repeat_interleave(lengths) * stride
    return [ids, positions, base + positions, ends[1:] - 1, ends.int()]


def padded_prompts(prompts: list[torch.Tensor], size: int, scratch: int, stride: int) -> list[torch.Tensor]:
    """`prompt_tensors` made up to `size` tokens and PROMPT_ROWS rows by empty prompts and one of zeros, which goes to the `stride` places from `scratch` on."""
    ids, positions, places, last, starts = prompts
    rest, missing = torch.arange(size - len(ids)), PROMPT_ROWS - len(last)
    return [
        torch.cat([ids, torch.zeros_like(rest)]),
        torch.cat([positions, rest % stride]),
        torch.cat([places, scratch + rest % stride]),
        torch.cat([last, last.new_zeros(missing)]),
        torch.cat([starts, starts[-1:].expand(missing), starts.new_full((1,), size)]),
    ]


def cache_bytes_per_token(model: nn.Module) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([[0]], device=device), use_cache=True).past_key_values
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def slots_that_fit(model: nn.Module, length: int, draft: DrafterSpec | None = None) -> int:
    """How many slots of `length` tokens the free memory holds, a fifth of it left for everything else; the drafter's cache counted too."""
    per_token = cache_bytes_per_token(model)
    if draft is not None:
        per_token += 4 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim
    torch.cuda.empty_cache()  # what stays reserved is that of graphs, which nothing else can have
    free, _ = torch.cuda.mem_get_info()
    return int(0.8 * free / (per_token * length)) - 1


def why_no_slots(model: nn.Module) -> str | None:
    """Make a target ready for slots, and check the numbers that they give against its ordinary forward; else why it cannot be decoded in them."""
    why_not = enable_varlen(model)
    if why_not is not None:
        return why_not
    try:
        off, allowed = difference_from_plain(model, model.get_input_embeddings().num_embeddings)
        cache_bytes_per_token(model)
    except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        why_not = f"this target does not run in them ({type(error).__name__}: {str(error).splitlines()[0]})"
    else:
        if off < allowed:
            return None
        why_not = f"their logits differ from the ordinary forward's by {off:.1e}, more than {allowed:.1e}"
    model.set_attn_implementation("sdpa")
    return why_not


@torch.inference_mode()
def difference_from_plain(model: nn.Module, vocab_size: int) -> tuple[float, float]:
    """(largest relative difference between the logits of slots and of the model's ordinary forward, after prompts of several lengths and after
    one more token; what rounding may make)."""
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab_size, (length,), generator=random).tolist() for length in (5, 33, 18)]
    requests = [Request(messages=[], prompt_ids=ids[:-1], max_new_tokens=2, seed=0) for ids in prompts]
    slots = Slots(model, set(), slots=len(prompts), length=64, max_new=2, graphs=False)
    order = list(range(len(prompts)))
    after_prompt = slots._prefill(order, requests)
    index = torch.tensor(order, device=slots.device)
    slots.token[index] = torch.tensor([ids[-1] for ids in prompts], device=slots.device)
    slots.length[index] = torch.tensor([len(ids) - 1 for ids in prompts], device=slots.device)
    after_token = slots._decode(index)

    def plain() -> torch.Tensor:
        asked = (torch.tensor([ids], device=slots.device) for ids in prompts)
        return torch.cat([model(input_ids=ids, use_cache=False).logits[0, -2:] for ids in asked]).float()

    wanted, allowed = reference(plain)
    found = torch.stack([after_prompt, after_token], 1).flatten(0, 1).float()
    return difference(found, wanted), allowed
