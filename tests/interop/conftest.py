"""Only where Dynamo is installed: `make interop` sees to that, in an environment of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("dynamo") else ["test_*.py"]
