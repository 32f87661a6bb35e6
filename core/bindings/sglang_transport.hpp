// The other side of a disaggregated SGLang server, and the link to it, in whole steps, as in recordings.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/sglang/disaggregation.hpp"

namespace understudy {

class StepTransport final : public SglangTransport {
 public:
  struct Link {
    std::int64_t handshake_steps = 0;
    std::int64_t transfer_steps = 1;
    std::optional<std::int64_t> fail_after;
    std::uint32_t decode_prefix = 0;
  };
  using Sent = std::tuple<RequestId, std::uint32_t, bool>;

  explicit StepTransport(std::optional<std::int64_t> ack_steps) : ack_steps_(ack_steps) {}

  void end_step() noexcept { ++now_; }
  void add(RequestId id, const Link& link) {
    Transfer& one = transfers_[id];
    one.link = link;
    one.born = now_;
  }
  std::vector<Sent> take_sent() { return std::exchange(sent_, {}); }

  SglangTransferState poll(RequestId id) override {
    Transfer& one = transfers_.at(id);
    if (one.ended) return *one.ended;
    if (one.link.fail_after && now_ >= one.born + *one.link.fail_after) {
      return *(one.ended = SglangTransferState::Failed);
    }
    if (now_ < one.born + one.link.handshake_steps) return SglangTransferState::Boot;
    if (!one.begun) return SglangTransferState::Ready;
    if (now_ < *one.begun + one.link.transfer_steps) return SglangTransferState::Moving;
    return *(one.ended = SglangTransferState::Done);
  }
  void fail(RequestId id) override { transfers_.at(id).ended = SglangTransferState::Failed; }
  std::uint32_t decode_prefix(RequestId id) override { return transfers_.at(id).link.decode_prefix; }
  void send(RequestId id, std::uint32_t pages, bool last) override { sent_.emplace_back(id, pages, last); }
  void end_sends(RequestId id) override { transfers_.at(id).begun = now_; }
  void request_pages(RequestId id, std::uint32_t, std::uint32_t) override { transfers_.at(id).begun = now_; }
  void report_failure(RequestId id) override {
    Transfer& one = transfers_.at(id);
    if (!one.reported) one.reported = now_;
  }
  bool waits_for_drain() const override { return ack_steps_.has_value(); }
  bool is_drained(RequestId id) override { return now_ >= *transfers_.at(id).reported + *ack_steps_; }

 private:
  struct Transfer {
    Link link;
    std::int64_t born = 0;
    std::optional<std::int64_t> begun;
    std::optional<std::int64_t> reported;
    std::optional<SglangTransferState> ended;
  };

  std::optional<std::int64_t> ack_steps_;
  std::int64_t now_ = 0;
  std::unordered_map<RequestId, Transfer> transfers_;
  std::vector<Sent> sent_;
};

}  // namespace understudy
