#include "guards.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>

#include "bindings.hpp"
#include "convert.hpp"

namespace understudy {

// ── Guard ──

void Guard::require_live() const {
  if (released_) throw Error(ErrorKind::WrongState, "these blocks were released or handed on; the guard holds nothing");
}

void Guard::release(bool tail_first) {
  if (in_transfer_) {
    release_requested_ = true;
    return;
  }
  released_ = true;
  std::vector<SlotId> ids = std::exchange(ids_, {});
  if (lent_ > 0) {
    if (ids.empty()) return;  // already reported
    left_ = std::move(ids);
    tail_first_ = tail_first;
    return;
  }
  tail_first_ = tail_first;
  give_back(ids);
}

void Guard::give_back(const std::vector<SlotId>& ids) {
  // A guard that holds nothing keeps nothing alive: neither the store nor a policy written in Python.
  const Manager manager{std::exchange(manager_.store, nullptr), manager_.pool};
  if (ids.empty()) return;
  without_gil(manager, ids.size(), [&] { manager.store->release(manager.pool, ids, tail_first_); });
}

std::vector<SlotId> Guard::consume() {
  require_live();
  released_ = true;
  return std::exchange(ids_, {});
}

std::vector<SlotId> Guard::split(std::size_t count) {
  require_live();
  if (lent_ > 0)
    throw Error(ErrorKind::WrongState, "another thread is cloning these blocks: take them before or after");
  if (count > ids_.size()) {
    throw Error(ErrorKind::InvalidArgument, "count must be at most the ", ids_.size(), " blocks held, got ", count);
  }
  const auto cut = ids_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<SlotId> head(ids_.begin(), cut);
  ids_.erase(ids_.begin(), cut);
  return head;
}

Guard::~Guard() {
  if (ids_.empty()) return;
  manager_.store->release(manager_.pool, ids_, true);
  report_leak(manager_, ids_.size(), "release()");
}

void report_leak(const Manager& manager, std::size_t blocks, const char* remedy) {
  manager.store->note_leak(manager.pool);
  if (Py_IsInitialized() == 0) return;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);  // a finalizer may run while an exception is pending
  if (PyErr_WarnFormat(PyExc_ResourceWarning, 1, "%zu blocks were dropped without %s; use `with` or call it", blocks,
                       remedy) < 0) {
    PyErr_WriteUnraisable(nullptr);
  }
  PyErr_Restore(type, value, trace);
}

void require_block_size(const Manager& manager, const Identities& identities) {
  const std::size_t known = identities.block_size();
  if (known == 0 || known == manager.store->block_size()) return;
  throw Error(ErrorKind::InvalidArgument, "identities are of blocks of ", known, " tokens, this manager's hold ",
              manager.store->block_size());
}

const Identities& read_identities(nb::handle given) {
  if (nb::isinstance<Identities>(given)) return *nb::inst_ptr<Identities>(given);
  throw Error(ErrorKind::InvalidArgument, "identities must be Identities, got ", Py_TYPE(given.ptr())->tp_name,
              "; pass TokenBlocks(tokens, block_size).identities");
}

