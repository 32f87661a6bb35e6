// Rate of the transfers on a link, and bytes moved by each.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/assert.hpp"

namespace understudy {

// Converts in halves: converting 128 bits at once is a slow library call.
__extension__ inline double as_double(unsigned __int128 wide) {
  return static_cast<double>(static_cast<std::uint64_t>(wide >> 64)) * 0x1p64 +
         static_cast<double>(static_cast<std::uint64_t>(wide));
}

// Share of one transfer: a bandwidth divided by a number of sharers.
struct LinkShare {
  __extension__ using Wide = unsigned __int128;

  std::uint64_t bytes_per_second = 0;  // 0: nothing moves, unless `unlimited`
  std::uint64_t sharers = 1;
  bool unlimited = true;

  bool moves() const noexcept { return !unlimited && bytes_per_second > 0; }  // at a finite rate
  bool slower_than(const LinkShare& other) const noexcept {
    if (unlimited || other.unlimited) return !unlimited;
    return Wide{bytes_per_second} * other.sharers < Wide{other.bytes_per_second} * sharers;
  }
  double units_per_tick() const noexcept {
    return static_cast<double>(bytes_per_second) / static_cast<double>(sharers);
  }
  bool operator==(const LinkShare&) const = default;
};

// Bytes served to each transfer at one rate, in 10^-9 bytes * 2^-40, up to the tick `settled_at`.
struct LinkMeter {
  using Wide = LinkShare::Wide;

  LinkShare rate;
  double units_per_tick = 0;  // of `rate`
  Wide served = 0;
  Wide settled_at = 0;
  double lag = 0;  // bound on how far rounding has kept `served` behind

  // Units that each transfer moves in `ticks`, rounded down.
  Wide moving_in(Wide ticks) const {
    if (!rate.moves()) return 0;
    const Wide all = ticks * rate.bytes_per_second;
    if (rate.sharers == 1) return all;
    // Dividing 128 bits is slow, and most often two or four share.
    const bool power_of_two = (rate.sharers & (rate.sharers - 1)) == 0;
    return power_of_two ? all >> std::countr_zero(rate.sharers) : all / rate.sharers;
  }
  Wide moving(Wide now) const { return moving_in(now - settled_at); }  // since the last settle
  // Adds what moved since the last settle; returns it.
  Wide settle(Wide now) {
    UNDERSTUDY_ASSERT(now >= settled_at, "the clock of a link goes backwards");
    const Wide ticks = now - settled_at;
    if (ticks == 0) return 0;
    const Wide more = moving_in(ticks);
    settled_at = now;
    if (more == 0) return 0;
    if (rate.sharers > 1 && more * rate.sharers != ticks * rate.bytes_per_second) lag += 1;
    served += more;
    return more;
  }
  // Sets the rate from now on. `late_ticks` bounds how late the current event may be.
  void set_rate(const LinkShare& new_rate, double late_ticks) {
    UNDERSTUDY_ASSERT(new_rate.sharers > 0, "a share without sharers");
    const double units = new_rate.units_per_tick();
    if (late_ticks != 0) lag += late_ticks * std::max(units - units_per_tick, 0.0);
    rate = new_rate;
    units_per_tick = units;
  }
};

}  // namespace understudy
