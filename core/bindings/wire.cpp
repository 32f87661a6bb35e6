// Messages of KV events, read into columns without an object a block.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "base/errors.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "events/wire_columns.hpp"

namespace understudy {

namespace {

template <auto Column>
auto column(const WireColumns& self) {
  return to_array(std::vector(self.*Column));
}

WireColumns read_wire(const nb::typed<nb::sequence, nb::bytes>& payloads) {
  std::vector<nb::bytes> held;
  for (nb::handle payload : payloads) {
    if (!nb::isinstance<nb::bytes>(payload)) throw Error(ErrorKind::InvalidArgument, "payloads must be bytes");
    held.push_back(nb::borrow<nb::bytes>(payload));
  }
  WireColumns out;
  const nb::gil_scoped_release released;
  for (const nb::bytes& payload : held) {
    out.read({static_cast<const std::uint8_t*>(payload.data()), payload.size()});
  }
  return out;
}

}  // namespace

void bind_wire(nb::module_& m) {
  nb::class_<WireColumns>(m, "WireColumns", "Events of many messages, one row per event, and the unreadable parts.")
      .def_prop_ro("kinds", &column<&WireColumns::kinds>)
      .def_prop_ro("tiers", &column<&WireColumns::tiers>)
      .def_prop_ro("parents", &column<&WireColumns::parents>)
      .def_prop_ro("offsets", &column<&WireColumns::offsets>)
      .def_prop_ro("sequence_hashes", &column<&WireColumns::sequence_hashes>)
      .def_prop_ro("local_hashes", &column<&WireColumns::local_hashes>)
      .def_prop_ro("ts", &column<&WireColumns::ts>, "Seconds, by message.")
      .def_prop_ro("ranks", &column<&WireColumns::ranks>, "By message; -1: none.")
      .def_ro("malformed", &WireColumns::malformed, "Messages that are no batch.")
      .def_ro("bad_events", &WireColumns::bad_events)
      .def_ro("ignored_events", &WireColumns::ignored_events);
  m.def("read_wire", &read_wire, nb::arg("payloads"),
        "Payloads of messages (bytes), of whichever dialect, as columns. Nothing in them raises.");
}

}  // namespace understudy
