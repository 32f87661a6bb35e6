// The KV of one request in Python. understudy.kv.RequestKv adds the views.
#include "store/request_kv.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "base/exclusive_call.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "guards.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

// A request belongs to one thread at a time; long calls run without the GIL, so a concurrent call raises WrongState.
struct SharedRequest {
  SharedRequest(std::shared_ptr<BlockStore> store, std::size_t pool, TokenBlocks tokens, std::uint64_t max_output,
                bool register_blocks)
      : manager{store, pool}, kv(std::move(store), pool, std::move(tokens), max_output, register_blocks) {}
  ~SharedRequest();

  Manager manager;
  RequestKv kv;
  CallFlag call_flag;
};

// The safety net: blocks go back, and the leak is reported.
SharedRequest::~SharedRequest() {
  const std::size_t held = kv.held_blocks();
  if (held == 0) return;
  kv.close();
  report_leak(manager, held, "close()");
}

// `blocks` returns the size of the call; it runs under the ExclusiveCall, since another thread may be changing it.
template <typename Blocks, typename Work>
auto on(SharedRequest& self, Blocks blocks, Work work) {
  const ExclusiveCall guard(self.call_flag, "this request");
  const std::size_t count = blocks(std::as_const(self.kv));
  if (self.kv.state() == RequestKv::State::Closed) return work(self.kv);  // raises, or has nothing to do
  return without_gil(self.manager, count, [&] { return work(self.kv); });
}

// A closed request keeps nothing alive: neither the store nor a policy written in Python.
void close_request(SharedRequest& self) {
  const ExclusiveCall guard(self.call_flag, "this request");
  if (self.kv.state() == RequestKv::State::Closed) return;
  without_gil(self.manager, self.kv.held_blocks(), [&] { self.kv.close(); });
  self.manager.store.reset();
}

std::size_t known_blocks(const RequestKv& kv) { return kv.tokens().num_blocks(); }
std::size_t held(const RequestKv& kv) { return kv.held_blocks(); }
std::size_t scheduled_blocks(const RequestKv& kv) { return kv.scheduled_tokens() / kv.tokens().block_size(); }
std::size_t one(const RequestKv&) { return 1; }

void make_request(SharedRequest* self, const Manager& manager, Ints prompt, Int max_output_tokens,
                  const std::string& salt, const std::string& lora, Runs mm_runs, bool register_blocks) {
  const IntArray<Token> tokens(prompt, "prompt");
  const std::uint64_t max_output = read_uint(max_output_tokens, "max_output_tokens");
  const std::vector<MultimodalRun> runs = read_runs(mm_runs, "mm_runs");
  without_gil(manager, tokens.span().size() / manager.store->block_size(), [&] {
    new (self) SharedRequest(manager.store, manager.pool,
                             TokenBlocks(tokens.span(), manager.store->block_size(), salt_hash(salt, lora), runs),
                             max_output, register_blocks);
  });
}

std::size_t read_count(nb::handle value) { return read_uint(value, "tokens", TokenBlocks::kMaxTokens); }

Token read_token(nb::handle value) { return static_cast<Token>(read_uint(value, "token", 0xFFFFFFFFu)); }

Array<std::int32_t> pages_of(const RequestKv& kv, std::size_t length) {
  const auto held = kv.pages().first((length + kv.tokens().block_size() - 1) / kv.tokens().block_size());
  return to_array(std::vector<std::int32_t>(held.begin(), held.end()));
}

Array<std::int32_t> pages(SharedRequest& self) {
  const ExclusiveCall guard(self.call_flag, "this request");
  return pages_of(self.kv, self.kv.view_length());
}

std::optional<Array<std::int32_t>> pages_ahead(SharedRequest& self) {
  if (!on(self, one, [](RequestKv& kv) { return kv.schedule_ahead(); })) return std::nullopt;
  const ExclusiveCall guard(self.call_flag, "this request");
  return pages_of(self.kv, self.kv.view_length() + 1);
}

Array<Token> tokens_array(SharedRequest& self) {
  const ExclusiveCall guard(self.call_flag, "this request");
  const auto tokens = self.kv.tokens().tokens();
  return to_array(std::vector<Token>(tokens.begin(), tokens.end()));
}

template <auto Read>
auto read(SharedRequest& self) {
  const ExclusiveCall guard(self.call_flag, "this request");
  return (self.kv.*Read)();
}

}  // namespace

