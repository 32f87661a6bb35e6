// Token blocks and hash functions in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <mutex>

#include "bindings.hpp"
#include "convert.hpp"
#include "tokens/token_blocks.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {
namespace {

using namespace nb::literals;

// From this size on the work costs more than releasing and reacquiring the GIL.
constexpr std::size_t kLongCallBytes = std::size_t{1} << 15;

// Python may call one object from several threads, and long calls run without the GIL.
struct SharedTokenBlocks {
  std::mutex mutex;  // never held while Python code can run
  TokenBlocks blocks;
};

template <typename Work>
auto locked(SharedTokenBlocks& self, Work work) {
  const std::lock_guard lock(self.mutex);
  return work(self.blocks);
}

template <typename Work>
auto without_gil_if(bool long_call, Work work) {
  std::optional<nb::gil_scoped_release> release;
  if (long_call) release.emplace();
  return work();
}

PyType<"range"> to_range(BlockRange range) {
  PyObject* out = PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "nn",
                                        static_cast<Py_ssize_t>(range.first), static_cast<Py_ssize_t>(range.last));
  if (out == nullptr) throw nb::python_error();
  return nb::steal(out);
}

std::uint64_t chosen_salt(const std::string& salt, const std::string& lora, Int explicit_hash) {
  if (explicit_hash.is_none()) return salt_hash(salt, lora);
  if (!salt.empty() || !lora.empty()) {
    throw Error(ErrorKind::InvalidArgument, "salt_hash is given together with salt or lora; give one or the other");
  }
  return read_uint(explicit_hash, "salt_hash");
}

void construct(SharedTokenBlocks* self, Ints tokens, Int block_size, const std::string& salt, const std::string& lora,
               Int explicit_salt_hash, Runs mm_runs) {
  const IntArray<Token> given(tokens, "tokens");
  const std::uint64_t size = read_uint(block_size, "block_size");
  const std::uint64_t hash = chosen_salt(salt, lora, explicit_salt_hash);
  const std::vector<MultimodalRun> runs = read_runs(mm_runs, "mm_runs");
  without_gil_if(given.span().size_bytes() >= kLongCallBytes,
                 [&] { new (self) SharedTokenBlocks{{}, TokenBlocks(given.span(), size, hash, runs)}; });
}

PyType<"range"> extend(SharedTokenBlocks& self, Ints tokens, Runs mm_runs) {
  const IntArray<Token> given(tokens, "tokens");
  const std::vector<MultimodalRun> runs = read_runs(mm_runs, "mm_runs");
  return to_range(without_gil_if(given.span().size_bytes() >= kLongCallBytes, [&] {
    return locked(self, [&](TokenBlocks& blocks) { return blocks.extend(given.span(), runs); });
  }));
}

std::vector<Token> copied(std::span<const Token> tokens) { return {tokens.begin(), tokens.end()}; }

List<PyArg<"understudy.core_types.Run">> run_list(SharedTokenBlocks& self) {
  const auto runs = locked(self, [](const TokenBlocks& blocks) {
    return std::vector<MultimodalRun>(blocks.runs().begin(), blocks.runs().end());
  });
  nb::list out;
  for (const MultimodalRun& run : runs) out.append(nb::make_tuple(run.mm_hash, run.offset, run.length));
  return out;
}

std::uint64_t hash_bytes(const nb::bytes& data, Int seed) {
  const std::uint64_t number = read_uint(seed, "seed");
  return without_gil_if(data.size() >= kLongCallBytes, [&] { return xxh3_64(data.c_str(), data.size(), number); });
}

}  // namespace

