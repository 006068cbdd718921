// The CPU tier as requests and traces see it: the look-up behind a local hit, the end of a
// schedule, and the verbs land, settle and evict tier=.
#include <algorithm>
#include <map>

#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {

/// Asks the tiers. A request that a tier with a disk refuses is known to it, until it is admitted
/// or another one has its name (rule 40).
bool VllmPolicy::look_up_tier(const Operation& operation, VllmRequest& request) {
  OffloadTier::RequestId& id = request.blocks.offload;
  if (!tier_) {
    id = ++last_offload_;
    return ask_tiers(request);
  }
  const auto asked = asked_.find(operation.id.index());
  const bool asks_again = asked != asked_.end() && asked->second.admission == operation.text();
  if (asked != asked_.end() && !asks_again) tier_->leave(asked->second.blocks.offload);
  id = asks_again ? asked->second.blocks.offload : tier_->add();
  const std::int64_t promoted = tier_->promoted();
  const bool is_told = ask_tiers(request);
  if (tier_->promoted() != promoted) request.seen = ++changes_;
  if (is_told)
    asked_.erase(operation.id.index());
  else if (has_disk())
    asked_[operation.id.index()] = {request.blocks, operation.text()};
  else
    tier_->forget(id);
  return is_told;
}

/// Asks the tiers behind whole blocks of the local hit; the first one that has something loads
/// (rule 51). Its hit takes the place of one that ends inside a block where it reaches further
/// (rule 29). False: copies that it needs are in flight.
bool VllmPolicy::ask_tiers(VllmRequest& request) {
  BlockRequest& blocks = request.blocks;
  const BlockRules& rules = manager_.rules();
  const std::int64_t tail = request.hit.tokens % rules.scheduler_block;
  const std::int64_t local = request.hit.tokens - tail;
  const std::optional<std::int64_t> of_chunks = tier_ ? tier_->look_up(blocks, local) : 0;
  if (!of_chunks) return false;
  const std::int64_t of_blocks = simple_ ? simple_->look_up(blocks, local) : 0;
  const std::int64_t found = *of_chunks > 0 ? *of_chunks : of_blocks;
  request.from_blocks = *of_chunks == 0 || (of_blocks > 0 && !rules.loads_from_the_tier_of_the_hit);
  request.external = found > tail ? found : 0;
  if (tail == 0 || request.external == 0) return true;
  request.hit.tokens = local;
  for (std::size_t group = 0; group < rules.groups.size(); ++group) {
    std::vector<BlockId>& columns = request.hit.columns[group];
    columns.resize(
        std::min(columns.size(), static_cast<std::size_t>(local / rules.groups[group].block)));
  }
  return true;
}

/// The request has got its blocks, to which so many tokens are loaded. Called again, with none,
/// when it goes on after that.
void VllmPolicy::take_tier_blocks(const VllmRequest& request, std::int64_t external) {
  const std::int64_t local = request.hit.tokens;
  if (tier_ && external > 0 && !request.from_blocks) tier_->load(request.blocks, local, external);
  if (!simple_) return;
  if (!request.from_blocks) external = 0;
  simple_->allocated(request.blocks, local, external);
  if (tier_ && external > 0) tier_->note_blocks(request.blocks);
}

bool VllmPolicy::take_loaded(std::uint64_t request) {
  return (tier_ && tier_->take_loaded(request)) || (simple_ && simple_->take_loaded(request));
}

/// The chunks' stores that have to land do so before any load starts.
void VllmPolicy::end_schedule() {
  const std::vector<BlockManager::Handoff> handoffs = manager_.take_handoffs();
  std::vector<SimpleTier::Row> rows;
  for (const std::uint32_t place : scheduled_) {
    const VllmRequest& request = requests_[place];
    if (!request.is_loading) rows.push_back({&request.blocks, request.start, request.begins});
  }
  if (tier_) {
    std::vector<const BlockRequest*> scheduled;
    scheduled.reserve(rows.size());
    for (const SimpleTier::Row& row : rows) scheduled.push_back(row.request);
    std::map<OffloadTier::RequestId, const BlockRequest*> all;
    for (const VllmRequest& request : requests_)
      if (request.id.exists()) all.emplace(request.blocks.offload, &request.blocks);
    tier_->end_schedule(scheduled, all, handoffs, manager_.copies());
  }
  if (simple_) simple_->end_schedule(rows, handoffs);
}

