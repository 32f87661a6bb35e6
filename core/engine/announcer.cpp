#include "engine/announcer.hpp"

namespace understudy {

void Announcer::show(std::int64_t now_ns) {
  if (!on_) return;
  std::span<const EventRecord> shown;
  store_.read_events([&](std::span<const EventRecord> told) { shown = log_.show(told, now_ns, !holds_); });
  if (shown.empty()) return;
  if (config_.check) {
    truth_.apply(shown, now_ns);
    truth_.require_equal(store_, EventTruth::Scope::Below);
  }
  if (!config_.events) {
    log_.take_visible(unheard_);
  } else if (on_events_) {
    on_events_(now_ns);
  }
}

DrainedEvents Announcer::take_all() {
  log_.add(store_.drain_events(~std::size_t{0}));
  return log_.take_all();
}

DrainedEvents Announcer::peek_new() {
  log_.add(store_.drain_events(~std::size_t{0}));
  return log_.peek_new();
}

void Announcer::check(EventTruth::Scope scope) {
  if (config_.check && on_) truth_.require_equal(store_, scope);
}

}  // namespace understudy
