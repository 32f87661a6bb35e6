// Plays in lanes and the KV of sleeping sessions, in Python: limits, what a policy sees, and what was done.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "bindings.hpp"
#include "fields.hpp"
#include "replay/play_limits.hpp"
#include "replay/session_keeper.hpp"

namespace understudy {

void bind_sessions(nb::module_& m);  // replay.cpp

void bind_sessions(nb::module_& m) {
  nb::class_<PlayLimits> limits(m, "PlayLimits",
                                "Which plays prepare, for how long the others run, and their idle time.");
  Fields<PlayLimits>()
      .add("preparing_plays", &PlayLimits::preparing_plays)
      .add("duration_ns", &PlayLimits::duration_ns, std::uint64_t{1} << 61)
      .add("grace_ns", &PlayLimits::grace_ns, std::uint64_t{1} << 61)
      .add("play_idle_ns", &PlayLimits::play_idle_ns, std::uint64_t{1} << 61)
      .add("fleet_idle_ns", &PlayLimits::fleet_idle_ns, std::uint64_t{1} << 61)
      .bind(limits);
  nb::class_<SessionSleep>(m, "SessionSleep", "A session between two of its requests.")
      .def_ro("now_ns", &SessionSleep::now_ns)
      .def_ro("row", &SessionSleep::row, "The request that has ended.")
      .def_ro("session", &SessionSleep::session, "Requests of one session have the same number.")
      .def_ro("parent_session", &SessionSleep::parent_session, "Session that started this one, or None.")
      .def_ro("worker", &SessionSleep::worker)
      .def_ro("prompt_tokens", &SessionSleep::prompt_tokens, "Prompt of the request that has ended.")
      .def_ro("output_tokens", &SessionSleep::output_tokens)
      .def_ro("first_cached_tokens", &SessionSleep::first_cached_tokens,
              "Cached tokens of its first request: they were there before the session.")
      .def_ro("asleep_ns", &SessionSleep::asleep_ns, "Time since the request has ended; 0 at the first call.")
      .def_ro("last_gap_ns", &SessionSleep::last_gap_ns,
              "How long the session slept before the request that has ended; None: not at all.")
      .def_ro("is_last", &SessionSleep::is_last, "Whether its client ends the session with this answer.")
      .def_ro("told_ns", &SessionSleep::told_ns,
              "Time from the end of the request to the next, as its client tells; None: unknown, because it waits for "
              "others too.");
  nb::class_<PrefixTotals>(m, "PrefixTotals", "What engines did for the KV of sleeping sessions, in numbers.")
      .def_ro("holds", &PrefixTotals::holds)
      .def_ro("yielded_holds", &PrefixTotals::yielded_holds, "Holds that ended because a request lacked room.")
      .def_ro("held_blocks", &PrefixTotals::held_blocks, "At the begin of each hold, summed.")
      .def_ro("peak_held_blocks", &PrefixTotals::peak_held_blocks, "Most at one time, summed over workers.")
      .def_ro("held_block_s", &PrefixTotals::held_block_s, "Held blocks times seconds.")
      .def_ro("drops", &PrefixTotals::drops)
      .def_ro("dropped_blocks", &PrefixTotals::dropped_blocks)
      .def_ro("offloads", &PrefixTotals::offloads)
      .def_ro("offloaded_blocks", &PrefixTotals::offloaded_blocks)
      .def_ro("prefetches", &PrefixTotals::prefetches)
      .def_ro("prefetched_blocks", &PrefixTotals::prefetched_blocks);
}

}  // namespace understudy
