// Decides what is loaded for a request, and to which slots.
#include <algorithm>
#include <limits>

#include "tiers/worker_tiers.hpp"

namespace understudy {

SharedTier* WorkerTiers::shared_tier(Tier tier) const {
  for (const auto& shared : run_.shared()) {
    if (shared->tier() == tier) return shared.get();
  }
  return nullptr;
}

// Collects the slots of the resident sources in [from, to), by tier, in gathered_.
void WorkerTiers::gather_sources(std::size_t from, std::size_t to) {
  for (std::vector<SlotId>& slots : gathered_) slots.clear();
  while (from < to) {
    const Source& source = sources_[from];
    const std::size_t end = end_of_run(from, to);
    if (source.where == Source::Where::Resident) {
      std::vector<SlotId>& slots = gathered_[static_cast<std::size_t>(source.tier)];
      const std::size_t at = slots.size();
      slots.resize(at + end - from);
      for (std::size_t i = from; i < end; ++i) slots[at + i - from] = sources_[i].slot;
    }
    from = end;
  }
}

void WorkerTiers::pin(std::size_t from, std::size_t to) {
  gather_sources(from, to);
  device_.reference(gathered(Tier::G1));
  store_.reference(kG2, gathered(Tier::G2));
  for (const auto& shared : run_.shared()) shared->store().reference(0, gathered(shared->tier()));
}

void WorkerTiers::unpin(std::size_t from, std::size_t to) {
  gather_sources(from, to);
  device_.release(gathered(Tier::G1));
  store_.release(kG2, gathered(Tier::G2), true);
  for (const auto& shared : run_.shared()) shared->store().release(0, gathered(shared->tier()), true);
}

// ── For a request ──

WorkerTiers::Onboard WorkerTiers::onboard(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix,
                                          std::span<const BlockIdentity> blocks,
                                          const std::function<std::int64_t(std::size_t)>& saved_ns) {
  find_sources(blocks);
  Places places{.count = sources_.size()};
  if (places.count > 0 && config_.recompute_fallback) {
    places.count = worthwhile(now_ns, places.count, saved_ns);
    if (places.count == 0) return Onboard::Slow;
  }
  places.count = trim_device_tail(places.count);
  if (places.count == 0) return Onboard::Miss;
  const Room room = reserve(request, now_ns, prefix, places);
  if (room != Room::Taken) return room == Room::Wait ? Onboard::Retry : Onboard::Miss;
  Origin origin{.first_block = prefix.size()};
  origin.tiers.reserve(places.count);
  for (const Source& source : first_sources(places.count)) origin.tiers.push_back(source.tier);
  bring(request, now_ns, prefix, blocks, places, std::move(origin));
  return Onboard::Parked;
}

WorkerTiers::Onboard WorkerTiers::onboard_all(RequestSlot request, std::int64_t now_ns, const WholeHit& hit,
                                              std::int64_t saved_ns) {
  find_sources(hit.blocks);
  const bool loads = std::ranges::any_of(sources_, [](const Source& source) { return source.tier > Tier::G1; });
  if (sources_.size() < hit.blocks.size() || !loads) return Onboard::Miss;
  Places places{.count = sources_.size(), .whole = true};
  if (config_.recompute_fallback && eta(now_ns, places.count) - now_ns >= saved_ns) return Onboard::Slow;
  const Room room = reserve(request, now_ns, {}, places);
  if (room != Room::Taken) return room == Room::Wait ? Onboard::Retry : Onboard::Miss;
  Origin origin{.first_block = hit.first_unit};
  origin.tiers.resize(hit.end_unit - hit.first_unit, Tier::G1);
  for (std::size_t i = 0; i < places.count; ++i) {
    for (std::size_t unit = std::max(hit.covers[i].first, hit.first_unit); unit < hit.covers[i].end; ++unit) {
      Tier& tier = origin.tiers[unit - hit.first_unit];
      tier = std::max(tier, sources_[i].tier);
    }
  }
  bring(request, now_ns, {}, hit.blocks, places, std::move(origin));
  return Onboard::Parked;
}

// Starts the load for which `reserve` has made room, and parks the request.
void WorkerTiers::bring(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix,
                        std::span<const BlockIdentity> blocks, const Places& places, Origin origin) {
  g1_references_ += prefix.size();
  Park park;
  park.since_ns = now_ns;
  park.origin = std::move(origin);
  const bool begins = !places.to.empty();
  if (begins) {
    park.loads.push_back(begin_load(now_ns, blocks, places, prefix));
  } else {
    join_loads(park, prefix, places.count);
  }
  const std::uint32_t first_load = park.loads[0];
  wait_for_loads(request, std::move(park));
  if (begins) {
    loads_[first_load].prefetch = request == kNoRequest;
    next_phase(first_load, now_ns);
    hub().run_until(now_ns);
  }
}

// Drops trailing blocks that are on the device: they need no load.
std::size_t WorkerTiers::trim_device_tail(std::size_t count) const {
  while (count > 0 && sources_[count - 1].tier == Tier::G1) --count;
  return count;
}

// References the first sources and the prefix, and allocates slots for the blocks to load, perhaps for fewer than
// requested. All or nothing unless it returns Taken.
WorkerTiers::Room WorkerTiers::reserve(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix,
                                       Places& places) {
  std::size_t loads = 0;
  std::size_t stagings = 0;
  for (const Source& source : first_sources(places.count)) {
    loads += source.needs_load() ? 1 : 0;
    stagings += source.needs_staging() ? 1 : 0;
  }
  device_.reference(prefix);
  pin(0, places.count);
  const auto undo = [&] {
    unpin(0, places.count);
    device_.release(prefix);
  };
  places.to.resize(loads);
  places.staging.resize(stagings);
  // A prefetch does not make room that it cannot use.
  if (request == kNoRequest && stagings > store_.available(kG2)) {
    if (places.whole) {
      undo();
      return Room::Short;
    }
    places.to.resize(cut_before_staging(places));
  }
  Room room = Room::Short;
  bool staged = true;
  try {
    room = places.to.empty() ? Room::Taken : take(request, now_ns, places.to);
    if (room == Room::Taken && !places.staging.empty()) staged = store_.try_allocate(kG2, places.staging);
  } catch (...) {  // a user-defined policy threw
    if (room == Room::Taken) device_.give_back(places.to);
    undo();
    throw;
  }
  if (!staged && places.whole) {
    device_.give_back(places.to);
    room = Room::Short;
  } else if (!staged) {
    drop_staged_sources(places);
  }
  if (room == Room::Taken && places.count > 0) return Room::Taken;
  undo();
  return room == Room::Wait ? Room::Wait : Room::Short;
}

// The host has no room to stage in: loads only the blocks before the first that needs it.
void WorkerTiers::drop_staged_sources(Places& places) {
  const std::size_t needed = cut_before_staging(places);
  device_.give_back(std::span<const SlotId>(places.to).subspan(needed));
  places.to.resize(needed);
}

// Cuts the sources before the first that needs staging; returns the number of device slots that the others need.
std::size_t WorkerTiers::cut_before_staging(Places& places) {
  const auto first = std::ranges::find_if(sources_, &Source::needs_staging);
  const std::size_t count = trim_device_tail(static_cast<std::size_t>(first - sources_.begin()));
  unpin(count, places.count);
  places.count = count;
  places.staging.clear();
  return static_cast<std::size_t>(std::ranges::count_if(first_sources(count), &Source::needs_load));
}

// Other loads bring all of the blocks.
void WorkerTiers::join_loads(Park& park, std::span<const SlotId> prefix, std::size_t count) {
  park.pins.assign(prefix.begin(), prefix.end());
  for (const Source& source : first_sources(count)) {
    if (source.where == Source::Where::Loading) {
      ++totals_.joined_loads;
      if (std::ranges::find(park.loads, source.load) == park.loads.end()) park.loads.push_back(source.load);
    } else {
      park.pins.push_back(source.slot);
      ++g1_references_;
    }
  }
}

void WorkerTiers::wait_for_loads(RequestSlot request, Park park) {
  if (request == kNoRequest) {
    device_.release(park.pins);
    g1_references_ -= park.pins.size();
    return;
  }
  park.pending = static_cast<std::uint32_t>(park.loads.size());
  for (const std::uint32_t load : park.loads) loads_[load].waiters.push_back(request);
  ++parked_;
  parks_[request] = std::move(park);
}

bool WorkerTiers::prefetch(std::int64_t now_ns, std::span<const BlockIdentity> blocks) {
  std::vector<SlotId> prefix(blocks.size());
  std::size_t unreferenced = 0;
  prefix.resize(store_.peek_prefix(kG1, blocks, prefix.data(), &unreferenced));
  const auto worth = [](std::size_t) { return std::numeric_limits<std::int64_t>::max(); };
  return onboard(kNoRequest, now_ns, prefix, blocks.subspan(prefix.size()), worth) == Onboard::Parked;
}

}  // namespace understudy
