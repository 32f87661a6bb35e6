"""What happens to the KV of a session between two of its requests: settings, built-in policies, and a hook."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from understudy.checks import read_as
from understudy.errors import ConfigError, PolicyError, UnderstudyError
from understudy.user_code import describe_user_failure, load_class, names_file_and_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import PrefixTotals, SessionSleep
    from understudy.run.live_sleep import LiveSleep

    Sleep = SessionSleep | LiveSleep

ACTIONS = ("hold", "unhold", "drop", "offload", "prefetch")
"""hold: evict none of its cached blocks; unhold: end that; drop: end it, and forget blocks that no other request uses;
offload: copy what the host lacks; prefetch: load what lower tiers have."""
LONGEST_PREDICTION_S = 3600.0
"""A session that sleeps longer is not predicted any more."""


class Keep(NamedTuple):
    """Answer of a session policy."""

    actions: Sequence[str] = ()
    """What to do now, in this order: names of `ACTIONS`."""
    again_s: float | None = None
    """Ask again so much later, if the session still sleeps; None: not."""


class SessionPolicy(Protocol):
    """Decides on the KV of sessions that sleep: between an answer and the session's next request.

    A run makes one object. It calls `on_sleep` when a request of a session has ended (`sleep.asleep_ns` is 0), and as
    often as an answer asks for. A live server also calls `forget(session)`, if there is one, when a session is over.
    """

    def on_sleep(self, sleep: Sleep) -> Keep:
        """Return what to do now, and when to ask again."""


class SessionKv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policies for the KV of sleeping sessions; each is off unless it is set.

    Errors: ConfigError names a field out of range.

    Example:
        us.replay("agents.jsonl", session_kv=SessionKv(hold_s=60, release="end"))
    """

    hold_s: float = 0.0
    """Evict no block of a session for so long after each answer. Held blocks yield to requests that lack room."""
    release: Literal["no", "end"] = "no"
    """end: forget the blocks of a session when its client ends it, apart from those that were there before it."""
    release_after_s: float | None = None
    """Forget them after so much sleep, too."""
    offload_after_s: float | None = None
    """Copy the blocks of a session to the host after so much sleep (0: at once), and from there to lower tiers."""
    prefetch: Literal["no", "predicted", "told"] = "no"
    """Load the blocks of a session from lower tiers before its next request: at the time that its earlier gaps predict,
    or that its client tells."""
    prefetch_lead_s: float = 1.0
    """How long before that time."""
    client_hold_s: float = 0.0
    """Longest hold that clients of a live server may ask for with a request; 0: none. It replaces `hold_s` there."""
    policy: Any = None
    """`FILE.py:CLASS`, or a class (or another callable without arguments) that returns a `SessionPolicy`."""

    def __post_init__(self) -> None:
        for name in ("hold_s", "release_after_s", "offload_after_s", "prefetch_lead_s", "client_hold_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1e9:
                raise ConfigError(f"session_kv: {name} must be a time in seconds, from 0 to 1e9, got {value}")
        if self.policy is not None:
            others = [name for name in self.__struct_fields__ if name != "policy" and self._is_set(name)]
            if others:
                raise ConfigError(
                    f"session_kv: {others[0]} is for the built-in policies; leave it or policy out"
                )
            if not isinstance(self.policy, str) and not callable(self.policy):
                raise ConfigError(
                    f"session_kv: policy must be FILE.py:CLASS or a class with on_sleep(sleep), got {self.policy!r}"
                )
        elif not any(self._is_set(name) for name in self.__struct_fields__ if name != "prefetch_lead_s"):
            raise ConfigError(
                "session_kv: nothing is set; give hold_s, release, release_after_s, offload_after_s, prefetch, "
                "client_hold_s or policy"
            )
        if self.release_after_s is not None and 0 < self.release_after_s < self.hold_s:
            raise ConfigError(
                f"session_kv: release_after_s {self.release_after_s:g} is within hold_s {self.hold_s:g}; raise it"
            )
        if self._is_set("prefetch_lead_s") and self.prefetch == "no":
            raise ConfigError("session_kv: prefetch_lead_s has no effect without prefetch; give prefetch too")

    def _is_set(self, name: str) -> bool:
        usual = dict(zip(self.__struct_fields__[::-1], self.__struct_defaults__[::-1], strict=False))
        return bool(getattr(self, name) != usual[name])

    @classmethod
    def read(cls, text: str, *, flag: str = "--session-kv") -> SessionKv:
        """Read `SETTING=VALUE,…` or `FILE.py:CLASS`. ConfigError names a wrong setting."""
        if names_file_and_class(text):
            return cls(policy=text)
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, separator, value = part.partition("=")
            if not separator or not name or not value:
                raise ConfigError(f"{flag}: {part!r} is no SETTING=VALUE, such as hold_s=60")
            if name in given:
                raise ConfigError(f"{flag}: {name} is given twice; give one")
            given[name] = _read_value(flag, name, value)
        return read_as(cls, given)

    def require_tier(self, *, has_tier: bool) -> None:
        """Check that blocks have a tier to go to. ConfigError names the setting without one."""
        if self.needs_tiers and not has_tier:
            name = "prefetch" if self.prefetch != "no" else "offload_after_s"
            raise ConfigError(f"session_kv: {name} needs a tier below the GPU; add g2 (--g2)")

    @property
    def needs_tiers(self) -> bool:
        """Whether blocks go to lower tiers, or come from there."""
        return self.offload_after_s is not None or self.prefetch != "no"

    @property
    def name(self) -> str:
        """Name of the policy in messages."""
        return self.policy if isinstance(self.policy, str) else getattr(self.policy, "__qualname__", "policy")

    def make(self) -> SessionPolicy:
        """Make the policy of one run. ConfigError where a user-defined class has no `on_sleep`."""
        if self.policy is None:
            return TimedPolicy(self)
        made = self.policy
        if isinstance(made, str):
            if not names_file_and_class(made):
                raise ConfigError(f"session_kv: policy {made!r} is not known; give FILE.py:CLASS")
            made = load_class("session_kv", made, ["on_sleep(sleep)"])
        try:
            policy = made()
        except Exception as error:  # user-defined code may raise anything
            raise describe_user_failure("session_kv", self.name, error) from error
        if not callable(getattr(policy, "on_sleep", None)):
            raise ConfigError(f"session_kv: {self.name} has no method on_sleep(sleep)")
        found: SessionPolicy = policy
        return found

    def describe(self) -> dict[str, Any]:
        """Return the settings that are set, as plain values."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if self._is_set(name)}
        return {name: self.name if name == "policy" else value for name, value in given.items()}


def _read_value(flag: str, name: str, value: str) -> float | str:
    if not name.endswith("_s"):
        return value
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{flag}: {name} must be a number of seconds, got {value!r}") from None


class GapPredictor:
    """Predicts how long a session sleeps: the median of its own gaps, or else of all sessions' gaps."""

    LEAST_OWN = 3
    LEAST = 8

    def __init__(self) -> None:
        self._own: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=16))
        self._all: deque[float] = deque(maxlen=256)

    def learn(self, session: int, gap_s: float) -> None:
        """Add a gap that has ended."""
        self._own[session].append(gap_s)
        self._all.append(gap_s)

    def forget(self, session: int) -> None:
        """Forget a session's own gaps."""
        self._own.pop(session, None)

    def predict_s(self, session: int, asleep_s: float) -> float | None:
        """Return the expected whole gap of a session that has slept so long; None: unknown.

        A session that has slept past its prediction is expected to sleep as long again.
        """
        known = self._own.get(session, ())
        if len(known) < self.LEAST_OWN:
            known = self._all
            if len(known) < self.LEAST:
                return None
        expected = float(median(known))
        while expected <= asleep_s:
            expected = max(2 * expected, 1e-3)
        return expected if expected <= LONGEST_PREDICTION_S else None