void bind_tokens(nb::module_& m) {
  m.def("xxh3_64", &hash_bytes, "data"_a, "seed"_a = 0, "XXH3-64 of `data` with a 64-bit seed.");
  m.def(
      "salt_hash", [](const std::string& salt, const std::string& lora) { return salt_hash(salt, lora); },
      "salt"_a = "", "lora"_a = "",
      "The seed of a request's block hashes: 1337, plus a term for its cache salt, plus one for its LoRA "
      "adapter.");

  nb::class_<SharedTokenBlocks>(m, "TokenBlocks",
                                "A request's tokens cut into blocks, with the identity of every complete block. "
                                "Bad input raises InvalidArgument and changes nothing.")
      .def("__init__", &construct, "tokens"_a = nb::tuple(), "block_size"_a = 16, nb::kw_only(), "salt"_a = "",
           "lora"_a = "", "salt_hash"_a.none() = nb::none(), "mm_runs"_a = nb::tuple())
      .def(
          "append",
          [](SharedTokenBlocks& self, Int token) {
            const auto value = static_cast<Token>(read_uint(token, "token", std::numeric_limits<Token>::max()));
            return locked(self, [&](TokenBlocks& blocks) { return blocks.append(value); });
          },
          "token"_a, "Add one token; return the index of the block that it completed, or None.")
      .def("extend", &extend, "tokens"_a, "mm_runs"_a = nb::tuple(),
           "Add tokens, with multimodal runs whose offsets count from the first of them; return the range of "
           "blocks completed.")
      .def(
          "truncate",
          [](SharedTokenBlocks& self, Int length) {
            const std::uint64_t kept = read_uint(length, "length");
            locked(self, [&](TokenBlocks& blocks) { blocks.truncate(kept); });
          },
          "length"_a, "Keep the first `length` tokens (all, when there are fewer); runs are trimmed with them.")
      .def(
          "pop", [](SharedTokenBlocks& self) { return locked(self, [](TokenBlocks& blocks) { return blocks.pop(); }); },
          "Drop the last token and return it, or return None.")
      .def(
          "tokens_at",
          [](SharedTokenBlocks& self, Int start, Int stop) {
            const std::uint64_t from = read_uint(start, "start");
            const std::uint64_t to = read_uint(stop, "stop");
            return to_array(locked(self, [&](TokenBlocks& blocks) { return copied(blocks.tokens_at(from, to)); }));
          },
          "start"_a, "stop"_a,
          "Tokens [start, stop) as a new uint32 array; empty when the range is reversed or not inside.")
      .def("__len__",
           [](SharedTokenBlocks& self) { return locked(self, [](TokenBlocks& blocks) { return blocks.size(); }); })
      .def("__repr__",
           [](SharedTokenBlocks& self) {
             return locked(self, [](TokenBlocks& blocks) {
               return "TokenBlocks(" + std::to_string(blocks.size()) + " tokens, " +
                      std::to_string(blocks.num_blocks()) + " blocks of " + std::to_string(blocks.block_size()) + ")";
             });
           })
      .def_prop_ro(
          "tokens",
          [](SharedTokenBlocks& self) {
            return to_array(locked(self, [](TokenBlocks& blocks) { return copied(blocks.tokens()); }));
          },
          "All tokens as a new uint32 array.")
      .def_prop_ro(
          "block_size", [](SharedTokenBlocks& self) { return self.blocks.block_size(); }, "Tokens per block.")
      .def_prop_ro(
          "salt_hash", [](SharedTokenBlocks& self) { return self.blocks.salt(); }, "The seed of the block hashes.")
      .def_prop_ro("mm_runs", &run_list, "Multimodal runs as (mm_hash, offset, length), sorted by offset.")
      .def_prop_ro(
          "num_blocks",
          [](SharedTokenBlocks& self) { return locked(self, [](TokenBlocks& blocks) { return blocks.num_blocks(); }); },
          "Number of complete blocks.")
      .def_prop_ro(
          "identities",
          [](SharedTokenBlocks& self) { return locked(self, [](TokenBlocks& blocks) { return blocks.identities(); }); },
          "Identities of the complete blocks as they are now; later changes do not show. O(1).");
}

}  // namespace understudy
