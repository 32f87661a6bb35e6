// Eviction policies by name, and policies written in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "convert.hpp"
#include "policy_config.hpp"

namespace understudy {

namespace {

constexpr std::pair<const char*, PolicyKind> kNames[] = {
    {"lineage", PolicyKind::Lineage},
    {"lineage_fifo", PolicyKind::LineageFifo},
    {"lru", PolicyKind::Lru},
    {"multi_lru", PolicyKind::MultiLru},
    {"fifo", PolicyKind::Fifo},
    {"vllm", PolicyKind::Vllm},
    {"vllm_append", PolicyKind::VllmAppend},
};

// Calls an object's on_freed, on_taken and select. The store calls it without its lock; it takes the GIL itself.
class PythonAdvisor final : public PolicyAdvisor {
 public:
  explicit PythonAdvisor(nb::object policy) : policy_(std::move(policy)) {}
  ~PythonAdvisor() override {
    if (Py_IsInitialized() == 0) {
      policy_.release();
      return;
    }
    nb::gil_scoped_acquire gil;
    policy_.reset();
  }

  nb::handle object() const noexcept { return policy_; }
  void forget() noexcept { policy_.reset(); }

  void observe(std::span<const PolicyChange> changes, std::size_t& observed) override {
    nb::gil_scoped_acquire gil;
    if (!policy_.is_valid()) throw Error(ErrorKind::PolicyError, "the eviction policy was garbage collected");
    for (auto at = changes.begin(); at != changes.end();) {
      const auto end = std::find_if(at, changes.end(), [&](const PolicyChange& c) { return c.freed != at->freed; });
      tell({at, end});
      observed += static_cast<std::size_t>(end - at);
      at = end;
    }
  }

  std::vector<SlotId> select(std::size_t count) override {
    nb::gil_scoped_acquire gil;
    const nb::object answer = policy_.attr("select")(count);
    try {
      const IntArray<std::uint32_t> ids(answer, "block ids");
      return {ids.span().begin(), ids.span().end()};
    } catch (const Error& error) {
      throw Error(ErrorKind::PolicyError, "the eviction policy's select() must return block ids: ", error.what());
    }
  }

 private:
  void tell(std::span<const PolicyChange> run) {
    std::vector<std::int32_t> blocks;
    for (const PolicyChange& change : run) blocks.push_back(static_cast<std::int32_t>(change.slot));
    if (!run.front().freed) {
      policy_.attr("on_taken")(to_array(std::move(blocks)));
      return;
    }
    nb::list lineage;
    for (const PolicyChange& change : run) {
      lineage.append(change.cached ? lineage_to_int(change.lineage) : nb::none());
    }
    policy_.attr("on_freed")(to_array(std::move(blocks)), lineage);
  }

  nb::object policy_;
};

}  // namespace

nb::handle policy_object(const PolicyAdvisor& advisor) noexcept {
  return static_cast<const PythonAdvisor&>(advisor).object();
}
void forget_policy(PolicyAdvisor& advisor) noexcept { static_cast<PythonAdvisor&>(advisor).forget(); }

std::shared_ptr<nb::object> keep(nb::handle object) {
  return {new nb::object(nb::borrow(object)), [](nb::object* held) {
            if (Py_IsInitialized() == 0) {
              (void)held->release();
            } else {
              nb::gil_scoped_acquire gil;
              held->reset();
            }
            delete held;
          }};
}

std::function<PolicyConfig()> read_policy_maker(nb::handle policy) {
  if (nb::isinstance<nb::str>(policy)) return [config = read_policy(policy, nb::none())] { return config; };
  return [make = keep(policy)] {
    nb::gil_scoped_acquire gil;
    return read_policy((*make)(), nb::none());
  };
}

PolicyConfig read_policy(nb::handle policy, nb::handle thresholds) {
  PolicyConfig config;
  if (!thresholds.is_none()) {
    const IntArray<std::uint32_t> values(thresholds, "thresholds");
    if (values.span().size() != config.thresholds.size()) {
      throw Error(ErrorKind::ConfigError, "thresholds must be three numbers, got ", values.span().size());
    }
    std::copy(values.span().begin(), values.span().end(), config.thresholds.begin());
  }
  if (nb::isinstance<nb::str>(policy)) {
    const std::string name = nb::cast<std::string>(policy);
    std::string known;
    for (const auto& [candidate, kind] : kNames) {
      known.append(known.empty() ? "" : ", ").append(candidate);
      if (name != candidate) continue;
      config.kind = kind;
      if (kind != PolicyKind::MultiLru && !thresholds.is_none()) {
        throw Error(ErrorKind::ConfigError, "thresholds belong to policy multi_lru, not to ", name);
      }
      return config;
    }
    throw Error(ErrorKind::ConfigError, "policy '", name, "' is not known; choose one of ", known,
                ", or pass an EvictionPolicy");
  }
  if (!thresholds.is_none()) throw Error(ErrorKind::ConfigError, "thresholds belong to policy multi_lru");
  if (nb::isinstance<nb::type_object>(policy)) {
    throw Error(ErrorKind::ConfigError, "policy must be a name or an EvictionPolicy, got the class ",
                nb::cast<std::string>(policy.attr("__name__")), ": pass an instance of it");
  }
  for (const char* method : {"on_freed", "on_taken", "select"}) {
    if (!nb::hasattr(policy, method)) {
      throw Error(ErrorKind::ConfigError, "policy must be a name or an EvictionPolicy; this one has no ", method, "()");
    }
  }
  config.kind = PolicyKind::Advised;
  config.advisor = std::make_shared<PythonAdvisor>(nb::borrow(policy));
  return config;
}

}  // namespace understudy
