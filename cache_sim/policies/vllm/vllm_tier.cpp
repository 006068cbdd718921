// The CPU tier as requests and traces see it: the look-up behind a local hit, the end of a
// schedule, and the verbs land, settle and evict tier=.
#include <algorithm>
#include <map>

#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {

/// Asks the tier behind whole blocks of the local hit. Its hit takes the place of one that ends
/// inside a block where it reaches further (rule 29). False: copies that it needs are in flight.
bool VllmPolicy::look_up_tier(VllmRequest& request) {
  BlockRequest& blocks = request.blocks;
  const BlockRules& rules = manager_.rules();
  blocks.offload = tier_->add();
  const std::int64_t tail = request.hit.tokens % rules.scheduler_block;
  const std::int64_t local = request.hit.tokens - tail;
  const std::optional<std::int64_t> found = tier_->look_up(blocks, local);
  if (!found) {
    tier_->forget(blocks.offload);
    return false;
  }
  request.external = *found > tail ? *found : 0;
  if (tail == 0 || request.external == 0) return true;
  request.hit.tokens = local;
  for (std::size_t group = 0; group < rules.groups.size(); ++group) {
    std::vector<BlockId>& columns = request.hit.columns[group];
    columns.resize(
        std::min(columns.size(), static_cast<std::size_t>(local / rules.groups[group].block)));
  }
  return true;
}

void VllmPolicy::end_schedule() {
  std::vector<const BlockRequest*> rows;
  for (const std::uint32_t place : scheduled_)
    if (!requests_[place].is_loading) rows.push_back(&requests_[place].blocks);
  std::map<OffloadTier::RequestId, const BlockRequest*> all;
  for (const VllmRequest& request : requests_)
    if (request.id.exists()) all.emplace(request.blocks.offload, &request.blocks);
  tier_->end_schedule(rows, all, manager_.take_handoffs(), manager_.copies());
}

/// Before the request's blocks are given back. Those that a load in flight writes are kept until it
/// has landed.
void VllmPolicy::leave_tier(VllmRequest& request, Verb verb) {
  BlockRequest& blocks = request.blocks;
  if (verb == Verb::preempt) return tier_->preempt(blocks);
  if (blocks.runs) manager_.give_back_skipped(blocks, blocks.computed);
  tier_->finish(blocks, verb == Verb::abort);
  if (!request.is_loading || tier_->take_loaded(blocks.offload) ||
      !manager_.rules().aborted_loads_keep_blocks)
    return;
  leaving_.push_back(std::move(blocks));
  blocks = BlockRequest{};
}

Result<Reply> VllmPolicy::land(const Operation& operation) {
  if (!tier_) return fail("land: a config without cpu_chunks= has no copies");
  return names_host(operation).map(
      [&](bool to_host) { return Reply{}.set(ReplyField::n, tier_->land(to_host) ? 1 : 0); });
}

/// The scheduler hears at the end of a step which copies have landed.
Result<Reply> VllmPolicy::settle() {
  if (!tier_) return fail("settle: a config without cpu_chunks= has no copies");
  if (!scheduled_.empty()) forward();
  std::vector<OffloadTier::RequestId> loaded;
  const std::int64_t count = tier_->settle(loaded);
  for (const OffloadTier::RequestId id : loaded) {
    const auto found =
        std::find_if(leaving_.begin(), leaving_.end(),
                     [&](const BlockRequest& request) { return request.offload == id; });
    if (found == leaving_.end()) continue;
    tier_->take_loaded(id);
    manager_.free(*found);
    leaving_.erase(found);
  }
  if (count > 0) ++changes_;
  return Reply{}.set(ReplyField::n, count);
}

Result<Reply> VllmPolicy::evict(const Operation& operation) {
  const Result<bool> of_host = names_host(operation);
  if (!of_host) return tl::unexpected(of_host.error());
  if (operation.tier.exists() && !tier_)
    return fail("evict: tier= is for a config with cpu_chunks=");
  if (!*of_host) return evict_keys(std::max<std::int64_t>(operation.kv, 0));
  forward();  // what an earlier reset flushes has to land before the next one
  const std::int64_t chunks = std::ssize(tier_->chunks().all());
  tier_->reset();
  ++changes_;
  return Reply{}.set(ReplyField::kv, chunks).set(ReplyField::state, 0);
}

void VllmPolicy::add_tier(const std::function<void(std::int64_t)>& add) const {
  for (const auto& [key, chunk] : tier_->chunks().all()) {
    const auto [rank, position, group] = chunk.rank;
    for (const std::int64_t number :
         {std::int64_t{key.group}, std::int64_t{key.key} + 1, std::int64_t{chunk.readers} + 1,
          std::int64_t{chunk.index}, rank, -position})
      add(number);
  }
  add(0);
  const auto in_flight = [](const std::deque<OffloadTier::Job>& jobs) {
    return std::count_if(jobs.begin(), jobs.end(),
                         [](const OffloadTier::Job& job) { return !job.landed; });
  };
  add(std::ssize(tier_->waiting()));
  add(in_flight(tier_->stores()));
  add(in_flight(tier_->loads()));
}

}  // namespace lockstep::cache_sim
