// States at the ends of fast-forwards, to compare them with a run of the same workload step by step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/engine.hpp"

namespace understudy {

// Serves two runs of one workload: the first records, the second compares. Workers may run in threads.
class Checkpoints {
 public:
  // Begins a run; `records`: the first.
  void begin(std::size_t num_workers, bool records);
  // A step of the engine has ended, or a fast-forward. Throws InvariantViolated at the first difference.
  void reach(std::size_t worker, const Engine& engine, bool fast_forwarded);
  // The worker has another engine from now on, whose steps count from 0.
  void restart(std::size_t worker);
  // Ends a run. Throws InvariantViolated if the second run has not ended every recorded step.
  void finish() const;

  std::uint64_t recorded() const noexcept;
  std::uint64_t compared() const noexcept;

 private:
  struct Checkpoint {
    std::uint64_t life = 0;  // restarts of the worker so far
    std::uint64_t step = 0;  // steps of the engine so far
    bool with_cached = false;
    StateDigest state;
  };
  struct Worker {
    std::vector<Checkpoint> points;
    std::size_t next = 0;  // to compare
    std::uint64_t life = 0;
    std::uint64_t cached_step = 0;  // when cached blocks were last recorded
  };

  bool records_ = true;
  std::vector<Worker> workers_;
};

}  // namespace understudy
