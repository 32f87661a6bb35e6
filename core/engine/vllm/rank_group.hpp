// Data-parallel ranks of one model, which step together: one engine to its driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/vllm/engine.hpp"

namespace understudy {

// The tokens of all ranks, and those to which each is padded (0: none is).
struct RankLoad {
  std::uint64_t tokens;
  std::uint64_t width;
};

// A request names its rank (RequestSpec::rank). The experts of a step see the tokens of all ranks, and every rank takes
// as long as the slowest. As in vLLM (v1/worker/dp_utils.py), ranks are padded to the largest of them if all fit a
// captured graph; a rank without work computes an empty decode.
class RankGroup final : public Engine {
 public:
  explicit RankGroup(std::vector<std::unique_ptr<VllmEngine>> ranks);

  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t now_ns) override;
  EngineSnapshot snapshot() const override;  // sums over ranks

  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override {
    return ranks_[0]->never_fits(prompt_tokens, max_tokens);
  }
  const Effects& transfers_landed(std::int64_t now_ns) override;
  void finish_transfers() override;
  Stall stall() const override;
  std::size_t num_ranks() const noexcept override { return ranks_.size(); }
  Engine& rank(std::size_t index) override { return *ranks_.at(index); }
  void check() override;

 private:
  bool in_step() const;
  RankLoad rank_load() const;
  void add(const Effects& effects);
  const Effects& return_effects();

  std::vector<std::unique_ptr<VllmEngine>> ranks_;
  std::vector<std::size_t> order_;  // ranks by their first request: the order in which they begin
  std::unordered_map<RequestId, std::size_t> rank_of_;
  std::int64_t end_ns_ = 0;  // end of the open step
  Effects effects_;
};

}  // namespace understudy
