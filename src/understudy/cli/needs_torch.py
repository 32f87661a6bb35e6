"""Whether the extra [torch] is installed."""

from __future__ import annotations

from understudy.errors import ConfigError


def check_torch_is_installed() -> None:
    """Raise ConfigError if the extra [torch] is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError("the real engine needs PyTorch; pip install 'understudy[torch]'") from error
