#include "engine/vllm/offload_links.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace understudy {

std::int64_t OffloadLinks::begin(const OffloadOrders& orders, const OffloadConnector& connector, std::int64_t now_ns) {
  const auto flushed = [&](JobId id) { return std::ranges::binary_search(orders.flush, id); };
  for (const JobId id : std::exchange(unsubmitted_, {})) submit(kDown, id, connector, now_ns);
  for (const JobId id : orders.stores) {
    if (flushed(id)) {
      submit(kDown, id, connector, now_ns);
    } else {
      unsubmitted_.push_back(id);
    }
  }
  for (const JobId id : orders.loads) submit(kUp, id, connector, now_ns);
  if (orders.flush.empty()) return now_ns;

  // All stores up to the last flushed one must be finished.
  std::size_t last = 0;
  for (std::size_t i = 0; i < queues_[kDown].size(); ++i) {
    if (flushed(queues_[kDown][i].id)) last = i + 1;
  }
  if (last == 0 || hub_.failed()) return now_ns;
  std::int64_t until_ns = std::max(now_ns, hub_.links().deadline_ns(under_way_));
  for (std::size_t i = 1; i < last; ++i) {
    const double flow_ns = static_cast<double>(queues_[kDown][i].bytes) / down_.bandwidth_gbps;
    until_ns += down_.fixed_ns + static_cast<std::int64_t>(std::ceil(flow_ns));
  }
  return until_ns;
}

std::vector<JobId> OffloadLinks::take_done() {
  std::vector<JobId> done = std::exchange(done_[kDown], {});
  done.insert(done.end(), done_[kUp].begin(), done_[kUp].end());
  done_[kUp].clear();
  for (std::vector<std::int64_t>& times : done_ns_) times.clear();
  return done;
}

std::vector<JobId> OffloadLinks::take_first_done(std::int64_t& time_ns) {
  time_ns = std::numeric_limits<std::int64_t>::max();
  for (const std::vector<std::int64_t>& times : done_ns_) {
    if (!times.empty()) time_ns = std::min(time_ns, times.front());
  }
  std::vector<JobId> first;
  for (const Direction direction : {kDown, kUp}) {
    std::vector<std::int64_t>& times = done_ns_[direction];
    const auto later = std::ranges::upper_bound(times, time_ns);
    const auto taken = done_[direction].begin() + (later - times.begin());
    first.insert(first.end(), done_[direction].begin(), taken);
    done_[direction].erase(done_[direction].begin(), taken);
    times.erase(times.begin(), later);
  }
  return first;
}

void OffloadLinks::submit(Direction direction, JobId id, const OffloadConnector& connector, std::int64_t now_ns) {
  std::deque<Job>& queue = queues_[direction];
  queue.push_back({id, connector.job(id).device.size() * bytes_per_block_, now_ns});
  if (queue.size() == 1) start(direction, now_ns);
}

void OffloadLinks::start(Direction direction, std::int64_t now_ns) {
  const LinkId path[] = {ways_[direction]};
  const TransferId id =
      hub_.start(now_ns, path, queues_[direction].front().bytes,
                 direction == kUp ? Priority::Demand : Priority::Background, *this, {direction, 0, 0});
  started_ns_[direction] = now_ns;
  if (direction == kDown) under_way_ = id;
}

void OffloadLinks::landed(const Purpose& purpose, std::int64_t time_ns) {
  const auto direction = static_cast<Direction>(purpose.role);
  std::deque<Job>& queue = queues_[direction];
  const Job job = queue.front();
  queue.pop_front();
  done_[direction].push_back(job.id);
  done_ns_[direction].push_back(time_ns);
  if (samples_ != nullptr) {
    (direction == kUp ? samples_->loads : samples_->stores).push_back({job.bytes, time_ns - started_ns_[direction]});
  }
  if (direction == kUp && keeps_load_times_) load_ns_.push_back(time_ns - job.asked_ns);
  if (!queue.empty()) start(direction, time_ns);
}

}  // namespace understudy
