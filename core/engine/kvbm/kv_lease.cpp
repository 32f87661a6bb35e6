#include "engine/kvbm/kv_lease.hpp"

namespace understudy {

namespace {

void check_positions(std::span<const BlockIdentity> identities, std::size_t first, const char* name) {
  for (std::size_t i = first; i < identities.size(); ++i) {
    if (identities[i].position() == i) continue;
    throw Error(ErrorKind::InvalidArgument, name, "[", i, "] is the block at position ", identities[i].position(),
                "; give a sequence from its first block on");
  }
}

}  // namespace

BlockLease::BlockLease(std::shared_ptr<KvManager> manager) : manager_(std::move(manager)) {
  if (manager_->config().backend != KvManagerKind::Native) {
    throw Error(ErrorKind::WrongState, "leases need backend='native'; with 'kvbm', acquire and release blocks by name");
  }
}

BlockLease::~BlockLease() { release(); }

void BlockLease::allocate(std::size_t tokens, std::span<const BlockIdentity> prefix) {
  const std::uint64_t block_size = manager_->config().block_size;
  BlockStore& store = *manager_->store();
  if (tokens < tokens_) {
    throw Error(ErrorKind::InvalidArgument, "tokens must be at least the ", tokens_, " allocated already, got ",
                tokens);
  }
  const std::size_t blocks = static_cast<std::size_t>((tokens + block_size - 1) / block_size);
  std::vector<SlotId> slots(prefix.size());
  std::size_t unreferenced = 0;
  if (!prefix.empty()) {
    if (!slots_.empty()) {
      throw Error(ErrorKind::WrongState, "only the first allocation of a lease may reuse a prefix; this one holds ",
                  slots_.size(), " blocks");
    }
    if (!manager_->config().enable_prefix_caching) {
      throw Error(ErrorKind::InvalidArgument, "prefix must be empty when prefix caching is off");
    }
    if (prefix.size() > blocks) {
      throw Error(ErrorKind::InvalidArgument, "prefix has ", prefix.size(), " blocks, more than the ", blocks, " of ",
                  tokens, " tokens");
    }
    check_positions(prefix, 0, "prefix");
    const std::size_t resident = store.peek_prefix(0, prefix, slots.data(), &unreferenced);
    if (resident < prefix.size()) {
      throw Error(ErrorKind::WrongState, "prefix has ", prefix.size(), " blocks, but only the first ", resident,
                  " are resident; look again before allocating");
    }
  }
  const std::size_t fresh = blocks - (slots_.empty() ? prefix.size() : slots_.size());
  const std::uint64_t available = store.available(0) - unreferenced;
  if (fresh > available) {
    throw Error(ErrorKind::CapacityExhausted, "allocating ", tokens, " tokens takes ", fresh, " new blocks, but only ",
                available, " of ", manager_->config().num_gpu_blocks, " are available");
  }
  store.match_prefix(0, prefix, slots.data());
  slots.resize(prefix.size() + fresh);
  std::vector<BlockIdentity> evicted;
  store.allocate(0, std::span(slots).subspan(prefix.size()), &evicted);
  slots_.insert(slots_.end(), slots.begin(), slots.end());
  visible_ += prefix.size();
  tokens_ = tokens;
  manager_->log_call({});
  manager_->trace(fresh, evicted.size());
}

std::size_t BlockLease::finalize(std::size_t tokens, std::span<const BlockIdentity> identities,
                                 std::span<const Token> token_ids) {
  if (tokens > tokens_) {
    throw Error(ErrorKind::InvalidArgument, "tokens must be at most the ", tokens_, " allocated, got ", tokens);
  }
  const auto complete = static_cast<std::size_t>(tokens / manager_->config().block_size);
  if (!manager_->config().enable_prefix_caching || complete <= visible_) return 0;
  if (identities.size() < complete) {
    throw Error(ErrorKind::InvalidArgument, "identities must name the ", complete, " complete blocks of ", tokens,
                " tokens, got ", identities.size());
  }
  check_positions(identities.first(complete), visible_, "identities");
  const std::span<const BlockIdentity> fresh = identities.subspan(visible_, complete - visible_);
  manager_->check_tokens(fresh.size(), token_ids);
  manager_->store()->commit(0, std::span(slots_).subspan(visible_, fresh.size()), fresh, token_ids);
  visible_ = complete;
  const StoredRun run{0, fresh.front().parent_hash};
  manager_->log_call({&run, 1});
  return fresh.size();
}

void BlockLease::release() {
  manager_->store()->release(0, slots_, true);
  slots_.clear();
  tokens_ = visible_ = 0;
}

void BlockLease::discard() {
  // Blocks that another lease discarded first have no hash already.
  std::vector<SlotId> registered;
  for (std::size_t i = 0; i < visible_; ++i) {
    if (manager_->store()->is_registered(0, slots_[i])) registered.push_back(slots_[i]);
  }
  manager_->store()->unregister(0, registered);
  release();
  manager_->log_call({});
}

}  // namespace understudy