/// Before the request's blocks are given back. Those that a load in flight writes are kept until it
/// has landed.
void VllmPolicy::leave_tier(VllmRequest& request, Verb verb) {
  BlockRequest& blocks = request.blocks;
  if (verb == Verb::preempt) {
    if (tier_) tier_->preempt(blocks);
    if (simple_) simple_->preempt(blocks);
    return;
  }
  if (blocks.runs) manager_.give_back_skipped(blocks, blocks.computed);
  if (tier_) tier_->finish(blocks, verb == Verb::abort);
  if (simple_) simple_->finish(blocks);
  if (!request.is_loading || take_loaded(blocks.offload) ||
      !manager_.rules().aborted_loads_keep_blocks)
    return;
  leaving_.push_back(std::move(blocks));
  blocks = BlockRequest{};
}

bool VllmPolicy::land_one(bool to_host) {
  return (tier_ && tier_->land(to_host)) || (simple_ && simple_->land(to_host));
}

Result<Reply> VllmPolicy::land(const Operation& operation) {
  if (!has_tier()) return fail("land: a config without cpu_chunks= or cpu_blocks= has no copies");
  if (names_disk(operation)) return end_disk_copy(operation);
  return names_host(operation).map(
      [&](bool to_host) { return Reply{}.set(ReplyField::n, land_one(to_host) ? 1 : 0); });
}

/// A copy to the disk, or from it to the host, has landed or failed (rule 41).
Result<Reply> VllmPolicy::end_disk_copy(const Operation& operation) {
  const std::string verb(to_string(operation.verb));
  if (!has_disk()) return fail(verb + ": a config without disk=1 has none");
  if (operation.rank != Operation::kAbsent)
    return fail(verb + ": rank= is for ranks with disks of their own, and here there is one disk");
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
  if (!has_tier()) return fail("settle: a config without cpu_chunks= or cpu_blocks= has no copies");
  if (!scheduled_.empty() || has_disk()) forward();
  if (has_disk() && tier_->has_ended_disk_copies()) forward();
  std::vector<OffloadTier::RequestId> loaded;
  std::int64_t count = tier_ ? tier_->settle(loaded) + tier_->take_noted() : 0;
  if (simple_) count += simple_->settle(loaded);
  for (const OffloadTier::RequestId id : loaded) {
    const auto found = std::ranges::find(leaving_, id, &BlockRequest::offload);
    if (found == leaving_.end()) continue;
    take_loaded(id);
    manager_.free(*found);
    leaving_.erase(found);
  }
  if (count > 0) ++changes_;
  return Reply{}.set(ReplyField::n, count);
}

Result<Reply> VllmPolicy::evict(const Operation& operation) {
  if (names_disk(operation)) {
    if (!has_disk()) return fail("evict: a config without disk=1 has none");
    return Reply{}.set(ReplyField::kv, tier_->empty_disk()).set(ReplyField::state, 0);
  }
  const Result<bool> of_host = names_host(operation);
  if (!of_host) return tl::unexpected(of_host.error());
  if (operation.tier.exists() && !has_tier())
    return fail("evict: tier= is for a config with cpu_chunks= or cpu_blocks=");
  if (!*of_host) return evict_keys(std::max<std::int64_t>(operation.kv, 0));
  forward();  // what an earlier reset flushes has to land before the next one
  const std::int64_t evicted = reset_tier();
  ++changes_;
  return Reply{}.set(ReplyField::kv, evicted).set(ReplyField::state, 0);
}

/// Returns the number of chunks and host blocks that were found by a key.
std::int64_t VllmPolicy::reset_tier() {
  const std::int64_t blocks = simple_ ? simple_->reset() : 0;
  return blocks + (tier_ ? tier_->reset() : 0);
}

void VllmPolicy::add_tier(const std::function<void(std::int64_t)>& add) const {
  const auto in_flight = [](const auto& jobs) {
    return std::ranges::count_if(jobs, [](const auto& job) { return !job.landed; });
  };
  if (simple_) {
    add_pool(simple_->host(), add);
    add(simple_->cursor());
    add(in_flight(simple_->stores()));
    add(in_flight(simple_->loads()));
  }
  if (!tier_) return;
  for (const auto& [key, chunk] : tier_->chunks().all()) {
    const auto [rank, position, group] = chunk.rank;
    for (const std::int64_t number :
         {std::int64_t{key.group}, std::int64_t{key.key} + 1, std::int64_t{chunk.readers} + 1,
          std::int64_t{chunk.index}, rank, -position})
      add(number);
  }
  add(0);
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
    add(std::ranges::count(*jobs, DiskTier::End::none, &DiskTier::Job::end));
}

}  // namespace lockstep::cache_sim
