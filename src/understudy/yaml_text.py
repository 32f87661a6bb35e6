"""Read YAML settings strictly: no repeated names, 1e-3 is a number, no octal or sexagesimal numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class _Loader(yaml.SafeLoader):
    """Loader that rejects repeated names (YAML 1.1 takes the last) and reads 1e-3 as a number (YAML 1.1: text)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Read a number; reject 017 and 1:30, which YAML 1.1 reads as 15 and 90."""
    text = node.value
    if ":" in text or re.match(r"[-+]?0[0-9_]+$", text):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{text} is an octal or sexagesimal number; write it in decimal or in quotes",
            node.start_mark,
        )
    read = loader.construct_yaml_float if node.tag.endswith("float") else loader.construct_yaml_int
    return read(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _read_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _read_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """Parse YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> Any:
    """Read a YAML file in UTF-8 or UTF-16. ConfigError names the file and, if known, the line."""
    try:
        data = path.read_bytes()
        utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        return parse(data.decode("utf-16" if utf16 else "utf-8-sig"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError(f"{path}{line}: {error.problem}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: lists or settings are nested too deeply") from None
