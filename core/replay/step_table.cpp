#include "replay/step_table.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

StepTable::Worker& StepTable::at(std::size_t worker) {
  if (worker >= workers_.size()) workers_.resize(worker + 1);
  return workers_[worker];
}

void StepTable::add_event(std::int64_t now_ns, std::size_t worker, StepEventKind kind, RequestId request) {
  columns_.event_ns.push_back(now_ns);
  columns_.event_worker.push_back(static_cast<std::int32_t>(worker));
  columns_.event_kind.push_back(static_cast<std::uint8_t>(kind));
  columns_.event_request.push_back(static_cast<std::int64_t>(request));
  columns_.event_other.push_back(-1);
  columns_.event_cached.push_back(0);
}

void StepTable::place(RequestId request, std::size_t worker, std::int64_t now_ns) {
  add_event(now_ns, worker, StepEventKind::Placed, request);
}

void StepTable::split(std::size_t worker) { at(worker).extends = false; }

void StepTable::record(std::size_t index, Engine& engine, bool ended, std::int64_t now_ns) {
  Worker& worker = at(index);
  if (ended) {
    if (worker.is_open) close(worker, now_ns);
    return;
  }
  StepView& view = worker.view;
  view.clear();
  engine.describe_step(view);
  for (const StepPreemption& one : view.preempted) {
    add_event(now_ns, index, StepEventKind::Preempted, one.request);
    columns_.event_other.back() = static_cast<std::int64_t>(one.by);
  }
  for (const StepAdmission& one : view.admitted) {
    add_event(now_ns, index, one.resumed ? StepEventKind::Resumed : StepEventKind::Admitted, one.request);
    columns_.event_cached.back() = one.cached_tokens;
  }
  worker.is_open = view.is_open;
  worker.begin_ns = now_ns;
}

// Whether the open step decodes the next tokens of the last batch.
bool StepTable::continues(const Worker& worker) {
  if (!worker.extends) return false;
  const std::vector<StepEntry>& entries = worker.view.entries;
  const std::size_t first = worker.batches.back();
  if (worker.entries.size() - first != entries.size()) return false;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Entry& before = worker.entries[first + i];
    const StepEntry& now = entries[i];
    if (before.request != now.request || !before.decodes || !now.decodes || before.tokens != now.tokens ||
        before.before + worker.batch_steps * before.tokens != now.before) {
      return false;
    }
  }
  return true;
}

void StepTable::close(Worker& worker, std::int64_t end_ns) {
  worker.is_open = false;
  const StepView& view = worker.view;
  const std::int64_t duration_ns = end_ns - worker.begin_ns;
  if (continues(worker)) {
    ++worker.batch_steps;
  } else {
    worker.batches.push_back(worker.entries.size());
    worker.batch_steps = 1;
    for (const StepEntry& one : view.entries) {
      worker.entries.push_back({one.request, one.tokens, one.before, one.decodes, 0});
    }
  }
  worker.extends = true;
  Entry* const entries = worker.entries.data() + worker.batches.back();
  const std::int64_t compute_ns = std::min(view.compute_ns, duration_ns);
  for (std::size_t i = 0; i < view.entries.size(); ++i) {
    entries[i].own_ns += std::min(view.entries[i].alone_ns, compute_ns);
  }
  for (const RequestId request : view.loading) worker.loading.emplace_back(worker.steps.size(), request);
  worker.steps.push_back({worker.begin_ns, end_ns, compute_ns, std::min(view.decodes_ns, compute_ns),
                          worker.batches.size() - 1, static_cast<std::uint32_t>(view.running),
                          static_cast<std::uint32_t>(view.waiting), view.active_blocks, view.stop, view.head});
  ++num_steps_;
}

StepTable::Columns StepTable::take() {
  Columns out = std::move(columns_);
  std::int64_t first_batch = 0;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    Worker& worker = workers_[index];
    for (const auto& [step, request] : worker.loading) {
      out.loading_step.push_back(static_cast<std::int64_t>(out.begin_ns.size() + step));
      out.loading_request.push_back(static_cast<std::int64_t>(request));
    }
    for (const Step& step : worker.steps) {
      out.worker.push_back(static_cast<std::int32_t>(index));
      out.begin_ns.push_back(step.begin_ns);
      out.end_ns.push_back(step.end_ns);
      out.compute_ns.push_back(step.compute_ns);
      out.decodes_ns.push_back(step.decodes_ns);
      out.batch.push_back(first_batch + static_cast<std::int64_t>(step.batch));
      out.running.push_back(static_cast<std::int32_t>(step.running));
      out.waiting.push_back(static_cast<std::int32_t>(step.waiting));
      out.active_blocks.push_back(static_cast<std::int64_t>(step.active_blocks));
      out.stop.push_back(static_cast<std::uint8_t>(step.stop));
      out.head.push_back(step.head == StepView::kNoRequest ? -1 : static_cast<std::int64_t>(step.head));
    }
    for (std::size_t batch = 0; batch < worker.batches.size(); ++batch) {
      const std::size_t end = batch + 1 < worker.batches.size() ? worker.batches[batch + 1] : worker.entries.size();
      for (std::size_t i = worker.batches[batch]; i < end; ++i) {
        const Entry& entry = worker.entries[i];
        out.entry_batch.push_back(first_batch + static_cast<std::int64_t>(batch));
        out.entry_request.push_back(static_cast<std::int64_t>(entry.request));
        out.entry_tokens.push_back(static_cast<std::int32_t>(entry.tokens));
        out.entry_before.push_back(static_cast<std::int32_t>(entry.before));
        out.entry_decodes.push_back(entry.decodes ? 1 : 0);
        out.entry_own_ns.push_back(entry.own_ns);
      }
    }
    first_batch += static_cast<std::int64_t>(worker.batches.size());
    worker = {};
  }
  columns_ = {};
  workers_.clear();
  num_steps_ = 0;
  return out;
}

}  // namespace understudy
