"""Token ids -> text as they come, and stop texts found in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """One answer. `add` returns the text that a token makes final; nothing that may be the beginning of a stop text is final."""

    def __init__(self, tokenizer: Any, stop: list[str]):
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.token_ids: list[int] = []
        self.text = ""  # decoded so far
        self.given = 0  # characters of it that `add` has returned
        self.stopped = False

    def add(self, token: int) -> str:
        """Text that became final; once `stopped` is set, the last of it."""
        self.token_ids.append(token)
        came = self.decoder.step(self.tokenizer.backend_tokenizer, token)
        return self._give(came) if came else ""

    def finish(self) -> str:
        """The rest, when the answer has ended: what was held back, and bytes that are no whole character."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        last = self._give(rest) if rest else ""
        if self.stopped:
            return last
        last += self.text[self.given :]
        self.given = len(self.text)
        return last

    def _give(self, came: str) -> str:
        longest = max((len(stop) for stop in self.stop), default=0)
        search = max(0, len(self.text) - longest + 1)
        self.text += came
        found = [at for at in (self.text.find(stop, search) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, end = True, min(found)
            self.text = self.text[:end]
        else:
            end = len(self.text) - self._held()
        given, self.given = self.text[self.given : end], max(self.given, end)
        return given

    def _held(self) -> int:
        """Length of the longest end of the text with which a stop text begins."""
        lengths = (
            length
            for stop in self.stop
            for length in range(1, min(len(stop) - 1, len(self.text)) + 1)
            if self.text.endswith(stop[:length])
        )
        return max(lengths, default=0)
