// Pushed KV between live servers in Python: requests, and messages between processes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/errors.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "engine/sglang/push_net.hpp"

namespace understudy {

void bind_push_net(nb::module_& m);

namespace {

using namespace nb::literals;

constexpr std::array kNews{"offered", "reported", "done", "failed", "drained"};

PushNews read_news(const std::string& name) {
  for (std::size_t i = 0; i < kNews.size(); ++i) {
    if (name == kNews[i]) return static_cast<PushNews>(i);
  }
  throw Error(ErrorKind::InvalidArgument, "news: '", name, "' is none of offered, reported, done, failed, drained");
}

PushNet::Side side_of(bool prefills) { return prefills ? PushNet::kPrefill : PushNet::kDecode; }

}  // namespace

void bind_push_net(nb::module_& m) {
  using Message = std::tuple<std::uint32_t, std::string, RequestId, std::uint32_t>;
  nb::class_<PushNet>(m, "PushNet", "KV that prefill servers push to decode servers of other processes.")
      .def(
          "set_limits",
          [](PushNet& self, std::int64_t boot_ns, std::int64_t wait_ns, std::int64_t drain_ns) {
            self.set_limits({boot_ns, wait_ns, drain_ns});
          },
          nb::kw_only(), "boot_ns"_a, "wait_ns"_a, "drain_ns"_a,
          "Set how long a prefill side waits for memory, and a decode side for KV and for an acknowledgement.")
      .def("set_far", &PushNet::set_far, "worker"_a, "Turn notices to a worker into messages.")
      .def(
          "open",
          [](PushNet& self, RequestId request, std::uint32_t worker, bool prefills, std::optional<std::uint32_t> far,
             bool connected, std::int64_t now_ns) {
            if (self.knows(request)) throw Error(ErrorKind::InvalidArgument, "request ", request, " is open already");
            self.open_far(request, side_of(prefills), worker, far.value_or(PushNet::kUnknown), connected, now_ns);
          },
          "request"_a, "worker"_a, nb::kw_only(), "prefills"_a, "far"_a.none() = nb::none(), "connected"_a = true,
          "now_ns"_a, "Open a request whose other side is in another process, before the engine gets it.")
      .def(
          "open_alone",
          [](PushNet& self, RequestId request, std::uint32_t worker, bool prefills) {
            if (self.knows(request)) throw Error(ErrorKind::InvalidArgument, "request ", request, " is open already");
            self.open_alone(request, side_of(prefills), worker);
          },
          "request"_a, "worker"_a, nb::kw_only(), "prefills"_a, "Open a request whose KV moves nowhere.")
      .def("connect", &PushNet::connect, "request"_a, "now_ns"_a, "Let a decode side go on: its peer is connected.")
      .def(
          "receive",
          [](PushNet& self, RequestId request, const std::string& news, std::uint32_t worker, std::uint32_t prefix,
             std::int64_t now_ns) { self.receive({worker, read_news(news), request, prefix}, now_ns); },
          "request"_a, "news"_a, "worker"_a, "prefix"_a, "now_ns"_a,
          "Receive a message of a far worker; one about an unknown request is ignored.")
      .def("lose", &PushNet::lose, "worker"_a, "now_ns"_a, "Fail the requests of a far worker that is lost.")
      .def("abandon", &PushNet::abandon, "worker"_a, "now_ns"_a, "Fail the requests of a worker whose engine died.")
      .def(
          "leave",
          [](PushNet& self, RequestId request, bool prefills, std::int64_t now_ns) {
            if (self.knows(request)) self.leave(request, side_of(prefills), now_ns);
          },
          "request"_a, nb::kw_only(), "prefills"_a, "now_ns"_a, "Forget a request that the engine refused.")
      .def(
          "take_messages",
          [](PushNet& self) {
            std::vector<Message> out;
            for (const PushMessage& one : self.take_messages()) {
              out.emplace_back(one.worker, kNews[static_cast<std::size_t>(one.news)], one.id, one.prefix);
            }
            return out;
          },
          "Take the messages to far workers: (worker, news, request, prefix).")
      .def("take_forgotten", &PushNet::take_forgotten, "Take the requests that no message names any more.");
}

}  // namespace understudy
