#include "engine/handoff_net.hpp"

#include <algorithm>
#include <array>

#include "base/errors.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

std::uint32_t HandOffNet::add_worker(bool produces, bool consumes, bool far) {
  Links& links = hub_.links();
  const std::string name = "worker " + std::to_string(sides_.size());
  Side& side = sides_.emplace_back();
  side.connected = !far;
  if (produces) {
    if (!backend_ && settings_.backend_gbps < std::numeric_limits<double>::infinity()) {
      backend_ = links.add_duplex("hand-off backend", settings_.backend_gbps);
    }
    side.out = links.add_link({name + " hand-off out", settings_.out_gbps, settings_.fixed_ns, backend_, false});
  }
  if (consumes) side.in = links.add_link({name + " hand-off in", settings_.in_gbps, 0, {}, false});
  return static_cast<std::uint32_t>(sides_.size() - 1);
}

// ── Far workers ──

bool HandOffNet::reaches(std::uint32_t worker) {
  if (sides_[worker].connected) return true;
  if (std::ranges::find(wanted_, worker) == wanted_.end()) wanted_.push_back(worker);
  return false;
}

void HandOffNet::connect(std::uint32_t worker, std::int64_t now_ns) {
  Side& side = sides_.at(worker);
  if (std::exchange(side.connected, true)) return;
  for (const RequestId request : std::exchange(side.waiting_notes, {})) note(worker, request, now_ns);
  for (const WaitingRead& read : side.waiting) {
    sides_[read.reader].poll_from_ns = now_ns;
    reached_.push_back(read.reader);
  }
}

void HandOffNet::disconnect(std::uint32_t worker, std::int64_t now_ns) {
  Side& side = sides_.at(worker);
  side.connected = false;
  side.waiting_notes.clear();  // lost
  for (const WaitingRead& read : std::exchange(side.waiting, {})) {
    receive(read.reader, {now_ns, read.pull.request, true});
  }
  for (HandOffRecord& record : records_) {
    if (record.from == worker && record.landed_ns == kNever) record.failed = true;
  }
}

// ── Reads and notifications ──

void HandOffNet::read(std::uint32_t reader, const Pull& pull, std::int64_t now_ns) {
  if (pull.peer >= sides_.size() || !sides_[pull.peer].out || !sides_[reader].in) {
    throw Error(ErrorKind::InvariantViolated, "worker ", reader, " reads from worker ", pull.peer,
                ", which keeps no blocks for others");
  }
  if (!reaches(pull.peer)) {
    sides_[pull.peer].waiting.push_back({reader, pull});
    return;
  }
  post(reader, pull, now_ns);
}

void HandOffNet::post_waiting(std::uint32_t reader, std::int64_t now_ns) {
  if (sides_[reader].poll_from_ns > now_ns) return;
  sides_[reader].poll_from_ns = kNever;
  for (Side& side : sides_) {
    if (!side.connected || side.waiting.empty()) continue;
    std::vector<WaitingRead> others;
    for (WaitingRead& read : std::exchange(side.waiting, {})) {
      if (read.reader == reader) {
        post(reader, read.pull, now_ns);
      } else {
        others.push_back(std::move(read));
      }
    }
    side.waiting = std::move(others);
  }
}

void HandOffNet::post(std::uint32_t reader, const Pull& pull, std::int64_t now_ns) {
  Side& side = sides_[reader];
  const std::array path{*sides_[pull.peer].out, *side.in};
  const std::uint64_t bytes = pull.blocks.size() * settings_.bytes_per_block;
  const auto index = first_record_ + static_cast<std::uint32_t>(records_.size());
  const bool ordered = side.to_fail > 0;
  if (ordered) --side.to_fail;
  const bool fails = ordered || draws_failure(pull.request);
  records_.push_back({pull.request, pull.peer_request, pull.peer, reader, bytes, now_ns, kNever, fails});
  hub_.start(now_ns, path, bytes, Priority::Demand, *this, {0, index, 0});
}

void HandOffNet::move(std::uint32_t from, std::uint32_t to, std::uint64_t bytes, std::int64_t now_ns,
                      TransferOwner& owner, const Purpose& purpose) {
  const std::array path{*sides_.at(from).out, *sides_.at(to).in};
  hub_.start(now_ns, path, bytes, Priority::Demand, owner, purpose);
}

void HandOffNet::landed(const Purpose& purpose, std::int64_t time_ns) {
  HandOffRecord& record = records_[purpose.index - first_record_];
  record.landed_ns = time_ns;
  receive(record.to, {time_ns, record.request, record.failed});
  if (!record.failed) notify(record.from, record.peer_request, time_ns);
}

void HandOffNet::receive(std::uint32_t worker, const Note& note) {
  Side& side = sides_[worker];
  side.received.push_back(note);
  side.failed += note.failed ? 1 : 0;
  reached_.push_back(worker);
}

void HandOffNet::set_failure_rate(double rate, std::uint64_t seed) {
  if (!(rate >= 0 && rate <= 1)) {
    throw Error(ErrorKind::ConfigError, "transfer_failure_rate must be in [0, 1], got ", rate);
  }
  failure_rate_ = rate;
  failure_seed_ = seed;
}

bool HandOffNet::draws_failure(RequestId request) const noexcept {
  if (failure_rate_ <= 0) return false;
  return static_cast<double>(xxh3_64_pair(request, 0, failure_seed_) >> 11) * 0x1p-53 < failure_rate_;
}

void HandOffNet::notify(std::uint32_t worker, RequestId request, std::int64_t now_ns) {
  if (reaches(worker)) {
    note(worker, request, now_ns);
  } else {
    sides_[worker].waiting_notes.push_back(request);
  }
}

void HandOffNet::heartbeat(std::uint32_t worker, Heartbeat heartbeat) {
  if (reaches(worker)) sides_[worker].heartbeats.push_back(std::move(heartbeat));
}

// A poll at the very time of a notification does not see it, in whatever order workers are run.
void HandOffNet::note(std::uint32_t worker, RequestId request, std::int64_t now_ns) {
  sides_[worker].notes.push_back({now_ns + 1, request});
  reached_.push_back(worker);
}

std::vector<HandOffRecord> HandOffNet::take_ended() {
  std::vector<HandOffRecord> ended;
  while (!records_.empty() && records_.front().landed_ns != kNever) {
    ended.push_back(records_.front());
    records_.pop_front();
    ++first_record_;
  }
  return ended;
}

// ── Polls ──

void HandOffNet::take_received(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out,
                               std::vector<RequestId>& failed) {
  out.clear();
  failed.clear();
  std::vector<Note>& from = sides_[worker].received;
  std::size_t seen = 0;
  for (; seen < from.size() && from[seen].time_ns <= now_ns; ++seen) {
    out.push_back(from[seen].request);
    if (from[seen].failed) failed.push_back(from[seen].request);
  }
  sides_[worker].failed -= static_cast<std::uint32_t>(failed.size());
  from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(seen));
}

void HandOffNet::take_notes(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out) {
  out.clear();
  std::vector<Note>& from = sides_[worker].notes;
  std::size_t seen = 0;
  for (; seen < from.size() && from[seen].time_ns <= now_ns; ++seen) out.push_back(from[seen].request);
  from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(seen));
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
  std::int64_t next = side.poll_from_ns;
  if (!side.received.empty()) next = std::min(next, side.received.front().time_ns);
  if (!side.notes.empty()) next = std::min(next, side.notes.front().time_ns);
  return next;
}

}  // namespace understudy
