// The defaults of the engine interface: correct, and slow.
#include "engine/engine.hpp"

#include <algorithm>
#include <utility>

#include "base/errors.hpp"
#include "engine/config.hpp"

namespace understudy {

namespace {

class NoBlocks final : public Residency {
 public:
  std::size_t num_pools() const noexcept override { return 0; }
  Tier tier(std::size_t) const override { return Tier::G1; }
  std::size_t num_hashes() const override { return 0; }
  void has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const override {
    for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = false;
  }
  std::vector<BlockIdentity> resident(std::size_t) const override { return {}; }
};

void append(Effects& all, const Effects& some) {
  all.tokens.insert(all.tokens.end(), some.tokens.begin(), some.tokens.end());
  all.finished.insert(all.finished.end(), some.finished.begin(), some.finished.end());
  all.admitted.insert(all.admitted.end(), some.admitted.begin(), some.admitted.end());
  all.preempted.insert(all.preempted.end(), some.preempted.begin(), some.preempted.end());
  all.has_events = all.has_events || some.has_events;
  all.phase = some.phase;
  all.wake_ns = some.wake_ns;
}

}  // namespace

std::unique_ptr<Engine> EngineConfig::make_ranks(std::span<const EngineSite>) const {
  throw Error(ErrorKind::ConfigError, "ranks: this kind of engine has none that step together; leave ranks out");
}

const Effects& Engine::advance(std::int64_t until_ns, const AdvanceOptions& options) {
  Effects& all = default_effects_;
  all.clear();
  const EngineSnapshot now = snapshot();
  all.phase = now.phase;
  all.wake_ns = now.wake_ns;
  for (std::uint32_t calls = 1;; ++calls) {
    if (calls % 64 == 0 && options.on_progress != nullptr) (*options.on_progress)(all);
    const bool open = all.phase == Phase::InStep;
    if (open ? all.wake_ns > until_ns : all.phase != Phase::Ready || all.wake_ns >= until_ns) return all;
    const std::size_t finished = all.finished.size();
    append(all, open ? end_step(all.wake_ns) : begin_step(all.wake_ns));
    if (options.stop_on_finish && all.finished.size() > finished) return all;
  }
}

const Effects& Engine::transfers_landed(std::int64_t) {
  const EngineSnapshot now = snapshot();
  default_effects_.clear();
  default_effects_.phase = now.phase;
  default_effects_.wake_ns = now.wake_ns;
  return default_effects_;
}

void Engine::set_admitting(bool) {
  throw Error(ErrorKind::WrongState, "set_admitting: this engine cannot stop admission; restart it instead");
}

Stall Engine::stall() const {
  const EngineSnapshot now = snapshot();
  return {false, now.waiting, {}, now.free_blocks, {}, 0};
}

void Engine::set_slowdown(double) {
  throw Error(ErrorKind::WrongState, "set_slowdown: this engine has no such fault; leave it out");
}

void Engine::set_link_share(std::int64_t, Tier, double) {
  throw Error(ErrorKind::InvalidArgument, "set_link_share: this engine has no link to that tier");
}

void Engine::set_load_failures(Tier, double) {
  throw Error(ErrorKind::InvalidArgument, "set_load_failures: this engine loads nothing from that tier");
}

void Engine::forget_cache(std::int64_t) {
  throw Error(ErrorKind::WrongState, "forget_cache: this engine cannot clear its cache; restart it instead");
}

std::size_t Engine::cached_prefix(std::span<const BlockIdentity> blocks) const {
  const Residency& held = residency();
  const auto found = std::make_unique<bool[]>(blocks.size());
  const std::span<const bool> here(found.get(), blocks.size());
  std::ptrdiff_t longest = 0;
  for (std::size_t pool = 0; pool < held.num_pools(); ++pool) {
    held.has_blocks(pool, blocks, found.get());
    longest = std::max(longest, std::ranges::find(here, false) - here.begin());
  }
  return static_cast<std::size_t>(longest);
}

void Engine::take_events(TimedEvents& out) {
  out.batch.records.clear();
  out.time_ns.clear();
}

const Residency& Engine::residency() const {
  static const NoBlocks none;
  return none;
}

}  // namespace understudy
