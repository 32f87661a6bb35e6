// Arguments and results with Python types, which the stub (tools/write_stub.py) has from them. nanobind does not check
// arguments (texts apart): the functions that read them raise understudy's errors, which name the field.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <string>
#include <utility>

namespace understudy {

namespace nb = nanobind;

// The spelling of a Python type. Names of understudy.core_types are written in full.
template <std::size_t N>
struct TypeText {
  constexpr TypeText(const char (&from)[N]) {  // NOLINT: implicit, for PyArg<"int">
    for (std::size_t i = 0; i < N; ++i) text[i] = from[i];
  }
  char text[N] = {};
};

// An argument of any type, borrowed from the caller.
template <TypeText Type>
struct PyArg : nb::handle {
  static constexpr auto Name = nb::detail::const_name(Type.text);
  using nb::handle::handle;
  PyArg(const nb::handle& from) : nb::handle(from) {}  // NOLINT: implicit
  static bool check_(nb::handle) { return true; }
};

// A result, or an argument that is kept.
template <TypeText Type>
struct PyType : nb::object {
  static constexpr auto Name = nb::detail::const_name(Type.text);
  using nb::object::object;
  PyType(nb::object from) : nb::object(std::move(from)) {}  // NOLINT: implicit
  static bool check_(nb::handle) { return true; }
};

// A string of which the type checker knows the values.
template <TypeText Type>
struct PyText : std::string {
  using std::string::string;
  PyText(std::string from) : std::string(std::move(from)) {}  // NOLINT: implicit
};

using Int = PyArg<"int">;
using Ints = PyArg<"understudy.core_types.Ints">;
using IntSequence = PyArg<"collections.abc.Sequence[int]">;
using Runs = PyArg<"collections.abc.Sequence[understudy.core_types.Run]">;
using WideInt = PyType<"int">;  // a result of 128 bits

// A numpy array that owns its values.
template <typename T>
struct Array : nb::object {
  static constexpr auto Name =
      nb::detail::const_name("numpy.ndarray[dtype=") + nb::detail::dtype_traits<T>::name + nb::detail::const_name("]");
  using nb::object::object;
  explicit Array(nb::object from) : nb::object(std::move(from)) {}
  static bool check_(nb::handle) { return true; }
};

using AnyArray = PyType<"numpy.ndarray[dtype=generic]">;
using ColumnsByName = nb::typed<nb::dict, nb::str, AnyArray>;
template <typename... Ts>
using Tuple = nb::typed<nb::tuple, Ts...>;
template <typename T>
using List = nb::typed<nb::list, T>;
template <typename... Ts>
using Arrays = Tuple<Array<Ts>...>;

// A policy by name, or a callable that makes one for each pool.
using PolicyMakerArg = PyArg<"str | collections.abc.Callable[[], object]">;
// A router by name, or one of either language.
using RoutingArg = PyArg<"str | NativeRouter | understudy.core_types.Router">;
// Event rows, and the time of each in ns.
using TimedRows = Tuple<PyArg<"EventBatch">, Array<std::int64_t>>;
using OffloadLine = nb::typed<nb::dict, nb::str, nb::handle>;

// Signatures that nanobind cannot know.
inline const nb::sig kEnter("def __enter__(self) -> typing.Self");
inline const nb::sig kExit("def __exit__(self, *args: object) -> None");
inline const nb::sig kEqual("def __eq__(self, other: object, /) -> bool");

}  // namespace understudy

template <understudy::TypeText Type>
struct nanobind::detail::type_caster<understudy::PyText<Type>> {
  NB_TYPE_CASTER(understudy::PyText<Type>, const_name(Type.text))

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<std::string> text;
    if (!text.from_python(src, flags, cleanup)) return false;
    value = std::move(text.value);
    return true;
  }
  static handle from_cpp(const understudy::PyText<Type>& text, rv_policy policy, cleanup_list* cleanup) noexcept {
    return make_caster<std::string>::from_cpp(text, policy, cleanup);
  }
};
