"""`regenerate.mixture`: the settings of which each regenerated row draws one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_train.config.schema import RegenerateConfig
from dflash_train.config.values import check_keys, finite

KEYS = ("name", "weight", "temperature", "top_p", "top_k", "chat_template_kwargs", "extra_body")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a row's answers are sampled. name: None where the recipe has no mixture; weight: share among the settings, not normalised."""

    name: str | None
    weight: float
    temperature: float
    top_p: float
    top_k: int
    chat_template_kwargs: dict[str, Any]
    extra_body: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in KEYS}


def settings(config: RegenerateConfig) -> list[Setting]:
    """The mixture with what its entries leave out taken from the recipe; the recipe's own setting alone where there is none.

    Mappings are merged key by key. An entry without a name is called by its index. Raises ValueError for an entry that is not usable.
    """
    if not config.mixture:
        return [_setting(config, {}, "regenerate", None)]
    found = [_entry(config, entry, f"regenerate.mixture[{i}]", str(i)) for i, entry in enumerate(config.mixture)]
    names = [setting.name for setting in found]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(
            f"regenerate.mixture: the name {doubled!r} is there twice; rows are told apart by it, so rename one"
        )
    return found


def _entry(config: RegenerateConfig, entry: Any, where: str, name: str) -> Setting:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} = {entry!r}: must be a mapping such as {{weight: 1, temperature: 0.7}}")
    check_keys(entry, KEYS, where)
    return _setting(config, entry, where, str(entry.get("name", name)))


def _setting(config: RegenerateConfig, entry: dict[str, Any], where: str, name: str | None) -> Setting:
    def need(ok: bool, key: str, value: object, rule: str) -> None:
        if not ok:
            raise ValueError(f"{where}.{key} = {value}: {rule}")

    def number(key: str, default: float) -> float:
        given = entry.get(key, default)
        value = finite(given)
        need(value is not None, key, given, "must be a finite number")
        return value

    def mapping(key: str, default: dict[str, Any]) -> dict[str, Any]:
        value = entry.get(key, {})
        need(isinstance(value, dict), key, value, "must be a mapping")
        return {**default, **value}

    weight, temperature = number("weight", 1.0), number("temperature", config.temperature)
    top_p, top_k = number("top_p", config.top_p), number("top_k", config.top_k)
    need(weight > 0, "weight", weight, "must be positive; leave out a setting that no row is to draw")
    need(temperature >= 0, "temperature", temperature, "must not be negative; 0 is greedy")
    need(0 < top_p <= 1, "top_p", top_p, "must be in (0, 1]")
    need(top_k >= 0 and top_k == int(top_k), "top_k", top_k, "must be a whole number, not negative; 0 is all")
    return Setting(
        name=name,
        weight=float(weight),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=int(top_k),
        chat_template_kwargs=mapping("chat_template_kwargs", config.chat_template_kwargs),
        extra_body=mapping("extra_body", config.extra_body),
    )
