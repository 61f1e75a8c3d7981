"""What a data set is to training, in one small file: hashes of all that decides it, counts of what came out.

Inspection writes it, training writes it into its folder; `data.certificate` makes training refuse any other data.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_train import __version__, disk
from dflash_train.config.schema import DataConfig
from dflash_train.config.values import parse_json
from dflash_train.data.chat import mask_strategy
from dflash_train.data.corpus import Corpus
from dflash_train.data.files import file_hash, locate, names_within
from dflash_train.data.prepare import located_sources
from dflash_train.data.template import tokenizer_hash

CERTIFICATE = "certificate.json"  # its name in a run's folder
# What must be the same for the data to be the same. The rest is counted from it, or says who counted.
COMPARED = ("template", "tokenizer", "chat_template_kwargs", "strategy", "settings", "files", "fingerprint")


@dataclass(kw_only=True)
class Certificate:
    """A data set as training sees it.

    template, tokenizer: 16 hex digits each; files: {name, sha256} in order (sha256 is null for a Hub data set, whose rows only the
    fingerprint covers); rows: in the files, of which `kept`, the rest `dropped` by reason; documents: what `kept` became;
    fingerprint: of the documents' ids, tokens and masks, in order; ratio: supervised / tokens; digest: over all of the above.
    """

    template: str
    tokenizer: str
    chat_template_kwargs: dict[str, Any]
    strategy: str
    settings: dict[str, Any]
    files: list[dict[str, Any]]
    fingerprint: str
    rows: int
    kept: int
    dropped: dict[str, int]
    notes: dict[str, int]
    documents: int
    tokens: int
    supervised: int
    ratio: float
    mask_token_id: int | None
    mask_token_occurrences: int | None
    versions: dict[str, str]
    digest: str = ""

    def line(self) -> str:
        """For a log."""
        return (
            f"data certificate {self.digest}: {self.kept} of {self.rows} rows, {self.documents} documents, {self.tokens} tokens, "
            f"{self.ratio:.1%} supervised; template text {self.template}, tokenizer {self.tokenizer}"
        )


def certify(data: DataConfig, tokenizer: Any, corpus: Corpus, mask_token_id: int | None) -> Certificate:
    """The certificate of `data.train`, which became `corpus`."""
    kept, tokens, supervised = corpus.kept, int(corpus.lengths.sum()), int(corpus.supervised_counts.sum())
    certificate = Certificate(
        template=_short(tokenizer.chat_template),
        tokenizer=tokenizer_hash(tokenizer),
        chat_template_kwargs=dict(data.chat_template_kwargs),
        strategy=mask_strategy(tokenizer, kept),
        settings={
            "max_length": data.max_length,
            "reasoning_rows": data.reasoning_rows.value,
            "long_documents": data.long_documents.value,
            "window_overlap": data.window_overlap,
            "drop_truncated": data.drop_truncated,
            "limit": data.limit,
        },
        files=[record for entry in data.train for record in file_hashes(entry)],
        fingerprint=corpus.fingerprint,
        rows=kept.total,
        kept=kept.kept,
        dropped=dict(kept.dropped),
        notes=dict(kept.notes),
        documents=len(corpus),
        tokens=tokens,
        supervised=supervised,
        ratio=round(supervised / max(1, tokens), 6),
        mask_token_id=mask_token_id,
        mask_token_occurrences=None if mask_token_id is None else corpus.occurrences(mask_token_id)[0],
        versions={
            "python": platform.python_version(),
            "dflash-train": __version__,
            **{name: version(name) for name in ("transformers", "tokenizers")},
        },
    )
    certificate.digest = digest_of(certificate)
    return certificate


def digest_of(certificate: Certificate) -> str:
    """16 hex digits over every other field."""
    return _short({key: value for key, value in asdict(certificate).items() if key != "digest"})


def file_hashes(entry: Any) -> list[dict[str, Any]]:
    """{name, sha256} of the files that an entry of `data.train` is read from, with its weight and domain where it has them."""
    (source,) = located_sources([entry], "train")
    located = locate(source.path)
    extra = {} if source.weight == 1 else {"weight": source.weight}
    extra |= {} if source.domain is None else {"domain": source.domain}
    # Of a path only what is inside the entry: the rest may be private, and the same file may lie elsewhere.
    return [
        {"name": name or path.name, "sha256": file_hash(path), **extra}
        for name, path in zip(names_within(located), located.files, strict=True)
    ] or [{"name": located.entry, "sha256": None, **extra}]


def write_certificate(certificate: Certificate, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, [(json.dumps(asdict(certificate), indent=2, ensure_ascii=False) + "\n").encode()])


def read_certificate(path: Path) -> Certificate:
    """Raises ValueError for a file that is none, or that was changed since it was written."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Certificate)}
        if not isinstance(content, dict) or set(content) != known:
            raise ValueError(f"its fields are not {', '.join(sorted(known))}")
        certificate = Certificate(**content)
    except FileNotFoundError:
        raise ValueError(f"data.certificate = {path}: no such file; data_prep/inspect_data.py writes one") from None
    except ValueError as error:
        raise ValueError(
            f"data.certificate = {path}: is no certificate ({error}); write it again with inspect_data.py"
        ) from None
    if digest_of(certificate) != certificate.digest:
        raise ValueError(
            f"data.certificate = {path}: digest is {certificate.digest}, its content has {digest_of(certificate)}: it was changed after it "
            "was written; write it again with data_prep/inspect_data.py"
        )
    return certificate


def differences(certified: Certificate, found: Certificate) -> list[str]:
    """`field: certified value, value now` of each field that decides what the data are."""
    lines = []
    for field in COMPARED:
        old, new = (_comparable(getattr(c, field)) for c in (certified, found))
        if old != new:
            lines.append(f"{field}: certified {_differing(old, new)}, now {_differing(new, old)}")
    return lines


def check_certificate(path: str, found: Certificate) -> None:
    """Raise ValueError when the data are not those that the certificate at `path` certifies."""
    certified = read_certificate(Path(path))
    different = differences(certified, found)
    if different:
        raise ValueError(
            f"data.certificate = {path}: the data of this run are not what it certifies\n  "
            + "\n  ".join(different)
            + f"\nwritten by {certified.versions}, read by {found.versions}. Take the change back, or look at the data again and write "
            "another certificate (data_prep/inspect_data.py --certificate FILE)"
        )


def _comparable(value: Any) -> Any:
    """Files are compared by content and order; a renamed file is the same data."""
    if isinstance(value, list):
        return [{k: v for k, v in item.items() if k != "name" or not item["sha256"]} for item in value]
    return value


def _differing(value: Any, other: Any) -> str:
    """Of a mapping only the entries that `other` has otherwise."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {k: v for k, v in value.items() if k not in other or other[k] != v}
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _short(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