namespace {

using namespace nb::literals;

nb::str describe_guard(nb::handle self) {
  const Guard& guard = *nb::inst_ptr<Guard>(self);
  const nb::object name = self.type().attr("__name__");
  if (guard.released()) return nb::str("<{}: released>").format(name);
  return nb::str("<{}: {} blocks>").format(name, guard.size());
}

Array<std::int32_t> ids_array(const Guard& self) {
  std::vector<std::int32_t> ids(self.size());
  std::transform(self.ids().begin(), self.ids().end(), ids.begin(),
                 [](SlotId id) { return static_cast<std::int32_t>(id); });
  return to_array(std::move(ids));
}

std::optional<IntArray<Token>> read_tokens(Ints token_ids) {
  std::optional<IntArray<Token>> tokens;
  if (!token_ids.is_none()) tokens.emplace(token_ids, "token_ids");
  return tokens;
}
std::span<const Token> span_of(const std::optional<IntArray<Token>>& tokens) {
  return tokens ? tokens->span() : std::span<const Token>{};
}

StagedBlocks stage(MutableBlocks& self, IdentitiesArg given) {
  const Identities& identities = read_identities(given);
  const Manager manager = self.manager();
  self.require_live();
  require_block_size(manager, identities);
  std::vector<SlotId> ids = self.transfer(
      [&](const Manager& m, std::vector<SlotId>& slots) { m.store->stage(m.pool, slots, identities.span()); });
  return {manager, std::move(ids), identities};
}

RegisteredBlocks commit(MutableBlocks& self, IdentitiesArg given, Ints token_ids) {
  const Identities& identities = read_identities(given);
  const auto tokens = read_tokens(token_ids);
  const Manager manager = self.manager();
  self.require_live();
  require_block_size(manager, identities);
  std::vector<SlotId> ids = self.transfer([&](const Manager& m, std::vector<SlotId>& slots) {
    m.store->commit(m.pool, slots, identities.span(), span_of(tokens));
  });
  return {manager, std::move(ids), identities};
}

RegisteredBlocks register_staged(StagedBlocks& self, Ints token_ids) {
  const auto tokens = read_tokens(token_ids);
  const Manager manager = self.manager();
  std::vector<SlotId> ids = self.transfer(
      [&](const Manager& m, std::vector<SlotId>& slots) { m.store->register_staged(m.pool, slots, span_of(tokens)); });
  return {manager, std::move(ids), self.identities()};
}

MutableBlocks unstage(StagedBlocks& self) {
  const Manager manager = self.manager();
  std::vector<SlotId> ids =
      self.transfer([&](const Manager& m, std::vector<SlotId>& slots) { m.store->unstage(m.pool, slots); });
  return {manager, std::move(ids)};
}

Array<Token> tokens_of(RegisteredBlocks& self) {
  std::vector<Token> tokens;
  self.lend([&](const Manager& m, const std::vector<SlotId>& ids) { tokens = m.store->token_ids(m.pool, ids); });
  return to_array(std::move(tokens));
}

RegisteredBlocks clone(RegisteredBlocks& self) {
  const Manager manager = self.manager();
  const std::vector<SlotId> ids = self.ids();
  const Identities identities = self.identities();
  self.lend([](const Manager& m, const std::vector<SlotId>& slots) { m.store->retain(m.pool, slots); });
  return {manager, ids, identities};
}

std::optional<RegisteredBlocks> upgrade(const WeakBlocks& self) {
  std::vector<SlotId> ids = self.ids;
  const bool all_here = without_gil(self.manager, ids.size(), [&] {
    return self.manager.store->upgrade(self.manager.pool, ids, self.identities.span());
  });
  if (!all_here) return std::nullopt;
  return RegisteredBlocks(self.manager, std::move(ids), self.identities);
}

}  // namespace

