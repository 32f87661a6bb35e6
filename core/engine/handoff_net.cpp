#include "engine/handoff_net.hpp"

#include <algorithm>
#include <array>

#include "base/errors.hpp"

namespace understudy {

void HandOffNet::add_worker(bool produces, bool consumes) {
  Links& links = hub_.links();
  const std::string name = "worker " + std::to_string(sides_.size());
  Side& side = sides_.emplace_back();
  if (produces) {
    if (!backend_ && settings_.backend_gbps < std::numeric_limits<double>::infinity()) {
      backend_ = links.add_duplex("hand-off backend", settings_.backend_gbps);
    }
    side.out = links.add_link({name + " hand-off out", settings_.out_gbps, settings_.fixed_ns, backend_, false});
  }
  if (consumes) side.in = links.add_link({name + " hand-off in", settings_.in_gbps, 0, {}, false});
}

void HandOffNet::read(std::uint32_t reader, const Pull& pull, std::int64_t now_ns) {
  if (pull.peer >= sides_.size() || !sides_[pull.peer].out || !sides_[reader].in) {
    throw Error(ErrorKind::InvariantViolated, "worker ", reader, " reads from worker ", pull.peer,
                ", which keeps no blocks for others");
  }
  const std::array path{*sides_[pull.peer].out, *sides_[reader].in};
  const std::uint64_t bytes = pull.blocks.size() * settings_.bytes_per_block;
  const auto index = static_cast<std::uint32_t>(records_.size());
  records_.push_back({pull.request, pull.peer, reader, bytes, now_ns, kNever});
  ++in_flight_;
  hub_.start(now_ns, path, bytes, Priority::Demand, *this, {0, index, 0});
}

void HandOffNet::landed(const Purpose& purpose, std::int64_t time_ns) {
  HandOffRecord& record = records_[purpose.index];
  record.landed_ns = time_ns;
  --in_flight_;
  sides_[record.to].received.push_back({time_ns, record.request});
  reached_.push_back(record.to);
  note(record.from, record.request, time_ns);
}

// A poll at the very time of a notification does not see it, in whatever order workers are run.
void HandOffNet::note(std::uint32_t worker, RequestId request, std::int64_t now_ns) {
  sides_[worker].notes.push_back({now_ns + 1, request});
  reached_.push_back(worker);
}

void HandOffNet::take(std::vector<Note>& from, std::int64_t now_ns, std::vector<RequestId>& out) {
  out.clear();
  std::size_t seen = 0;
  for (; seen < from.size() && from[seen].time_ns <= now_ns; ++seen) out.push_back(from[seen].request);
  from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(seen));
}

void HandOffNet::take_received(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out) {
  take(sides_[worker].received, now_ns, out);
}

void HandOffNet::take_notes(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out) {
  take(sides_[worker].notes, now_ns, out);
}

void HandOffNet::take_heartbeats(std::uint32_t worker, std::int64_t now_ns, std::vector<Heartbeat>& out) {
  out.clear();
  std::vector<Heartbeat>& from = sides_[worker].heartbeats;
  while (!from.empty() && from.front().time_ns < now_ns) {
    out.push_back(std::move(from.front()));
    from.erase(from.begin());
  }
}

std::int64_t HandOffNet::next_ns(std::uint32_t worker) const noexcept {
  const Side& side = sides_[worker];
  std::int64_t next = kNever;
  if (!side.received.empty()) next = side.received.front().time_ns;
  if (!side.notes.empty()) next = std::min(next, side.notes.front().time_ns);
  return next;
}

}  // namespace understudy