class TimedPolicy:
    """The built-in policies: actions at times after an answer."""

    def __init__(self, settings: SessionKv) -> None:
        self._settings = settings
        self._gaps = GapPredictor()
        self._due: dict[int, list[tuple[float, str]]] = {}

    def on_sleep(self, sleep: Sleep) -> Keep:
        """Do what is due, and return at the next time."""
        asleep_s = sleep.asleep_ns / 1e9
        if sleep.asleep_ns == 0:
            if sleep.last_gap_ns is not None:
                self._gaps.learn(sleep.session, sleep.last_gap_ns / 1e9)
            self._due[sleep.session] = self._plan(sleep)
        due = self._due.get(sleep.session, [])
        now = [action for time_s, action in due if time_s <= asleep_s + 1e-9]
        later = [(time_s, action) for time_s, action in due if time_s > asleep_s + 1e-9]
        if "prefetch" in now and self._settings.prefetch == "predicted":
            # Above the prediction that has just come true, whatever the sum was rounded to.
            later += self._predict(sleep.session, asleep_s + self._settings.prefetch_lead_s + 1e-9)
        self._due[sleep.session] = later
        if not later:
            self._due.pop(sleep.session)
            return Keep(now)
        return Keep(now, min(time_s for time_s, _ in later) - asleep_s)

    def forget(self, session: int) -> None:
        """Forget a session that is over."""
        self._due.pop(session, None)
        self._gaps.forget(session)

    def _plan(self, sleep: Sleep) -> list[tuple[float, str]]:
        settings = self._settings
        if sleep.is_last and settings.release == "end":
            return [(0.0, "drop")]
        due = []
        hold_ns: int | None = getattr(sleep, "hold_ns", None)  # clients of a replay ask for nothing
        hold_s = settings.hold_s if hold_ns is None else hold_ns / 1e9
        if hold_s > 0:
            due += [(0.0, "hold"), (hold_s, "unhold")]
        if settings.offload_after_s is not None:
            due.append((settings.offload_after_s, "offload"))
        release_ns: int | None = getattr(sleep, "release_ns", None)
        release_s = settings.release_after_s if release_ns is None else release_ns / 1e9
        if release_s is not None:
            due.append((release_s, "drop"))
        if settings.prefetch == "told" and sleep.told_ns is not None:
            at_s = sleep.told_ns / 1e9 - settings.prefetch_lead_s
            if at_s > 0:
                due.append((at_s, "prefetch"))
        elif settings.prefetch == "predicted":
            due += self._predict(sleep.session, settings.prefetch_lead_s)
        return due

    def _predict(self, session: int, past_s: float) -> list[tuple[float, str]]:
        """Return the next prefetch of a session that will not return before `past_s`."""
        expected_s = self._gaps.predict_s(session, past_s)
        return [] if expected_s is None else [(expected_s - self._settings.prefetch_lead_s, "prefetch")]


