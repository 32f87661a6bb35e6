"""Load user-defined routers from `FILE.py:CLASS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.user_code import describe_user_failure, load_class

if TYPE_CHECKING:
    from understudy.router.router import Router


def load_router(place: str, field: str = "--routing") -> Router:
    """Create a router of the class in the file. ConfigError when the file or class is not usable."""
    made = load_class(field, place, ("choose(request, view)",))
    try:
        router: Router = made()
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise describe_user_failure(field, place, error) from error
    return router
