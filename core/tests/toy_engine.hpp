// A toy engine, compiled for tests only: it implements the required calls of the interface and what the KV router
// needs.
//
// Requests run first come, first served, at most `max_running` at a time. A step computes whole prompts and one token
// of every running request. A queue longer than `queue_limit` ends its oldest request inside `submit`.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"

namespace understudy {

struct ToyConfig final : EngineConfig {
  std::uint32_t max_running = 4;
  std::uint32_t queue_limit = 8;

  ToyConfig() {
    block_size = 16;
    num_gpu_blocks = 4096;
  }

  std::unique_ptr<Engine> make(const EngineSite& site) const override;
  std::shared_ptr<EngineConfig> clone() const override { return std::make_shared<ToyConfig>(*this); }
};

class ToyEngine final : public Engine, private Residency {
 public:
  ToyEngine(const ToyConfig& config, const EngineSite& site) : config_(config), timing_(site.timing) {}

  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t now_ns) override;
  EngineSnapshot snapshot() const override;

  void take_events(TimedEvents& out) override;
  void take_gaps(GapSum& out) override;
  const Residency& residency() const override { return *this; }

 private:
  struct Request {
    RequestSpec spec;
    RequestRecord record;
    bool computed = false;  // its prompt
    std::vector<std::int64_t> gaps_ns;
  };

  // Residency: one pool, the device.
  std::size_t num_pools() const noexcept override { return 1; }
  Tier tier(std::size_t) const override { return Tier::G1; }
  std::size_t num_hashes() const override { return cached_.size(); }
  void has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t) const override;

  void finish(Request& request, FinishReason reason, std::int64_t now_ns);
  void store_prompt(const Request& request, std::int64_t now_ns);
  Effects& fresh();
  const Effects& done();

  ToyConfig config_;
  StepTiming timing_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  bool in_step_ = false;
  std::int64_t now_ns_ = 0;  // the end of the open step, else the time of the last call
  std::uint64_t steps_ = 0;
  std::unordered_map<std::uint64_t, BlockIdentity> cached_;  // by sequence hash; nothing is evicted
  TimedEvents events_;
  std::vector<std::int64_t> gaps_ns_;  // between tokens of completed requests
  std::uint64_t next_event_ = 0;
  Effects effects_;
};

}  // namespace understudy
