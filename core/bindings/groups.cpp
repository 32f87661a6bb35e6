// KV cache groups in Python: their settings, the sizes that follow, and what recordings show of them.
#include "engine/vllm/groups/kv_group.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "engine/vllm/view.hpp"

#include "bindings.hpp"
#include "convert.hpp"
#include "exclusive_class.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

constexpr std::pair<const char*, GroupKind> kKinds[] = {
    {"full", GroupKind::Full},
    {"mla", GroupKind::Mla},
    {"sliding_window", GroupKind::SlidingWindow},
    {"sliding_window_mla", GroupKind::SlidingWindowMla},
    {"chunked_local", GroupKind::ChunkedLocal},
    {"mamba", GroupKind::State},
    {"rswa", GroupKind::Rswa},
    {"circular", GroupKind::Circular},
};

GroupKind read_kind(const std::string& name) {
  std::string known;
  for (const auto& [kind, value] : kKinds) {
    if (name == kind) return value;
    known.append(known.empty() ? "" : ", ").append(kind);
  }
  throw Error(ErrorKind::ConfigError, "groups: kind must be one of ", known, "; got '", name, "'");
}

std::uint32_t read_tokens(nb::handle value, const char* field) {
  return static_cast<std::uint32_t>(read_uint(value, field, std::uint64_t{1} << 30));
}

void make_group(KvGroup* self, const std::string& kind, Int block_size, Int window, Int chunk, bool align,
                Int checkpoint_blocks, Int checkpoint_alignment, bool bounded_replay) {
  new (self) KvGroup{read_kind(kind),
                     read_tokens(block_size, "block_size"),
                     read_tokens(window, "window"),
                     read_tokens(chunk, "chunk"),
                     align,
                     read_tokens(checkpoint_blocks, "checkpoint_blocks"),
                     read_tokens(checkpoint_alignment, "checkpoint_alignment"),
                     bounded_replay};
}

VllmConfig with_groups(const VllmConfig& self, std::vector<KvGroup> groups, Int prefix_match_unit,
                       Int retention_interval, bool group_events, bool event_ranges) {
  VllmConfig config = self;
  config.groups = std::move(groups);
  config.prefix_match_unit = read_tokens(prefix_match_unit, "prefix_match_unit");
  config.prefix_cache_retention_interval.reset();
  if (!retention_interval.is_none()) {
    config.prefix_cache_retention_interval = read_tokens(retention_interval, "prefix_cache_retention_interval");
  }
  config.block_size = layout_of(config).hash_block;
  config.group_events = group_events;
  config.event_ranges = event_ranges;
  return config;
}

GroupedBackend& grouped(VllmEngine& engine) {
  if (GroupedBackend* const groups = VllmParts(engine).grouped(); groups != nullptr) return *groups;
  throw Error(ErrorKind::WrongState, "the engine has one KV cache group; configure several");
}

using EventRow = std::tuple<bool, std::uint8_t, std::uint32_t, std::optional<std::uint64_t>, std::uint32_t,
                            std::uint32_t, std::uint64_t, std::vector<std::uint64_t>, std::vector<std::uint32_t>>;

std::vector<EventRow> take_group_events(VllmEngine& self) {
  std::vector<EventRow> rows;
  for (GroupEvent& e : grouped(self).take_events()) {
    if (!e.stored) {  // a row per key
      for (const std::uint64_t hash : e.hashes) {
        rows.emplace_back(false, e.group, 0, std::nullopt, 0, 0, 0, std::vector{hash}, std::vector<std::uint32_t>());
      }
      continue;
    }
    const std::optional<std::uint64_t> parent = e.has_parent ? std::optional(e.parent) : std::nullopt;
    rows.emplace_back(e.stored, e.group, e.block_size, parent, e.position, e.length, e.request, std::move(e.hashes),
                      std::move(e.ends));
  }
  return rows;
}

}  // namespace

void bind_engine_groups(ExclusiveClass<VllmEngine, Engine>& engine) {
  engine
      .def(
          "held_by_group", [](VllmEngine& self) { return grouped(self).held(VllmView(self).running_slots()); },
          "Blocks that running requests hold, by KV cache group.")
      .def_prop_ro(
          "block_copies", [](VllmEngine& self) { return grouped(self).copies(); },
          "(source, destination) of the copies that the last schedule ordered.")
      .def("take_group_events", &take_group_events,
           "Take (stored, group, block size, parent, position, tokens, request, hashes, ends) of every change of keys.")
      .def(
          "group_hits",
          [](VllmEngine& self, bool preempted) {
            const GroupHitStats& stats = grouped(self).stats(preempted);
            return std::tuple(stats.requests, stats.queries, stats.hits);
          },
          "preempted"_a, "(admissions, tokens looked up, tokens found), of requests preempted before or of others.");
}

void bind_groups(nb::module_& m) {
  nb::class_<KvGroup>(m, "KvGroup", "One KV cache group: layers of a kind, with a block size of their own.")
      .def("__init__", &make_group, "kind"_a, nb::kw_only(), "block_size"_a = 16, "window"_a = 0, "chunk"_a = 0,
           "align"_a = true, "checkpoint_blocks"_a = 0, "checkpoint_alignment"_a = 1, "bounded_replay"_a = false)
      .def_ro("block_size", &KvGroup::block_size);
  nb::class_<GroupLayout>(m, "GroupLayout", "Sizes in tokens that follow from KV cache groups, as vLLM derives them.")
      .def(
          "__init__", [](GroupLayout* self, const VllmConfig& config) { new (self) GroupLayout(layout_of(config)); },
          "config"_a)
      .def_ro("scheduler_block_size", &GroupLayout::scheduler_block)
      .def_ro("hash_block_size", &GroupLayout::hash_block)
      .def_ro("hit_unit", &GroupLayout::hit_unit, "Hits end at multiples of this many tokens.")
      .def_ro("block_size", &GroupLayout::block)
      .def_ro("partial_hits", &GroupLayout::partial_hits)
      .def_ro("max_in_flight_tokens", &GroupLayout::in_flight)
      .def_ro("admission_caps", &GroupLayout::caps)
      .def_prop_ro(
          "blocks_per_request", [](const GroupLayout& self) { return self.blocks_per_request(self.max_model_len); },
          "Blocks that vLLM's start-up plans for a request of max_model_len tokens.");
  m.def("with_groups", &with_groups, "config"_a, "groups"_a, nb::kw_only(), "prefix_match_unit"_a = 0,
        "prefix_cache_retention_interval"_a.none() = 0, "group_events"_a = false, "event_ranges"_a = false,
        "A copy with these KV cache groups; its block_size is their unit of hashing. `group_events`: events are read "
        "with take_group_events. `event_ranges`: the raw stream has a row for every unit of hashing of an event.");
}

}  // namespace understudy
