"""Online replay: a workload against live workers over HTTP, into the same report as offline."""

from __future__ import annotations

from understudy.online.content import prompt_of
from understudy.online.replay import OnlineRun, replay_online, run_online

__all__ = ["OnlineRun", "prompt_of", "replay_online", "run_online"]
