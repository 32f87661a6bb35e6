// Block identities and lineage hashes in Python.
#include "tokens/identities.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "bindings.hpp"
#include "convert.hpp"
#include "tokens/lineage_text.hpp"

namespace understudy {
namespace {

using namespace nb::literals;

std::optional<std::uint64_t> known(std::uint64_t hash) { return hash == 0 ? std::nullopt : std::optional(hash); }

template <typename T, typename Field>
Array<T> column(const Identities& self, Field field) {
  std::vector<T> values(self.size());
  std::transform(self.span().begin(), self.span().end(), values.begin(), field);
  return to_array(std::move(values));
}

List<Int> lineage_list(const Identities& self) {
  nb::list out;
  for (const BlockIdentity& block : self.span()) out.append(lineage_to_int(block.lineage));
  return out;
}

BlockIdentity item(const Identities& self, Py_ssize_t index) {
  const auto size = static_cast<Py_ssize_t>(self.size());
  if (index < -size || index >= size) throw nb::index_error("Identities index out of range");
  return self[static_cast<std::size_t>(index < 0 ? index + size : index)];
}

Identities sliced(const Identities& self, const nb::slice& range) {
  Py_ssize_t start = 0;
  Py_ssize_t stop = 0;
  Py_ssize_t step = 0;
  if (PySlice_Unpack(range.ptr(), &start, &stop, &step) < 0) throw nb::python_error();
  const Py_ssize_t length = PySlice_AdjustIndices(static_cast<Py_ssize_t>(self.size()), &start, &stop, step);
  if (step == 1 && length > 0) {
    return self.slice(static_cast<std::size_t>(start), static_cast<std::size_t>(start + length));
  }
  std::vector<BlockIdentity> picked;
  picked.reserve(static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) picked.push_back(self[static_cast<std::size_t>(start + i * step)]);
  return Identities(std::move(picked)).with_block_size(self.block_size());
}

Identities from_local_hashes(Ints local_hashes, const Identities* parent) {
  const IntArray<std::uint64_t> locals(local_hashes, "local_hashes");
  if (parent == nullptr) return Identities::from_local_hashes(locals.span());
  if (parent->empty()) {
    throw Error(ErrorKind::InvalidArgument, "parent is empty; its last block is the parent, or give None");
  }
  return Identities::from_local_hashes(locals.span(), (*parent)[parent->size() - 1]);
}

Identities from_sequence_hashes(Ints sequence_hashes, Ints local_hashes, Int parent_hash, Int start_position) {
  const IntArray<std::uint64_t> sequence(sequence_hashes, "sequence_hashes");
  std::optional<IntArray<std::uint64_t>> locals;
  if (!local_hashes.is_none()) locals.emplace(local_hashes, "local_hashes");
  std::optional<std::uint64_t> parent;
  if (!parent_hash.is_none()) parent = read_uint(parent_hash, "parent_hash");
  const auto start = static_cast<std::uint32_t>(read_uint(start_position, "start_position", LineageHash::kMaxPosition));
  return Identities::from_sequence_hashes(sequence.span(), locals ? std::optional(locals->span()) : std::nullopt,
                                          parent, start);
}

Identities from_lineage_hashes(IntSequence lineage_hashes) {
  if (PySequence_Check(lineage_hashes.ptr()) == 0) {
    throw Error(ErrorKind::InvalidArgument, "lineage_hashes must be a sequence of ints of 128 bits");
  }
  std::vector<LineageHash> hashes;
  for (nb::handle value : lineage_hashes) {
    hashes.push_back(read_lineage(value, "lineage_hashes[" + std::to_string(hashes.size()) + "]"));
  }
  return Identities::from_lineage_hashes(hashes);
}

WideInt lineage_hash(Int current, Int parent, Int position) {
  const bool has_parent = !parent.is_none();
  return lineage_to_int(
      LineageHash::make(read_uint(current, "current"), has_parent, has_parent ? read_uint(parent, "parent") : 0,
                        static_cast<std::uint32_t>(read_uint(position, "position", LineageHash::kMaxPosition))));
}

LineageHash lineage_of_bytes(PyArg<"bytes | collections.abc.Sequence[int]"> data) {
  const IntArray<std::uint32_t> values(data, "data");
  LineageBytes bytes;
  if (values.span().size() != bytes.size()) {
    throw Error(ErrorKind::InvalidArgument, "data must be 16 bytes, got ", values.span().size());
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (values.span()[i] > 255) {
      throw Error(ErrorKind::InvalidArgument, "data[", i, "] must be 0 to 255, got ", values.span()[i]);
    }
    bytes[i] = static_cast<unsigned char>(values.span()[i]);
  }
  return lineage_from_bytes(bytes);
}

std::string repr_identity(const BlockIdentity& self) { return "Identity(" + lineage_text(self.lineage) + ")"; }

std::string repr_identities(const Identities& self) {
  if (self.empty()) return "Identities()";
  std::string text = "Identities(" + std::to_string(self.size()) + " blocks, " + lineage_text(self[0].lineage);
  if (self.size() > 1) text.append(" ... ").append(lineage_text(self[self.size() - 1].lineage));
  return text.append(")");
}

void bind_lineage(nb::module_& m) {
  m.def("lineage_hash", &lineage_hash, "current"_a, "parent"_a.none(), "position"_a,
        "Pack a lineage hash from a block's sequence hash, its parent's (None at a root) and its position.");
  m.def(
      "lineage_parts",
      [](Int plh) {
        const LineageHash lineage = read_lineage(plh, "plh");
        return Tuple<Int, Int, Int, Int>(
            nb::make_tuple(lineage.mode(), lineage.position(), lineage.current(), lineage.parent_fragment()));
      },
      "plh"_a, "Unpack a lineage hash into (mode, position, sequence hash, parent fragment).");
  m.def(
      "lineage_extend",
      [](Int plh, Int local_hash) {
        return lineage_to_int(read_lineage(plh, "plh").extend(read_uint(local_hash, "local_hash")));
      },
      "plh"_a, "local_hash"_a, "The lineage hash of the next block, given the hash of its content alone.");
  m.def(
      "lineage_text", [](Int plh) { return lineage_text(read_lineage(plh, "plh")); }, "plh"_a,
      "Readable form: position, sequence hash and (behind a root) parent fragment, the hashes in base58.");
  m.def(
      "lineage_bytes",
      [](Int plh) {
        const LineageBytes bytes = lineage_to_bytes(read_lineage(plh, "plh"));
        return nb::bytes(bytes.data(), bytes.size());
      },
      "plh"_a, "The 16 big-endian bytes that travel on the wire.");
  m.def(
      "lineage_from_bytes",
      [](PyArg<"bytes | collections.abc.Sequence[int]"> data) { return lineage_to_int(lineage_of_bytes(data)); },
      "data"_a, "Read a lineage hash from 16 big-endian bytes, or from a sequence of 16 ints.");
  m.def(
      "lineage_sort_key",
      [](Int plh) {
        const LineageHash lineage = read_lineage(plh, "plh");
        return Tuple<Int, Int, Int>(nb::make_tuple(lineage.position(), lineage.current(), lineage_to_int(lineage)));
      },
      "plh"_a, "The total order of lineage hashes: position, then sequence hash, then the raw value.");
  m.def(
      "positional_sequence_hash",
      [](Int sequence_hash, Int local_hash, Int position) {
        const auto hash = PositionalSequenceHash::make(
            read_uint(sequence_hash, "sequence_hash"), read_uint(local_hash, "local_hash"),
            static_cast<std::uint32_t>(read_uint(position, "position", PositionalSequenceHash::kMaxPosition)));
        return wide_to_int(hash.hi, hash.lo);
      },
      "sequence_hash"_a, "local_hash"_a, "position"_a,
      "128 bits: a sequence hash with its position and the low bits of the block's local hash.");
}

}  // namespace

void bind_identities(nb::module_& m) {
  bind_lineage(m);

  nb::class_<BlockIdentity>(m, "Identity", "Identity of a block: its hashes and its position. Read-only.")
      .def_prop_ro(
          "lineage_hash", [](const BlockIdentity& self) { return lineage_to_int(self.lineage); },
          "The 128-bit identity: position, sequence hash and a fragment of the parent's.")
      .def_prop_ro("sequence_hash", &BlockIdentity::sequence_hash, "Content of this block and all before it.")
      .def_ro("local_hash", &BlockIdentity::local_hash, "Content of this block alone; 0 when not known.")
      .def_prop_ro(
          "parent_hash", [](const BlockIdentity& self) { return known(self.parent_hash); },
          "Sequence hash of the block before; None at a root or when not known.")
      .def_prop_ro("position", &BlockIdentity::position, "Index of the block in its sequence.")
      .def(
          "__eq__", [](const BlockIdentity& a, const BlockIdentity& b) { return a == b; }, nb::is_operator(), kEqual)
      .def("__hash__", [](const BlockIdentity& self) { return xxh3_64_pair(self.lineage.lo, self.lineage.hi, 0) >> 2; })
      .def("__repr__", &repr_identity);

  auto identities =
      nb::class_<Identities>(m, "Identities",
                             "An immutable sequence of block identities. Slices share its storage and cost O(1).")
          .def(nb::init<>())
          .def_static("from_local_hashes", &from_local_hashes, "local_hashes"_a, nb::kw_only(),
                      "parent"_a.none() = nb::none(),
                      "Chain the hashes of blocks' contents, behind the last block of `parent` or from a root.")
          .def_static("from_sequence_hashes", &from_sequence_hashes, "sequence_hashes"_a, nb::kw_only(),
                      "local_hashes"_a.none() = nb::none(), "parent_hash"_a.none() = nb::none(), "start_position"_a = 0,
                      "Take sequence hashes as they are; each block is the parent of the next. Hash 0 is refused.")
          .def_static("from_lineage_hashes", &from_lineage_hashes, "lineage_hashes"_a,
                      "Take 128-bit lineage hashes as they are; local hashes are not known.")
          .def(
              "hash_ahead",
              [](const Identities& self, Ints tokens, std::uint32_t ahead) {
                return self.hash_ahead(IntArray<std::uint32_t>(tokens, "tokens").span(), ahead);
              },
              "tokens"_a, "ahead"_a,
              "Blocks whose identity covers the `ahead` tokens behind them too; without the last, if it has none.")
          .def("__len__", &Identities::size)
          .def("__getitem__", &sliced, "index"_a)
          .def("__getitem__", &item, "index"_a)
          .def(
              "__iter__", [](nb::handle self) { return nb::steal(PySeqIter_New(self.ptr())); },
              nb::sig("def __iter__(self) -> collections.abc.Iterator[Identity]"))
          .def("__add__", &Identities::concat, "other"_a, nb::is_operator())
          .def(
              "__eq__", [](const Identities& a, const Identities& b) { return a == b; }, nb::is_operator(), kEqual)
          .def("__repr__", &repr_identities)
          .def_prop_ro("lineage_hashes", &lineage_list, "128-bit lineage hashes, one int per block.")
          .def_prop_ro(
              "block_size",
              [](const Identities& self) -> std::optional<std::size_t> {
                if (self.block_size() == 0) return std::nullopt;
                return self.block_size();
              },
              "Tokens of each block; None where only hashes are known.")
          .def_prop_ro(
              "sequence_hashes",
              [](const Identities& self) {
                return column<std::uint64_t>(self, [](const BlockIdentity& b) { return b.sequence_hash(); });
              },
              "Sequence hashes as a new uint64 array.")
          .def_prop_ro(
              "local_hashes",
              [](const Identities& self) {
                return column<std::uint64_t>(self, [](const BlockIdentity& b) { return b.local_hash; });
              },
              "Local hashes as a new uint64 array; 0 where not known.")
          .def_prop_ro(
              "positions",
              [](const Identities& self) {
                return column<std::uint32_t>(self, [](const BlockIdentity& b) { return b.position(); });
              },
              "Block positions as a new uint32 array.");
  identities.attr("__hash__") = nb::none();
}

}  // namespace understudy
