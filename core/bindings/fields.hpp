// Settings of the core as keyword arguments in Python, each declared once: its name, member and limits. The default
// is the member's own. They are read in the order of their declaration.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "convert.hpp"

namespace understudy {

// Types of settings that are read by hand (named.hpp has the same for arguments).
inline const std::string kPolicyMakerType = "str | collections.abc.Callable[[], object]";
inline const std::string kRoutingType = "str | NativeRouter | understudy.core_types.Router";

// What Python's type checker and reader say of a value. Classes of the core have their own name.
template <typename V>
struct FieldText {
  static std::string type() { return nb::cast<std::string>(nb::type<V>().attr("__name__")); }
};
template <>
struct FieldText<bool> {
  static std::string type() { return "bool"; }
};
template <std::integral V>
struct FieldText<V> {
  static std::string type() { return "int"; }
};
template <>
struct FieldText<double> {
  static std::string type() { return "float"; }
};
template <>
struct FieldText<std::string> {
  static std::string type() { return "str"; }
};
template <typename V>
struct FieldText<std::vector<V>> {
  static std::string type() { return "collections.abc.Sequence[" + FieldText<V>::type() + "]"; }
};
template <typename V>
struct FieldText<std::optional<V>> {
  static std::string type() { return FieldText<V>::type() + " | None"; }
};
template <typename V>
struct FieldText<std::shared_ptr<V>> {
  static std::string type() { return FieldText<V>::type() + " | None"; }
};

// Default of a field, as Python writes it; empty for values without one.
template <typename V>
std::string field_default(const V& value) {
  if constexpr (std::is_same_v<V, double>) {
    if (value == std::numeric_limits<double>::infinity()) return "float('inf')";
  }
  if constexpr (requires { value.has_value(); }) {
    if (!value) return "None";
    return field_default(*value);
  } else if constexpr (requires { value.use_count(); }) {
    return value == nullptr ? "None" : "";
  } else if constexpr (std::is_arithmetic_v<V> || std::is_same_v<V, std::string> || requires { value.capacity(); }) {
    return nb::repr(nb::cast(value)).c_str();
  } else {
    return "";
  }
}

template <typename V>
V read_field(nb::handle value, const std::string& name, std::uint64_t most) {
  if constexpr (std::unsigned_integral<V> && !std::is_same_v<V, bool>) {
    return static_cast<V>(read_uint(value, name, most));
  } else {
    if constexpr (std::integral<V> && !std::is_same_v<V, bool>) {
      if (most > 0) return static_cast<V>(read_uint(value, name, most));
    }
    V out{};
    if (!nb::try_cast<V>(value, out)) refuse_type(value, name, FieldText<V>::type());
    return out;
  }
}

template <typename T>
class Fields {
 public:
  template <typename Get>
  using Value = std::remove_cvref_t<std::invoke_result_t<Get, T&>>;
  using Read = std::function<void(T& self, nb::handle value)>;

