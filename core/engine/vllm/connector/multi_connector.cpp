#include "engine/vllm/connector/multi_connector.hpp"

#include <algorithm>

namespace understudy {

namespace {

template <typename Values>
void append(std::vector<Values>& out, const std::vector<Values>& more) {
  out.insert(out.end(), more.begin(), more.end());
}

}  // namespace

bool MultiConnector::loads() const noexcept {
  return std::ranges::any_of(children_, [](const auto& child) { return child->loads(); });
}

bool MultiConnector::produces() const noexcept {
  return std::ranges::any_of(children_, [](const auto& child) { return child->produces(); });
}

bool MultiConnector::consumes() const noexcept {
  return std::ranges::any_of(children_, [](const auto& child) { return child->consumes(); });
}

void MultiConnector::on_new_request(const EngineRequest& request) {
  for (const auto& child : children_) child->on_new_request(request);
}

// All children are asked, even behind a hit; the first that has tokens is chosen. One without an answer ends the
// lookup.
std::optional<std::uint32_t> MultiConnector::get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                                        std::int64_t now_ns) {
  MultiLog::Lookup lookup{request.id, local, 0, {}};
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const std::optional<std::uint32_t> tokens = children_[i]->get_num_new_matched_tokens(request, local, now_ns);
    if (logs_) lookup.answers.push_back(tokens);
    if (!tokens) {
      lookup.result.reset();
      break;
    }
    if (*tokens == 0 || lookup.result != 0u) continue;
    lookup.result = tokens;
    chosen_[request.id] = i;
  }
  const std::optional<std::uint32_t> result = lookup.result;
  if (logs_) log_.lookups.push_back(std::move(lookup));
  return result;
}

void MultiConnector::update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                              std::int64_t now_ns) {
  const auto chosen = chosen_.find(request.id);
  std::vector<std::uint32_t> told;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const std::uint32_t tokens = chosen != chosen_.end() && chosen->second == i ? external : 0;
    children_[i]->update_state_after_alloc(request, local, tokens, now_ns);
    if (logs_) told.push_back(tokens);
  }
  if (logs_) log_.told.emplace_back(request.id, std::move(told));
}

void MultiConnector::handle_preemption(const EngineRequest& request) {
  for (const auto& child : children_) child->handle_preemption(request);
}

void MultiConnector::on_scheduled(const ScheduledEntry& entry) {
  for (const auto& child : children_) child->on_scheduled(entry);
}

std::unique_ptr<ConnectorMetadata> MultiConnector::build_connector_meta(std::int64_t now_ns) {
  auto meta = std::make_unique<MultiMetadata>();
  bool any = false;
  for (const auto& child : children_) {
    meta->children.push_back(child->build_connector_meta(now_ns));
    any = any || meta->children.back() != nullptr;
  }
  return any ? std::move(meta) : nullptr;
}

bool MultiConnector::request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  std::size_t keepers = 0;
  for (const auto& child : children_) keepers += child->request_finished(request, aborted, now_ns) ? 1 : 0;
  if (keepers > 1) extra_async_saves_[request.id] = keepers - 1;
  chosen_.erase(request.id);
  return keepers > 0;
}

void MultiConnector::update_connector_output(const ConnectorOutput& output) {
  for (const auto& child : children_) child->update_connector_output(output);
}

bool MultiConnector::reset_cache() {
  bool done = true;
  for (const auto& child : children_) done = child->reset_cache() && done;
  return done;
}

void MultiConnector::poll(ConnectorOutput& output, std::int64_t now_ns) {
  for (const auto& child : children_) {
    ConnectorOutput found;
    child->poll(found, now_ns);
    for (const RequestId id : found.sent) {
      const auto extra = extra_async_saves_.find(id);
      if (extra == extra_async_saves_.end()) {
        output.sent.push_back(id);
      } else if (--extra->second == 0) {
        extra_async_saves_.erase(extra);
      }
    }
    append(output.received, found.received);
    append(output.failed, found.failed);
    append(output.jobs, found.jobs);
    output.expired += found.expired;
  }
}

std::int64_t MultiConnector::start_step(std::unique_ptr<ConnectorMetadata> meta, ConnectorOutput& output,
                                        std::int64_t now_ns) {
  auto* const given = static_cast<MultiMetadata*>(meta.get());
  std::int64_t ready_ns = now_ns;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    std::unique_ptr<ConnectorMetadata> orders = given != nullptr ? std::move(given->children[i]) : nullptr;
    ready_ns = std::max(ready_ns, children_[i]->start_step(std::move(orders), output, now_ns));
  }
  return ready_ns;
}

bool MultiConnector::polls() const noexcept {
  return std::ranges::any_of(children_, [](const auto& child) { return child->polls(); });
}

std::int64_t MultiConnector::next_event_ns() const {
  std::int64_t next = kNever;
  for (const auto& child : children_) next = std::min(next, child->next_event_ns());
  return next;
}

bool MultiConnector::sends_at(std::int64_t now_ns) const {
  return std::ranges::any_of(children_, [now_ns](const auto& child) { return child->sends_at(now_ns); });
}

bool MultiConnector::has_failed() const {
  return std::ranges::any_of(children_, [](const auto& child) { return child->has_failed(); });
}

bool MultiConnector::has_pending_work() const {
  return std::ranges::any_of(children_, [](const auto& child) { return child->has_pending_work(); });
}

void MultiConnector::check() const {
  for (const auto& child : children_) child->check();
}

}  // namespace understudy
