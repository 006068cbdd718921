// The CPU tier as requests and traces see it: the look-up behind a local hit, the end of a
// schedule, and the verbs land, settle and evict tier=.
#include <algorithm>
#include <map>

#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {

/// Asks the tier. A request that a tier with a disk refuses is known to it, until it is admitted or
/// another one has its name (rule 40).
bool VllmPolicy::look_up_tier(const Operation& operation, VllmRequest& request) {
  OffloadTier::RequestId& id = request.blocks.offload;
  const auto asked = asked_.find(operation.id.index());
  const bool asks_again = asked != asked_.end() && asked->second.admission == operation.text();
  if (asked != asked_.end() && !asks_again) tier_->leave(asked->second.blocks.offload);
  id = asks_again ? asked->second.blocks.offload : tier_->add();
  const std::int64_t promoted = tier_->promoted();
  const bool is_told = ask_tier(request);
  if (tier_->promoted() != promoted) request.seen = ++changes_;
  if (is_told)
    asked_.erase(operation.id.index());
  else if (tier_->disk() != nullptr)
    asked_[operation.id.index()] = {request.blocks, operation.text()};
  else
    tier_->forget(id);
  return is_told;
}

/// Asks the tier behind whole blocks of the local hit. Its hit takes the place of one that ends
/// inside a block where it reaches further (rule 29). False: copies that it needs are in flight.
bool VllmPolicy::ask_tier(VllmRequest& request) {
  BlockRequest& blocks = request.blocks;
  const BlockRules& rules = manager_.rules();
  const std::int64_t tail = request.hit.tokens % rules.scheduler_block;
  const std::int64_t local = request.hit.tokens - tail;
  const std::optional<std::int64_t> found = tier_->look_up(blocks, local);
  if (!found) return false;
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
  if (names_disk(operation)) return end_disk_copy(operation);
  return names_host(operation).map(
      [&](bool to_host) { return Reply{}.set(ReplyField::n, tier_->land(to_host) ? 1 : 0); });
}

/// A copy to the disk, or from it to the host, has landed or failed (rule 41).
Result<Reply> VllmPolicy::end_disk_copy(const Operation& operation) {
  const std::string verb(to_string(operation.verb));
  if (!tier_ || tier_->disk() == nullptr) return fail(verb + ": a config without disk=1 has none");
  const bool is_promotion = operation.from.exists();
  if (is_promotion ? operation.from.text() != "disk" || operation.tier.text() != "host"
                   : operation.tier.text() != "disk")
    return fail(verb + ": copies of the disk are those of tier=disk, and of tier=host from=disk");
  const bool fails = operation.verb == Verb::fail;
  const bool is_there =
      tier_->end_disk_copy(is_promotion, fails ? DiskTier::End::failed : DiskTier::End::landed);
  return Reply{}.set(ReplyField::n, is_there ? 1 : 0);
}

/// The scheduler hears at the end of a step which copies have landed. Of those of the disk it takes
/// note in a step, so one more may follow (rule 41).
Result<Reply> VllmPolicy::settle() {
  if (!tier_) return fail("settle: a config without cpu_chunks= has no copies");
  if (!scheduled_.empty() || tier_->disk() != nullptr) forward();
  if (tier_->has_ended_disk_copies()) forward();
  std::vector<OffloadTier::RequestId> loaded;
  const std::int64_t count = tier_->settle(loaded) + tier_->take_noted();
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
  if (names_disk(operation)) {
    if (!tier_ || tier_->disk() == nullptr) return fail("evict: a config without disk=1 has none");
    return Reply{}.set(ReplyField::kv, tier_->empty_disk()).set(ReplyField::state, 0);
  }
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
  const DiskTier* const disk = tier_->disk();
  if (disk == nullptr) return;
  for (const auto& [key, contents] : disk->chunks()) {
    add(key.group);
    add(std::int64_t{key.key} + 1);
  }
  add(0);
  add(std::ssize(disk->asked));
  for (const auto* const jobs : {&disk->cascades, &disk->promotions})
    add(std::count_if(jobs->begin(), jobs->end(),
                      [](const DiskTier::Job& job) { return job.end == DiskTier::End::none; }));
}

}  // namespace lockstep::cache_sim
