"""YAML as settings are written in: a name once, 1e-3 is a number, and no number means another than it looks like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes the last of two equal names, and 1e-3 for text; here one is an error, the other a number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """YAML 1.1 reads 017 as 15 and 1:30 as 90: neither is what anybody meant."""
    text = node.value
    if ":" in text or re.match(r"[-+]?0[0-9_]+$", text):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{text} is an octal or sexagesimal number: write it in decimal, or in quotes",
            node.start_mark,
        )
    read = loader.construct_yaml_float if node.tag.endswith("float") else loader.construct_yaml_int
    return read(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """The value that the text stands for. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> Any:
    """The value of a file, UTF-8 or UTF-16. ConfigError names the file and, where it can, the line."""
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
