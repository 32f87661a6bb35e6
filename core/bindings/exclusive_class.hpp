// A Python class whose calls exclude each other (base/exclusive_call.hpp).
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "base/exclusive_call.hpp"

namespace understudy {

namespace nb = nanobind;

// Like nb::class_, for a type with `CallFlag& call_flag()`.
template <typename T, typename... Bases>
class ExclusiveClass {
 public:
  ExclusiveClass(nb::handle scope, const char* name, const char* doc) : class_(scope, name, doc), name_(name) {}

  template <typename Call, typename... Extra>
  ExclusiveClass& def(const char* name, Call call, const Extra&... extra) {
    class_.def(name, exclusive(call), extra...);
    return *this;
  }
  // Constructor: a function that returns a shared pointer.
  template <typename Make, typename... Extra>
  ExclusiveClass& def_new(Make make, const Extra&... extra) {
    class_.def(nb::new_(make), extra...);
    return *this;
  }
  template <typename Call, typename... Extra>
  ExclusiveClass& def_prop_ro(const char* name, Call call, const Extra&... extra) {
    class_.def_prop_ro(name, exclusive(call), extra...);
    return *this;
  }

  // The class itself, for calls that need no guard.
  nb::class_<T, Bases...>& unguarded() noexcept { return class_; }

 private:
  // Returns results by value: a reference could change in the next call, from another thread.
  template <typename Result, typename... Args, typename Call>
  auto wrapped(Call call) const {
    return [call, name = name_](T& self, Args... args) -> std::remove_cvref_t<Result> {
      const ExclusiveCall guard(self.call_flag(), name);
      return std::invoke(call, self, std::forward<Args>(args)...);
    };
  }
  template <typename Result, typename... Args>
  auto exclusive(Result (T::*call)(Args...)) const {
    return wrapped<Result, Args...>(call);
  }
  template <typename Result, typename Base, typename... Args>
    requires std::derived_from<T, Base>
  auto exclusive(Result (Base::*call)(Args...) const) const {
    return wrapped<Result, Args...>(call);
  }
  template <typename Result, typename... Args>
  auto exclusive(Result (*call)(T&, Args...)) const {
    return wrapped<Result, Args...>(call);
  }
  template <typename Result, typename... Args>
  auto exclusive(Result (*call)(const T&, Args...)) const {
    return wrapped<Result, Args...>(call);
  }
  template <typename... Args>
  auto exclusive(void (*make)(T*, Args...)) const {
    return make;  // no other thread has the object yet
  }
  template <typename Lambda>
    requires std::is_class_v<Lambda>
  auto exclusive(Lambda call) const {
    return exclusive(+call);
  }

  nb::class_<T, Bases...> class_;
  const char* name_;
};

}  // namespace understudy
