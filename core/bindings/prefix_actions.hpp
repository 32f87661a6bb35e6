// Names of what engines do for the KV of sleeping sessions.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/errors.hpp"
#include "engine/prefix_keeper.hpp"

namespace understudy {

inline PrefixAction read_prefix_action(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, PrefixAction>, 5> kActions{{
      {"hold", PrefixAction::Hold},
      {"unhold", PrefixAction::Unhold},
      {"drop", PrefixAction::Drop},
      {"offload", PrefixAction::Offload},
      {"prefetch", PrefixAction::Prefetch},
  }};
  const auto* const known = std::ranges::find(kActions, name, &std::pair<std::string_view, PrefixAction>::first);
  if (known != kActions.end()) return known->second;
  throw Error(ErrorKind::PolicyError, "'", name, "' is no action; known are hold, unhold, drop, offload and prefetch");
}

}  // namespace understudy
