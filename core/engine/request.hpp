// A request inside a simulated engine. It has lengths and identities, never tokens.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/request_id.hpp"
#include "slots/slot.hpp"
#include "tokens/identities.hpp"

namespace understudy {

// Where the identities of a request's blocks come from, computed when they are first needed.
class IdentitySource {
 public:
  virtual ~IdentitySource() = default;
  // Append identities until `out` holds `count` blocks.
  virtual void extend(std::vector<BlockIdentity>& out, std::size_t count) const = 0;
};

// Identities that are known beforehand, prompt and output.
class GivenIdentities final : public IdentitySource {
 public:
  explicit GivenIdentities(Identities blocks) : blocks_(std::move(blocks)) {}
  void extend(std::vector<BlockIdentity>& out, std::size_t count) const override {
    if (count > blocks_.size()) {
      throw Error(ErrorKind::InvalidArgument, "identities name ", blocks_.size(), " blocks; block ", count - 1,
                  " of the request is needed");
    }
    const auto more = blocks_.span().subspan(out.size(), count - out.size());
    out.insert(out.end(), more.begin(), more.end());
  }

 private:
  Identities blocks_;
};

struct RequestSpec {
  std::string name;  // breaks ties under the priority policy
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;
  std::int64_t priority = 0;
  double arrival_time = 0;
  std::shared_ptr<const IdentitySource> identities;
};

enum class RequestStatus : std::uint8_t {
  Waiting,
  Running,
  Preempted,
  Parked,
  Finished
};  // Parked: its blocks are being loaded

struct EngineRequest {
  RequestSpec spec;
  RequestStatus status = RequestStatus::Waiting;

  std::uint32_t known = 0;         // prompt and the outputs that the scheduler has received
  std::uint32_t computed = 0;      // of them (and of those in flight), with KV or being given it
  std::uint32_t ahead = 0;         // sampled, not yet received (asynchronous scheduling)
  std::uint32_t emitted = 0;       // outputs visible outside
  std::uint32_t keyed = 0;         // leading blocks of `table` that are registered
  std::uint32_t keyed_before = 0;  // `keyed` before this step's allocation
  std::vector<SlotId> table;
  std::vector<BlockIdentity> blocks;  // identities computed so far

  std::uint32_t outputs() const noexcept { return known - spec.prompt_tokens; }

  // What happened to it.
  std::int64_t first_admit_ns = -1;
  std::int64_t finish_ns = -1;
  std::uint32_t preemptions = 0;
  std::uint32_t cached_first = 0;
  std::uint64_t cached_total = 0;
  std::uint64_t looked_up = 0;    // its tokens at every admission, together
  std::uint32_t first_burst = 0;  // tokens of the step that gave the first

  // Tiers.
  RequestStatus before_park = RequestStatus::Waiting;
  bool onboard_tried = false;                  // once for every time in the queue
  std::uint32_t through = 0;                   // leading blocks that were offered to the host (write-through)
  std::array<std::uint32_t, 3> below_first{};  // of cached_first, tokens that came from G2, G3, G4
  std::array<std::uint64_t, 3> below_total{};  // of cached_total
  std::int64_t parked_ns = 0;

  struct Segment {  // consecutive steps with tokens
    std::uint64_t first_step;
    std::uint32_t count;
  };
  std::vector<Segment> tokens;
};

}  // namespace understudy