void bind_request_kv(nb::module_& m) {
  nb::class_<RequestKv::Outcome>(m, "StepOutcome", "Result of applying a step.")
      .def_ro("blocks_registered", &RequestKv::Outcome::blocks_registered, "Blocks that the step completed.")
      .def_ro("finished", &RequestKv::Outcome::finished, "The output budget is used up.");

  m.def(
      "lifetime_blocks",
      [](Int prompt_tokens, Int max_output_tokens, Int block_size) {
        const std::uint64_t size = read_uint(block_size, "block_size", BlockStore::kMaxBlockSize);
        if (size == 0) throw Error(ErrorKind::InvalidArgument, "block_size must be at least 1");
        return lifetime_blocks(read_uint(prompt_tokens, "prompt_tokens", TokenBlocks::kMaxTokens),
                               read_uint(max_output_tokens, "max_output_tokens", TokenBlocks::kMaxTokens), size);
      },
      "prompt_tokens"_a, "max_output_tokens"_a, "block_size"_a,
      "Blocks that a request draws at its peak. The last output token is sampled but never written.");

  nb::class_<SharedRequest>(m, "RequestKv", "The KV of one request: schedule, view, apply.")
      .def("__init__", &make_request, "manager"_a, "prompt"_a, "max_output_tokens"_a, nb::kw_only(), "salt"_a = "",
           "lora"_a = "", "mm_runs"_a = nb::make_tuple(), "prefix_caching"_a = true)
      .def(
          "match_prefix",
          [](SharedRequest& self) { return on(self, known_blocks, [](RequestKv& kv) { return kv.match_prefix(); }); },
          "Reference the cached blocks that begin the prompt; returns their tokens, at most all but one. On a new or "
          "preempted request only.")
      .def(
          "schedule_prefill",
          [](SharedRequest& self, Int tokens) {
            const std::size_t count = read_count(tokens);
            on(
                self, [&](const RequestKv& kv) { return count / kv.tokens().block_size(); },
                [&](RequestKv& kv) { kv.schedule_prefill(count); });
          },
          "tokens"_a.none(), nb::sig("def schedule_prefill(self, tokens: int) -> None"),
          "Allocate the blocks of the next `tokens` tokens of the prompt, all or none. CapacityExhausted without them.")
      .def(
          "schedule_decode", [](SharedRequest& self) { on(self, one, [](RequestKv& kv) { kv.schedule_decode(); }); },
          "Allocate the block of the next output token, if it needs one. CapacityExhausted without it.")
      .def(
          "schedule_speculative",
          [](SharedRequest& self, Int tokens) {
            const std::size_t count = read_count(tokens);
            return on(self, one, [&](RequestKv& kv) { return kv.schedule_speculative(count); });
          },
          "tokens"_a.none(), nb::sig("def schedule_speculative(self, tokens: int) -> int"),
          "Allocate for a token and up to `tokens` - 1 drafts; returns how many fit the output's limit.")
      .def("schedule_ahead", &pages_ahead,
           "Pages of the decode behind the scheduled one, whose block it takes; None when the output ends before it.")
      .def(
          "revert", [](SharedRequest& self) { on(self, held, [](RequestKv& kv) { kv.revert(); }); },
          "Undo the scheduled step: its blocks are free again.")
      .def_prop_ro("page_ids", &pages, "Pages of the scheduled step, in position order: exactly as many as it needs.")
      .def_prop_ro("view_length", &read<&RequestKv::view_length>,
                   "Tokens that the scheduled step's pages hold after it.")
      .def_prop_ro("scheduled_tokens", &read<&RequestKv::scheduled_tokens>,
                   "Tokens of the scheduled step; 0 without one.")
      .def(
          "apply_prefill",
          [](SharedRequest& self, Int token) {
            std::optional<Token> sampled;
            if (!token.is_none()) sampled = read_token(token);
            return on(self, scheduled_blocks, [&](RequestKv& kv) { return kv.apply_prefill(sampled); });
          },
          "token"_a.none() = nb::none(),
          "Commit the scheduled part of the prompt; with its last part, `token` is the first output token.")
      .def(
          "apply_decode",
          [](SharedRequest& self, Int token) {
            const Token sampled = read_token(token);
            return on(self, one, [&](RequestKv& kv) { return kv.apply_decode(sampled); });
          },
          "token"_a, "Commit the scheduled decode, with the token that it sampled.")
      .def(
          "apply_speculative",
          [](SharedRequest& self, Ints accepted) {
            const IntArray<Token> tokens(accepted, "accepted");
            return on(self, one, [&](RequestKv& kv) { return kv.apply_speculative(tokens.span()); });
          },
          "accepted"_a, "Commit the accepted tokens of a scheduled speculation; the others' blocks are free again.")
      .def(
          "preempt", [](SharedRequest& self) { on(self, held, [](RequestKv& kv) { kv.preempt(); }); },
          "Release all blocks; the tokens so far are the prompt of the restart.")
      .def(
          "close", [](SharedRequest& self) { close_request(self); }, "Release all blocks, in any state. Idempotent.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, kEnter)
      .def(
          "__exit__", [](SharedRequest& self, nb::args) { close_request(self); }, kExit)
      .def_prop_ro(
          "state", [](SharedRequest& self)->PyText<"understudy.core_types.RequestKvState"> {
            const ExclusiveCall guard(self.call_flag, "this request");
            return name_of(self.kv.state());
          },
          "idle, scheduled or closed.")
      .def_prop_ro("tokens", &tokens_array, "Prompt and output tokens so far.")
      .def_prop_ro(
          "block_size", [](const SharedRequest& self) { return self.kv.tokens().block_size(); }, "Tokens per block.")
      .def_prop_ro("prompt_tokens", &read<&RequestKv::prompt_tokens>,
                   "Tokens of the prompt; after a preemption, of the restart.")
      .def_prop_ro("prefill_target", &read<&RequestKv::prefill_target>,
                   "Tokens that prefill computes before the first new output token.")
      .def_prop_ro("computed_tokens", &read<&RequestKv::computed_tokens>, "Tokens whose KV is in the blocks.")
      .def_prop_ro("cached_tokens", &read<&RequestKv::cached_tokens>,
                   "Prompt tokens that the cache had at the last match.")
      .def_prop_ro("generated_tokens", &read<&RequestKv::generated_tokens>, "Output tokens so far.")
      .def_prop_ro("max_output_tokens", &read<&RequestKv::max_output_tokens>, "Most output tokens.")
      .def_prop_ro("finished", &read<&RequestKv::finished>, "Whether the output's limit is reached.")
      .def_prop_ro("registered_blocks", &read<&RequestKv::registered_blocks>,
                   "Blocks of this request that others can match.")
      .def_prop_ro("held_blocks", &read<&RequestKv::held_blocks>, "Blocks that this request references.");
}

}  // namespace understudy
