// A class in Python whose every call takes the object's turn (base/turn.hpp).
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "base/turn.hpp"

namespace understudy {

namespace nb = nanobind;

// As nb::class_, of a type with `Turns& turns()`.
template <typename T, typename... Bases>
class TurnClass {
 public:
  TurnClass(nb::handle scope, const char* name, const char* doc) : class_(scope, name, doc), name_(name) {}

  template <typename Call, typename... Extra>
  TurnClass& def(const char* name, Call call, const Extra&... extra) {
    class_.def(name, in_turn(call), extra...);
    return *this;
  }
  // Made by a function that returns a shared pointer.
  template <typename Make, typename... Extra>
  TurnClass& def_new(Make make, const Extra&... extra) {
    class_.def(nb::new_(make), extra...);
    return *this;
  }
  template <typename Call, typename... Extra>
  TurnClass& def_prop_ro(const char* name, Call call, const Extra&... extra) {
    class_.def_prop_ro(name, in_turn(call), extra...);
    return *this;
  }

 private:
  // What a call refers to is copied before its turn is over: the next one may be somebody else's.
  template <typename Result, typename... Args, typename Call>
  auto turned(Call call) const {
    return [call, name = name_](T& self, Args... args) -> std::remove_cvref_t<Result> {
      const Turn turn(self.turns(), name);
      return std::invoke(call, self, std::forward<Args>(args)...);
    };
  }
  template <typename Result, typename... Args>
  auto in_turn(Result (T::*call)(Args...)) const {
    return turned<Result, Args...>(call);
  }
  template <typename Result, typename Base, typename... Args>
    requires std::derived_from<T, Base>
  auto in_turn(Result (Base::*call)(Args...) const) const {
    return turned<Result, Args...>(call);
  }
  template <typename Result, typename... Args>
  auto in_turn(Result (*call)(T&, Args...)) const {
    return turned<Result, Args...>(call);
  }
  template <typename Result, typename... Args>
  auto in_turn(Result (*call)(const T&, Args...)) const {
    return turned<Result, Args...>(call);
  }
  template <typename... Args>
  auto in_turn(void (*make)(T*, Args...)) const {
    return make;  // nobody else has it yet
  }
  template <typename Lambda>
    requires std::is_class_v<Lambda>
  auto in_turn(Lambda call) const {
    return in_turn(+call);
  }

  nb::class_<T, Bases...> class_;
  const char* name_;
};

}  // namespace understudy
