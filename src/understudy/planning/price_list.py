"""Prices of GPUs: from a file, from flags, or the list that is assumed without either."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.timing.gpus import find_gpu
from understudy.yaml_text import read_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ASSUMED = {
    "A100": 1.8,
    "L40S": 1.2,
    "H100": 2.5,
    "H20": 1.8,
    "H200": 3.5,
    "GH200": 3.0,
    "B200": 6.0,
    "B300": 7.5,
    "GB200": 7.0,
    "MI300X": 3.0,
}
"""Dollars per GPU and hour, rounded from public lists of rented GPUs; used where no price is given, and named so."""


class PriceList(msgspec.Struct, frozen=True):
    """Dollars per hour by the name of a GPU, and the names whose price is assumed."""

    by_name: dict[str, float]
    assumed: tuple[str, ...] = ()

    @classmethod
    def read(cls, gpus: Sequence[str], path: Path | None, texts: Sequence[str]) -> PriceList:
        """Return the prices of `gpus`: of `NAME=PRICE` texts, else of the file, else assumed.

        The file is YAML or JSON: `H100: 2.5`. ConfigError names a GPU without a price, and a wrong price.
        """
        listed = {} if path is None else _read_file(path)
        given = dict(_parse(text) for text in texts)
        prices: dict[str, float] = {}
        assumed = []
        for name in gpus:
            price = given.get(name, listed.get(name, given.get("", listed.get(""))))
            if price is None and name in ASSUMED and path is None:
                price = ASSUMED[name]
                assumed.append(name)
            if price is None:
                where = f"{path}" if path is not None else "--gpu-hour"
                raise ConfigError(
                    f"{where}: no price of {name}; give it, such as {name}: 2.5 ($ per GPU hour)"
                )
            prices[name] = price
        return cls(prices, tuple(assumed))

    def describe_assumed(self) -> str:
        """Return a note on prices that nothing gave; empty if all were given."""
        if not self.assumed:
            return ""
        listed = ", ".join(f"{name} ${self.by_name[name]:g}" for name in self.assumed)
        return f"prices per GPU hour are assumed ({listed}); give yours with --price FILE or --gpu-hour NAME=PRICE"


def _read_file(path: Path) -> dict[str, float]:
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: no prices by name; write a line per GPU, such as H100: 2.5")
    return dict(_check(str(name), value, str(path)) for name, value in content.items())


def _parse(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    return _check(name, price, f"--gpu-hour {text}")


def _check(name: str, price: object, where: str) -> tuple[str, float]:
    is_number = isinstance(price, int | float) and not isinstance(price, bool)
    value = float(price) if isinstance(price, int | float) and is_number else math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{where}: {name or 'all GPUs'}: no positive price, got {price!r}; write it as H200: 3.5"
        )
    return (find_gpu(name).name if name else ""), value
