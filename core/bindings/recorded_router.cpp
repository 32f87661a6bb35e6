// A router's choices with the workers that it chose from, as columns.
#include <algorithm>
#include <memory>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "exclusive_class.hpp"
#include "named.hpp"
#include "router.hpp"
#include "router/recorded_router.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

template <typename T>
Array<T> choices_of(const RecordedRouter& self, T (*read)(const RecordedChoice&)) {
  std::vector<T> out(self.choices().size());
  std::ranges::transform(self.choices(), out.begin(), read);
  return to_array(std::move(out));
}

Array<std::int64_t> candidates_of(const RecordedRouter& self, std::uint64_t (*read)(const RecordedCandidate&)) {
  std::vector<std::int64_t> out;
  out.reserve(self.candidates().size());
  for (const RecordedCandidate& candidate : self.candidates())
    out.push_back(static_cast<std::int64_t>(read(candidate)));
  return to_array(std::move(out));
}

}  // namespace

void bind_recorded_router(nb::module_& m) {
  ExclusiveClass<RecordedRouter, Router>(m, "RecordedRouter",
                                         "Records another router's choices; one caller or run at a time (WrongState).")
      .def_new(
          [](RoutingArg router, Int seed, bool keep_candidates) {
            return std::make_shared<RecordedRouter>(read_router(router, read_uint(seed, "seed")), keep_candidates);
          },
          "router"_a, nb::kw_only(), "seed"_a = 0, "keep_candidates"_a = false)
      .def_prop_ro("rows",
                   [](const RecordedRouter& self) {
                     return choices_of<std::int64_t>(
                         self, [](const RecordedChoice& one) { return static_cast<std::int64_t>(one.row); });
                   })
      .def_prop_ro("time_ns",
                   [](const RecordedRouter& self) {
                     return choices_of<std::int64_t>(self, [](const RecordedChoice& one) { return one.time_ns; });
                   })
      .def_prop_ro("worker",
                   [](const RecordedRouter& self) {
                     return choices_of<std::int32_t>(
                         self, [](const RecordedChoice& one) { return static_cast<std::int32_t>(one.worker); });
                   })
      .def_prop_ro("true_overlap_blocks",
                   [](const RecordedRouter& self) {
                     return choices_of<std::int32_t>(
                         self, [](const RecordedChoice& one) { return static_cast<std::int32_t>(one.overlap); });
                   })
      .def_prop_ro("best_true_overlap_blocks",
                   [](const RecordedRouter& self) {
                     return choices_of<std::int32_t>(
                         self, [](const RecordedChoice& one) { return static_cast<std::int32_t>(one.best_overlap); });
                   })
      .def_prop_ro(
          "candidate_ends",
          [](const RecordedRouter& self) {
            return choices_of<std::int64_t>(
                self, [](const RecordedChoice& one) { return static_cast<std::int64_t>(one.end_of_candidates); });
          },
          "By choice: end of its candidates in the following columns; each begins where the one before ends.")
      .def_prop_ro("candidate_workers",
                   [](const RecordedRouter& self) {
                     return candidates_of(
                         self, [](const RecordedCandidate& one) { return static_cast<std::uint64_t>(one.worker); });
                   })
      .def_prop_ro("candidate_requests",
                   [](const RecordedRouter& self) {
                     return candidates_of(self,
                                          [](const RecordedCandidate& one) { return one.load.outstanding_requests; });
                   })
      .def_prop_ro("candidate_tokens",
                   [](const RecordedRouter& self) {
                     return candidates_of(self,
                                          [](const RecordedCandidate& one) { return one.load.outstanding_tokens; });
                   })
      .def_prop_ro("candidate_overlap_blocks", [](const RecordedRouter& self) {
        return candidates_of(self, [](const RecordedCandidate& one) { return std::uint64_t{one.overlap}; });
      });
}

}  // namespace understudy