class SessionDriver:
    """Calls the policy of one run, and checks its answers."""

    def __init__(self, settings: SessionKv) -> None:
        self._settings = settings
        self._policy = settings.make()
        self._forget = getattr(self._policy, "forget", None)

    def forget(self, session: int) -> None:
        """Tell the policy that a session is over, if it wants to know."""
        if self._forget is not None:
            self._forget(session)

    def on_sleep(self, sleep: Sleep) -> tuple[list[str], int | None]:
        """Return the actions, and the time after which to ask again in ns. PolicyError for an invalid answer."""
        try:
            answer = self._policy.on_sleep(sleep)
        except UnderstudyError:
            raise
        except Exception as error:  # user-defined code may raise anything
            raise describe_user_failure("session_kv", self._settings.name, error) from error
        if not isinstance(answer, tuple) or len(answer) != 2 or isinstance(answer[0], str):
            raise PolicyError(f"session_kv: on_sleep must return Keep(actions, again_s), got {answer!r}")
        actions, again_s = answer
        unknown = [action for action in actions if action not in ACTIONS]
        if unknown:
            raise PolicyError(f"session_kv: {unknown[0]!r} is no action; known are {', '.join(ACTIONS)}")
        if again_s is None:
            return list(actions), None
        if not math.isfinite(again_s) or again_s <= 0:
            raise PolicyError(f"session_kv: again_s must be above 0, or None, got {again_s!r}")
        return list(actions), max(1, round(again_s * 1e9))


def describe_totals(totals: PrefixTotals) -> dict[str, float]:
    """Return what engines did for sleeping sessions, in numbers."""
    return {
        "holds": totals.holds,
        "yielded_holds": totals.yielded_holds,
        "held_blocks": totals.held_blocks,
        "peak_held_blocks": totals.peak_held_blocks,
        "held_block_s": totals.held_block_s,
        "drops": totals.drops,
        "dropped_blocks": totals.dropped_blocks,
        "offloads": totals.offloads,
        "offloaded_blocks": totals.offloaded_blocks,
        "prefetches": totals.prefetches,
        "prefetched_blocks": totals.prefetched_blocks,
    }
