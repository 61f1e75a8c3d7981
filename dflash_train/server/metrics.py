"""What the server counts, under vLLM's names, so that whatever reads vLLM's /metrics reads these."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dflash_train.generation.base import Decoded

FIRST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """Counts of one server. draft_length: tokens drafted per verification, 0 without a drafter (and then without its counts)."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model: str, draft_length: int):
        disable_created_metrics()
        self.registry, self.draft_length = CollectorRegistry(), draft_length
        labels = {"model_name": model, "engine": "0"}

        def made(kind: type, name: str, text: str, more: tuple[str, ...] = (), **options: object):
            metric = kind(f"vllm:{name}", text, [*labels, *more], registry=self.registry, **options)
            return (
                metric.labels(*labels.values())
                if not more
                else lambda *values: metric.labels(*labels.values(), *values)
            )

        self.running = made(Gauge, "num_requests_running", "Requests that are decoded.")
        self.waiting = made(Gauge, "num_requests_waiting", "Requests that wait for a slot.")
        self.prompt = made(Counter, "prompt_tokens", "Tokens of prompts.")
        self.generated = made(Counter, "generation_tokens", "Tokens of answers.")
        ended = made(Counter, "request_success", "Answered requests.", ("finished_reason",))
        self.ended = {reason: ended(reason) for reason in ("stop", "length", "abort")}
        self.first = made(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=FIRST)
        # As in vLLM one value per delivery, which with a drafter brings several tokens.
        self.between = made(Histogram, "inter_token_latency_seconds", "Between two deliveries.", buckets=BETWEEN)
        self.whole = made(Histogram, "e2e_request_latency_seconds", "From arrival to the last token.", buckets=WHOLE)
        if draft_length:
            self.drafts = made(Counter, "spec_decode_num_drafts", "Verifications.")
            self.drafted = made(Counter, "spec_decode_num_draft_tokens", "Drafted tokens.")
            self.accepted = made(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
            at = made(
                Counter,
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens by their place in the draft.",
                ("position",),
            )
            self.accepted_at = [at(str(position)) for position in range(draft_length)]

    def add_rounds(self, decoded: Decoded, drafted: int) -> None:
        """Count the verifications of an answer, whoever ended it."""
        if not self.draft_length:
            return
        self.drafts.inc(len(decoded.rounds))
        self.drafted.inc(drafted)
        self.accepted.inc(sum(decoded.accepted))
        for position, counter in enumerate(self.accepted_at):
            counter.inc(sum(accepted > position for accepted in decoded.accepted))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def drafted_tokens(decoded: Decoded, draft_length: int, max_new_tokens: int) -> int:
    """How many tokens were drafted for an answer: a block never reaches past the token budget."""
    said, drafted = 1, 0
    for gained in decoded.rounds:
        drafted += min(draft_length, max_new_tokens - said)
        said += gained
    return drafted