  // `get` is a member, or a function that returns a reference to one. With `most`, an int is from 0 to `most`.
  template <typename Get>
  Fields& add(const char* name, Get get) {
    return add(name, get, most_of<Get>());
  }
  template <typename Get>
  Fields& add(const char* name, Get get, std::uint64_t most) {
    using V = Value<Get>;
    T defaults{};
    return add(
        name, FieldText<V>::type(), field_default<V>(std::invoke(get, defaults)),
        [name, get, most](T& self, nb::handle value) { std::invoke(get, self) = read_field<V>(value, name, most); });
  }
  // A limit, where None stands for the largest value of its type: no limit.
  template <typename Get>
  Fields& add_limit(const char* name, Get get) {
    return add_limit(name, get, most_of<Get>() - 1);
  }
  template <typename Get>
  Fields& add_limit(const char* name, Get get, std::uint64_t most) {
    constexpr Value<Get> kNone = std::numeric_limits<Value<Get>>::max();
    T defaults{};
    const Value<Get> usual = std::invoke(get, defaults);
    return add(name, "int | None", usual == kNone ? "None" : field_default(usual),
               [name, get, most](T& self, nb::handle value) {
                 std::invoke(get, self) =
                     value.is_none() ? kNone : static_cast<Value<Get>>(read_uint(value, name, most));
               });
  }
  // Settings that keep their defaults for None.
  template <typename Get>
  Fields& add_object(const char* name, Get get) {
    using V = Value<Get>;
    return add(name, FieldText<V>::type() + " | None", "None", [name, get](T& self, nb::handle value) {
      if (!value.is_none()) std::invoke(get, self) = read_field<V>(value, name, 0);
    });
  }
  template <typename Get>
  Fields& add_choice(const char* name, Get get, std::initializer_list<std::pair<const char*, Value<Get>>> choices) {
    std::vector<std::pair<std::string, Value<Get>>> known(choices.begin(), choices.end());
    T defaults{};
    std::string usual;
    for (const auto& [text, choice] : known) {
      if (choice == std::invoke(get, defaults)) usual = "'" + text + "'";
    }
    return add(name, "str", usual, [name, get, known](T& self, nb::handle value) {
      std::invoke(get, self) = choose(read_field<std::string>(value, name, 0), name, known);
    });
  }
  // Any other reading. An empty default: the argument is required.
  Fields& add(const char* name, std::string type, std::string usual, Read read) {
    fields_.push_back({name, std::move(type), std::move(usual), std::move(read)});
    return *this;
  }
  // The field added last has no default, and None is none of its values.
  Fields& required() {
    Field& last = fields_.back();
    last.usual.clear();
    last.type = last.type.substr(0, last.type.find(" | None"));
    return *this;
  }

  // Add the constructor of `Target`, which is made from a T, and the names of the fields: FIELDS.
  template <typename Target = T, typename Class>
  Class& bind(Class& bound) const {
    // The class keeps pointers to the signature for as long as the module lives.
    const auto* const signature = new std::string(describe());
    bound.def(
        "__init__",
        [fields = fields_](Target* self, const nb::kwargs& given) {
          T value{};
          read(fields, value, given);
          new (self) Target(std::move(value));
        },
        nb::sig(signature->c_str()));
    nb::list names;
    for (const Field& field : fields_) names.append(nb::str(field.name));
    bound.attr("FIELDS") = nb::tuple(names);
    return bound;
  }

 private:
  struct Field {
    const char* name;
    std::string type;
    std::string usual;  // default; empty: required
    Read read;

    bool takes_none() const { return type.ends_with("None"); }
  };
  template <typename Get>
  static constexpr std::uint64_t most_of() {
    if constexpr (std::unsigned_integral<Value<Get>>) return std::numeric_limits<Value<Get>>::max();
    return 0;
  }

  template <typename V>
  static V choose(const std::string& text, const char* name, const std::vector<std::pair<std::string, V>>& known) {
    std::string names;
    for (const auto& [each, choice] : known) {
      if (each == text) return choice;
      names.append(names.empty() ? "" : ", ").append(each);
    }
    throw Error(ErrorKind::ConfigError, name, " must be one of ", names, "; got '", text, "'");
  }

  static void read(const std::vector<Field>& fields, T& self, const nb::kwargs& given) {
    for (const Field& field : fields) {
      if (given.contains(field.name)) {
        const nb::object value = given[field.name];
        if (value.is_none() && !field.takes_none()) refuse_type(value, field.name, field.type);
        field.read(self, value);
      } else if (field.usual.empty()) {
        throw nb::type_error((std::string("missing the keyword argument ") + field.name).c_str());
      }
    }
    for (const auto& [key, value] : given) {
      const auto name = nb::cast<std::string>(key);
      if (std::ranges::none_of(fields, [&](const Field& field) { return name == field.name; })) {
        throw nb::type_error(("unexpected keyword argument " + name).c_str());
      }
    }
  }

  std::string describe() const {
    std::string out = "def __init__(self, *";
    for (const Field& field : fields_) {
      out.append(", ").append(field.name).append(": ").append(field.type);
      if (!field.usual.empty()) out.append(" = ").append(field.usual);
    }
    return out + ") -> None";
  }

  std::vector<Field> fields_;
};

}  // namespace understudy
