// Depths of reuse in Python: a request a call.
#include "store/reuse_stack.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "convert.hpp"

namespace understudy {

using namespace nb::literals;

void bind_reuse_stack(nb::module_& m) {
  nb::class_<ReuseStack>(m, "ReuseStack",
                         "Depths at which requests, served one after the other, find their blocks in the order of use.")
      .def(nb::init<>())
      .def(
          "serve",
          [](ReuseStack& self, const Identities& identities, nb::handle readable, nb::handle held) {
            self.serve(identities.span(), read_uint(readable, "readable", 0xFFFFFFFFu),
                       read_uint(held, "held", 0xFFFFFFFFu));
          },
          "identities"_a, "readable"_a, "held"_a,
          "Serve a request that holds `held` blocks at its end, can show `identities` to others, and may find its "
          "first `readable` ones.")
      .def(
          "depths", [](const ReuseStack& self) { return to_array(std::vector<std::uint32_t>(self.depths())); },
          "For every hit: size in blocks of the smallest LRU cache that would have had it.")
      .def("__len__", &ReuseStack::live, "Blocks that a cache without limits would hold by now.");
}

}  // namespace understudy