void bind_guards(nb::module_& m) {
  nb::class_<Guard>(m, "BlockGuard", "References to blocks, given back by release() or at the end of a `with`.")
      .def("__len__", &Guard::size)
      .def("__repr__", &describe_guard)
      .def_prop_ro("ids", &ids_array, "Block ids, in order. Empty once released.")
      .def_prop_ro("released", &Guard::released, "Whether the blocks were released or handed on.")
      .def(
          "release", [](Guard& self) { self.release(true); }, "Return the blocks. Idempotent.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, kEnter)
      .def("__exit__", [](Guard& self, nb::args) { self.release(true); }, kExit);

  nb::class_<MutableBlocks, Guard> mutable_blocks(m, "MutableBlocks",
                                                  "Freshly allocated blocks that one owner writes.");
  nb::class_<StagedBlocks, Guard> staged(m, "StagedBlocks", "Complete blocks with a hash, not visible to others yet.");
  nb::class_<RegisteredBlocks, Guard> registered(m, "RegisteredBlocks", "References to registered, matchable blocks.");
  nb::class_<WeakBlocks> weak(m, "WeakBlocks", "Remembers blocks without holding them.");

  mutable_blocks
      .def_prop_ro("evicted", &MutableBlocks::evicted, "Blocks that the allocation evicted, in eviction order.")
      .def_prop_ro(
          "evicted_token_ids", [](const MutableBlocks& self) { return to_array(self.evicted_tokens()); },
          "Their token ids, one block after another, where events carry them; else empty.")
      .def("stage", &stage, "identities"_a.none(), nb::sig("def stage(self, identities: Identities) -> StagedBlocks"),
           "Give each block its identity; consumes this guard.")
      .def(
          "register", &commit, "identities"_a.none(), "token_ids"_a.none() = nb::none(),
          nb::sig("def register(self, identities: Identities, token_ids: understudy.core_types.Ints | None = None) -> "
                  "RegisteredBlocks"),
          "Stage and register in one call; consumes this guard. Where events carry token ids, those of all blocks must "
          "be given, unless some tier of the store has each of them.")
      .def(
          "take",
          [](MutableBlocks& self, Int count) {
            return MutableBlocks(self.manager(), self.split(read_uint(count, "count")));
          },
          "count"_a.none(), nb::sig("def take(self, count: int) -> MutableBlocks"),
          "Move the first `count` blocks into a guard of their own.");

  staged.def_prop_ro("identities", &StagedBlocks::identities)
      .def("register", &register_staged, "token_ids"_a.none() = nb::none(),
           "Make the blocks matchable; consumes this guard. Under `reject` the result may hold other ids.")
      .def("reset", &unstage, "Back to mutable blocks with the same ids; consumes this guard.");

  registered.def_prop_ro("identities", &RegisteredBlocks::identities)
      .def_prop_ro(
          "token_ids", &tokens_of,
          "Those of the blocks, one after another, where events carry them; else empty. With them a copy is registered "
          "in another store, which has no other way to know.")
      .def("clone", &clone, "A second guard over the same blocks, with its own references.")
      .def(
          "take",
          [](RegisteredBlocks& self, Int count) {
            const Identities all = self.identities();
            std::vector<SlotId> head = self.split(read_uint(count, "count"));
            const std::size_t cut = head.size();
            self.drop_identities(cut);
            return RegisteredBlocks(self.manager(), std::move(head), all.slice(0, cut));
          },
          "count"_a.none(), nb::sig("def take(self, count: int) -> RegisteredBlocks"),
          "Move the first `count` blocks into a guard of their own.")
      .def(
          "weak",
          [](const RegisteredBlocks& self) {
            self.require_live();
            return WeakBlocks{self.manager(), self.ids(), self.identities()};
          },
          "Remember the blocks without holding them.")
      .def(
          "set_reset_on_release",
          [](const RegisteredBlocks& self, bool value) {
            self.require_live();
            self.manager().store->set_reset_on_release(self.manager().pool, self.ids(), value);
          },
          "value"_a, "Whether the blocks are emptied, not cached, when the last reference is released.")
      .def(
          "release", [](RegisteredBlocks& self, bool tail_first) { self.release(tail_first); }, "tail_first"_a = true,
          "Drop the references, by default from the last block to the first, so that a tail is evicted before "
          "its head. Idempotent.");

  weak.def("__len__", [](const WeakBlocks& self) { return self.ids.size(); })
      .def("__repr__",
           [](const WeakBlocks& self) { return nb::str("<WeakBlocks: {} blocks, not held>").format(self.ids.size()); })
      .def_ro("identities", &WeakBlocks::identities)
      .def("upgrade", &upgrade,
           "References to all of the blocks, possibly in other copies, or None if any was evicted. Does not count as a "
           "use.");
}

}  // namespace understudy
