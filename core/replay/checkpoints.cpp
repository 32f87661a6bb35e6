#include "replay/checkpoints.hpp"

#include "base/errors.hpp"

namespace understudy {

void Checkpoints::begin(std::size_t num_workers, bool records) {
  records_ = records;
  if (records) workers_.assign(num_workers, {});
  for (Worker& worker : workers_) worker.life = 0;
  if (workers_.size() < num_workers) {
    throw Error(ErrorKind::WrongState, "checkpoints of ", workers_.size(), " workers, the fleet has ", num_workers);
  }
}

void Checkpoints::reach(std::size_t index, const Engine& engine, bool fast_forwarded) {
  if (index >= workers_.size()) workers_.resize(index + 1);  // it has joined during the run
  Worker& worker = workers_[index];
  if (records_ ? !fast_forwarded : worker.next == worker.points.size()) return;
  const EngineSnapshot now = engine.snapshot();
  const std::uint64_t step = now.totals.steps;
  if (records_) {
    // Cached blocks cost O(blocks): record them rarely enough to cost little per step.
    constexpr std::uint64_t kBlocksPerStep = 16;
    const bool with_cached = (step - worker.cached_step) * kBlocksPerStep >= now.cached_blocks + now.active_blocks;
    if (with_cached) worker.cached_step = step;
    worker.points.push_back({worker.life, step, with_cached, engine.digest(with_cached)});
    return;
  }
  const Checkpoint& point = worker.points[worker.next];
  if (worker.life < point.life || (worker.life == point.life && step < point.step)) return;
  const auto fail = [&](const auto&... what) {
    throw Error(ErrorKind::InvariantViolated, "worker ", index, ", step ", point.step, ", ",
                static_cast<std::int64_t>(point.state.values[0]), " ns: ", what...);
  };
  if (worker.life > point.life || step > point.step) fail("the step ends with fast-forward alone");
  const StateDigest state = engine.digest(point.with_cached);
  for (std::size_t field = 0; field < state.values.size(); ++field) {
    if (state.values[field] == point.state.values[field]) continue;
    fail("different ", StateDigest::kFields[field], " with fast-forward and step by step");
  }
  ++worker.next;
}

void Checkpoints::restart(std::size_t index) {
  if (index >= workers_.size()) workers_.resize(index + 1);
  ++workers_[index].life;
  workers_[index].cached_step = 0;
}

void Checkpoints::finish() const {
  for (std::size_t index = 0; !records_ && index < workers_.size(); ++index) {
    const Worker& worker = workers_[index];
    if (worker.next == worker.points.size()) continue;
    throw Error(ErrorKind::InvariantViolated, "worker ", index, ": step ", worker.points[worker.next].step,
                " ends in the run with fast-forward alone");
  }
}

std::uint64_t Checkpoints::recorded() const noexcept {
  std::uint64_t sum = 0;
  for (const Worker& worker : workers_) sum += worker.points.size();
  return sum;
}

std::uint64_t Checkpoints::compared() const noexcept {
  std::uint64_t sum = 0;
  for (const Worker& worker : workers_) sum += worker.next;
  return sum;
}

}  // namespace understudy
