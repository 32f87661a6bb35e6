// Prefill and decode pools in Python: who computes a prompt, over which links, and what became of each request.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "replay/disaggregation.hpp"
#include "replay/handoff_columns.hpp"
#include "router.hpp"

namespace understudy {

void bind_disaggregation(nb::module_& m);

namespace {

using namespace nb::literals;

// A decider of Python's: an object with remote(prompt_tokens, cached_tokens, session).
class UserDecider final : public Decider {
 public:
  explicit UserDecider(nb::object user) : user_(std::move(user)) {}
  UserDecider(const UserDecider&) = delete;
  UserDecider& operator=(const UserDecider&) = delete;
  ~UserDecider() override {
    const nb::gil_scoped_acquire gil;
    user_.reset();
  }
  bool remote(const RouteRequest& request, std::uint32_t cached_tokens) override {
    const nb::gil_scoped_acquire gil;
    const nb::object answer = user_.attr("remote")(request.prompt_tokens, cached_tokens, request.session);
    if (nb::isinstance<nb::bool_>(answer)) return nb::cast<bool>(answer);
    throw Error(ErrorKind::PolicyError, "remote() must return True or False");
  }

 private:
  nb::object user_;
};

std::shared_ptr<Decider> make_rule(std::uint32_t prompt_tokens, std::uint32_t uncached_tokens, double uncached_share,
                                   bool either) {
  auto rule = std::make_shared<UncachedRule>();
  rule->prompt_tokens = prompt_tokens;
  rule->uncached_tokens = uncached_tokens;
  rule->uncached_share = uncached_share;
  rule->either = either;
  return rule;
}

}  // namespace

void bind_disaggregation(nb::module_& m) {
  nb::class_<Decider>(m, "Decider", "Decides whether a prefill worker computes the prompt of a request.");
  m.def(
      "uncached_rule", &make_rule, nb::kw_only(), "prompt_tokens"_a = 0, "uncached_tokens"_a = 0,
      "uncached_share"_a = 0.0, "either"_a = false,
      "Remote if the prompt has `prompt_tokens`, and the decode worker lacks `uncached_tokens` and `uncached_share` of "
      "it; with `either`, one of both is enough.");
  m.def(
      "user_decider", [](nb::object user) { return std::shared_ptr<Decider>(new UserDecider(std::move(user))); },
      "user"_a, "An object with remote(prompt_tokens, cached_tokens, session) as a decider.");
  nb::class_<HandOffLinks>(m, "HandOffLinks", "Links of hand-offs, 10^9 bytes per second; infinity: no limit.")
      .def(
          "__init__",
          [](HandOffLinks* self, double out_gbps, double in_gbps, double backend_gbps, std::int64_t fixed_ns,
             nb::handle bytes_per_block) {
            new (self) HandOffLinks{out_gbps, in_gbps, backend_gbps, fixed_ns,
                                    read_uint(bytes_per_block, "bytes_per_block", std::uint64_t{1} << 38)};
          },
          nb::kw_only(), "out_gbps"_a, "in_gbps"_a, "backend_gbps"_a, "fixed_ns"_a, "bytes_per_block"_a);
  nb::class_<Disaggregation>(m, "Disaggregation", "How requests are divided between prefill and decode pools.")
      .def(
          "__init__",
          [](Disaggregation* self, nb::handle decode_routing, nb::handle seed, std::shared_ptr<Decider> decider,
             bool decode_first, std::int64_t hop_ns, const HandOffLinks& links) {
            new (self) Disaggregation{read_router(decode_routing, read_uint(seed, "seed")), std::move(decider),
                                      decode_first, hop_ns, links};
          },
          nb::kw_only(), "decode_routing"_a, "seed"_a, "decider"_a, "decode_first"_a, "hop_ns"_a, "links"_a);

  nb::class_<HandOffColumns> columns(m, "HandOffColumns", "One row a request; -1 for what never happened.");
  const auto add = [&](const char* name, auto member) {
    columns.def_prop_ro(name, [member](const HandOffColumns& self) { return to_array(self.*member); });
  };
  add("way", &HandOffColumns::way);
  add("prefill_worker", &HandOffColumns::prefill_worker);
  add("prefill_admit_ns", &HandOffColumns::prefill_admit_ns);
  add("prefill_done_ns", &HandOffColumns::prefill_done_ns);
  add("decode_arrival_ns", &HandOffColumns::decode_arrival_ns);
  add("posted_ns", &HandOffColumns::posted_ns);
  add("landed_ns", &HandOffColumns::landed_ns);
  add("bytes", &HandOffColumns::bytes);
  add("decode_admit_ns", &HandOffColumns::decode_admit_ns);
}

}  // namespace understudy
